"""Off-policy learning over all ranks of a job: from acting, from demonstrations, and after a restart."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch

import rlinf
from rlinf.actors.off_policy_trainer import SacTrainer
from rlinf.actors.policy import PolicyActor
from rlinf.data.step import EmbodiedStep
from rlinf.flows.record import record
from rlinf.flows.sac import sac
from tests.flows.reaching import SOFT, Expert, environments, policy_for


async def main(system: rlinf.ActorSystem) -> None:
    """Writes down the weights after each stage."""
    out = Path(sys.argv[1])
    config = policy_for({**SOFT, "critics": 3})
    shown = await environments(system, "shown", hosts=[0], auto_reset=False)
    await record(shown, await system.spawn(Expert, hosts=[0], name="expert"), out.parent / "shown", 8)
    settings = {"policy": config, "batch": 7, "warmup": 4, "lr": 1e-2, "subset": 2, "utd": 0.5, "capacity": 40}
    every = list(range(system.hosts))
    roles: dict[str, Any] = {
        "env": await environments(system, hosts=[0], slices=2),
        "policy": await system.spawn(PolicyActor, keep_following=True, hosts=[0], name="policy", policy=config),
        "trainer": await system.spawn(SacTrainer, hosts=every, name="trainer", **settings),
    }
    found = {}

    async def note(name: str, trainer: Any) -> None:
        found[name] = {key: tensor.clone() for key, tensor in (await trainer.weights()).named()}

    async def steps(first: int, last: int) -> None:
        for number in range(first, last):
            await sac(EmbodiedStep(number, 3, 2, fresh=False), **roles)

    await roles["trainer"].imitate(str(out.parent / "shown"), steps=5, batch=5)
    await note("imitated", roles["trainer"])
    await roles["policy"].load(roles["trainer"].weights())
    await steps(0, 2)
    await roles["trainer"].save(str(out.parent / "checkpoint"))
    environment = await roles["env"][0].state()
    await steps(2, 3)
    await note("learned", roles["trainer"])
    roles["trainer"] = await system.spawn(SacTrainer, hosts=every, name="again", **settings)
    await roles["trainer"].restore(str(out.parent / "checkpoint"))
    await roles["policy"].load(roles["trainer"].weights())
    await roles["env"][0].restore(environment)
    await steps(2, 3)
    await note("resumed", roles["trainer"])
    torch.save(found, out)


if __name__ == "__main__":
    rlinf.run(main, stall_after=60.0)
