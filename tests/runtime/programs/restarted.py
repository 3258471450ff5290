"""A job whose second process dies once: torchrun starts all anew, and they must not meet the dead."""

import os
import signal

import torch

import rlinf
from rlinf import Actor, endpoint


class Mortal(Actor):
    @endpoint
    async def die(self):
        os.kill(os.getpid(), signal.SIGKILL)

    @endpoint
    async def meet(self, attempt: str):
        group = await self.system.collectives.group("all", [0, 1])
        said = torch.tensor([float(attempt) if self.rank == 0 else -1.0])
        await (group.send(said, dst=1) if self.rank == 0 else group.recv(said, src=0))
        return attempt if said.item() == float(attempt) else "alone"


async def main(system):
    mortals = await system.spawn(Mortal, hosts=[0, 1], name="mortal")
    attempt = os.environ["TORCHELASTIC_RESTART_COUNT"]
    assert await mortals.meet(attempt) == [attempt] * 2
    print(f"met in attempt {attempt}", flush=True)
    if attempt == "0":
        await mortals[1].die()


rlinf.run(main)
