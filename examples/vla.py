"""A tiny vision-language-action policy: it imitates a few episodes of a script, then learns from its own by PPO.

    python examples/vla.py            # half a minute on a CPU; no simulator to install

It sees pictures of 16 x 16, in which a point is to be moved onto a target, reads an instruction, and answers with
action tokens. You will see a row of a picture, and how many of 64 trials it solves: untaught, taught, and trained.
"""

import tempfile
from pathlib import Path

import rlinf
from rlinf.actors.env import EnvActor
from rlinf.actors.policy import PolicyActor
from rlinf.actors.policy_trainer import PolicyTrainer
from rlinf.data.step import EmbodiedStep
from rlinf.envs import toy
from rlinf.flows.embodied import embodied
from rlinf.flows.evaluate import trials
from rlinf.flows.imitate import imitate
from rlinf.flows.record import record
from rlinf.models.policy.build import fitted

WORLD = {"simulator": "rlinf.envs.toy.Reach", "options": {"dims": 1, "pixels": 16}, "workers": 0, "max_steps": 12}
LAYER = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 1}
POLICY = {"type": "vla", "instruction": "reach", "text_length": 6, "bins": 9, "patch_size": 8}  # the state is not seen
PPO = {"name": "ppo", "overrides": {"advantage": {"gamma": 0.9, "lam": 0.95}}}
LEARNING = {"lr": 5e-4, "critic_lr": 1e-3, "epochs": 2, "minibatch": 128}
SHOWN, TRIALS = 8, 64


class Script(rlinf.Actor):
    @rlinf.endpoint
    async def act(self, key, output, *, greedy=False, keep=True):
        return toy.expert(output.observation)


async def main(system: rlinf.ActorSystem, steps=8):
    env = await system.spawn(EnvActor, name="env", num_envs=64, **WORLD)
    shown = await system.spawn(EnvActor, name="shown", num_envs=SHOWN, auto_reset=False, seed=1, **WORLD)
    tests = await system.spawn(EnvActor, name="tests", num_envs=TRIALS, auto_reset=False, seed=2, **WORLD)
    sizes = await env[0].shapes()
    config = fitted(POLICY | {"vision": LAYER, "decoder": LAYER}, sizes["shapes"], sizes["action_size"])
    policy = await system.spawn(PolicyActor, name="policy", policy=config)
    trainer = await system.spawn(PolicyTrainer, name="trainer", policy=config, algorithm=PPO, **LEARNING)
    row = (await shown[0].reset(0, 0)).observation["rgb"][0, 8]  # [16, 3]: the target is red, the point green
    print("it sees |" + "".join(".TP*"[int(red > 0) + 2 * int(green > 0)] for red, green, _ in row.tolist()) + "|")

    async def told(what):
        solved = sum(bool(episode.success_once) for episode in await trials(tests, policy, TRIALS))
        print(f"{what:24} {solved:2} of {TRIALS} {'#' * (solved // 2)}", flush=True)

    await told("untaught")
    with tempfile.TemporaryDirectory() as directory:
        await record(shown, await system.spawn(Script, name="script"), Path(directory), SHOWN)
        await imitate(policy, trainer, Path(directory), steps=60, batch=32, lr=1e-3)
    await told(f"shown {SHOWN} episodes")
    for step in range(steps):
        await embodied(EmbodiedStep(step, horizon=12), env, policy, trainer)
        if step % 2:
            await told(f"PPO, {64 * 12 * (step + 1):6,} actions")


if __name__ == "__main__":
    rlinf.run(main, hosts=1)
