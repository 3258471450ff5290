"""Soft actor-critic, by hand: a point in a plane learns to reach its goal, from all that it remembers.

    python examples/sac.py            # ten seconds on a CPU; no simulator to install

Three roles: environments, a policy that acts in them, and a trainer with a replay buffer. You will see how many of 64
trials the policy solves by its likeliest actions, as it goes.
"""

import rlinf
from rlinf.actors.env import EnvActor
from rlinf.actors.off_policy_trainer import SacTrainer
from rlinf.actors.policy import PolicyActor
from rlinf.data.step import EmbodiedStep
from rlinf.flows.evaluate import trials
from rlinf.flows.sac import sac

WORLD = {"simulator": "rlinf.envs.toy.Reach", "options": {"dims": 2}, "workers": 0}
POLICY = {
    "type": "rlinf.models.policy.sac.SoftPolicy",
    "state_size": 4,  # where the point and its goal are
    "action_size": 2,
    "hidden": [64, 64],
}
LEARNING = {"batch": 64, "warmup": 200, "lr": 2e-3, "gamma": 0.9, "tau": 0.02, "alpha": 0.1}
TRIALS = 64


async def main(system: rlinf.ActorSystem, steps=16):
    env = await system.spawn(EnvActor, name="env", num_envs=8, **WORLD)
    policy = await system.spawn(PolicyActor, name="policy", policy=POLICY, keep_following=True)
    trainer = await system.spawn(SacTrainer, name="trainer", policy=POLICY, **LEARNING)
    tests = await system.spawn(EnvActor, name="tests", num_envs=TRIALS, auto_reset=False, seed=1, **WORLD)
    for step in range(steps + 1):
        if step % 2 == 0:
            tried = await trials(tests, policy, TRIALS)
            solved = sum(bool(episode.success_once) for episode in tried)
            print(f"after {step * 8 * 8:5} actions: {solved:2} of {TRIALS} {'#' * (solved // 2)}")
        await sac(EmbodiedStep(step, horizon=8, fresh=False), env, policy, trainer)


if __name__ == "__main__":
    rlinf.run(main, hosts=1)
