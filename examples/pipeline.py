"""Three stages that overlap by themselves, since their flow says what depends on what, and not when anything runs.

    python examples/pipeline.py                             # seconds on a CPU
    torchrun --nproc-per-node 3 examples/pipeline.py        # a stage in each process

Each stage sleeps for some milliseconds per item, as if a device computed. You will see the lanes of the three.
"""

import asyncio
import time

import rlinf
from rlinf import Actor, ActorSystem, endpoint

ITEMS = 16
SECONDS = {"generate": 0.05, "score": 0.03, "train": 0.04}
COLUMN = 0.02  # seconds per character of a lane


class Stage(Actor):
    async def setup(self, seconds: float) -> None:
        self.seconds = seconds

    @endpoint
    async def produce(self, count: int):
        for index in range(count):
            start = time.time()
            await asyncio.sleep(self.seconds)
            yield {"index": index, "spans": [(start, time.time())]}

    @endpoint
    async def work(self, item: dict) -> dict:
        start = time.time()
        await asyncio.sleep(self.seconds)
        return {**item, "spans": [*item["spans"], (start, time.time())]}


async def pipeline(generate, score, train):
    produced = generate[0].produce(ITEMS)
    scored = score.work.map(produced, concurrency=1)
    return await train.work.map(scored, concurrency=1).collect()


async def main(system: ActorSystem) -> None:
    stages = [
        await system.spawn(Stage, hosts=[index % system.hosts], name=name, seconds=seconds)
        for index, (name, seconds) in enumerate(SECONDS.items())
    ]
    start = time.time()
    items = await pipeline(*stages)
    took = time.time() - start

    for lane, name in enumerate(SECONDS):
        cells = [" "] * (int(took / COLUMN) + 1)
        for item in items:
            begin, end = item["spans"][lane]
            for column in range(int((begin - start) / COLUMN), int((end - start) / COLUMN)):
                cells[column] = "0123456789abcdefghijklmnopqrstuvwxyz"[item["index"]]
        print(f"{name:>9} |{''.join(cells)}|")

    apart = ITEMS * sum(SECONDS.values())
    slowest = max(SECONDS.values())
    ideal = sum(SECONDS.values()) + (ITEMS - 1) * slowest
    print(f"one stage after the other {apart:.2f} s, ideal overlap {ideal:.2f} s, this run {took:.2f} s")


if __name__ == "__main__":
    rlinf.run(main)
