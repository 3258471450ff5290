"""A program that is done while a thread of it is still in a collective, which it would try again for ever."""

import asyncio
import contextlib
import threading

import torch

import rlinf
from rlinf import Actor, endpoint


class Member(Actor):
    async def setup(self) -> None:
        self.mesh = await self.system.collectives.mesh("pair", [0, 1])
        self.inside = threading.Event()

    @endpoint
    async def hang(self) -> None:
        group = self.mesh.get_group()

        def collective() -> None:
            self.inside.set()
            while True:
                with contextlib.suppress(RuntimeError):
                    group.allreduce([torch.ones(1)]).wait()

        def again_though_interrupted() -> None:
            try:
                collective()
            except BaseException:
                collective()

        await self.compute(again_though_interrupted)

    @endpoint
    async def hangs(self) -> None:
        await asyncio.to_thread(self.inside.wait)


async def main(system):
    members = await system.spawn(Member, hosts=[0, 1], name="member")
    hanging = members[0].hang()
    await members[0].hangs()
    print("done", flush=True)
    del hanging


if __name__ == "__main__":
    rlinf.run(main)
