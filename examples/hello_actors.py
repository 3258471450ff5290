"""Actors in one minute: a group of two, calls to all or one of them, a value that travels, streams.

    python examples/hello_actors.py                             # seconds on a CPU
    torchrun --nproc-per-node 2 examples/hello_actors.py        # the same, in two processes

You will see who runs where, and what each call returns.
"""

import os

import rlinf
from rlinf import Actor, ActorSystem, Stream, endpoint


class Counter(Actor):
    async def setup(self, start: int = 0) -> None:
        self.value = start

    @endpoint
    async def add(self, n: int) -> int:
        self.value += n
        return self.value

    @endpoint
    async def where(self) -> str:
        return f"rank {self.rank} of {self.world_size}, on host {self.host}, in process {os.getpid()}"

    @endpoint
    async def count_to(self, n: int):
        for i in range(n):
            yield f"rank {self.rank} counts {i}"


async def main(system: ActorSystem) -> None:
    group = await system.spawn(Counter, hosts=[0, 1], name="counter", start=3)

    for line in await group.where():
        print(line)
    print("every rank adds 1:            ", await group.add(1))
    print("rank 0 adds 1:                ", await group[0].add(1))
    print("each rank adds its own number:", await group.each.add([10, 20]))

    # The inner call is not awaited: its value goes from rank 0 to rank 1 without passing through here.
    print("rank 1 adds what rank 0 has:  ", await group[1].add(group[0].add(0)))

    # Async generators are streams, ready while the others still count; `map` feeds whichever rank is free.
    async for line in group.count_to(2):
        print(line)
    print("100 items over both ranks:    ", len(await group.add.map(Stream.of([1] * 100)).collect()), "results")


if __name__ == "__main__":
    rlinf.run(main)
