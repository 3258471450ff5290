"""A program that is told to end, in a grace that is soon over, while a thread of it is inside torch."""

import asyncio
import os
import signal
import sys
import time

import torch

import rlinf
from rlinf import Actor, endpoint


def tell() -> None:
    os.kill(os.getpid(), signal.SIGTERM)


def learn() -> None:
    """Many calls of torch, each of which asks for the interpreter when it returns."""
    weights = torch.ones(64, 64, requires_grad=True)
    tell()
    while True:
        (weights @ weights).sum().backward()


def wait() -> None:
    """One call that does not return."""
    tell()
    time.sleep(600)


class Busy(Actor):
    @endpoint
    async def learn(self) -> None:
        await self.compute(learn)

    @endpoint
    async def wait(self) -> None:
        await asyncio.to_thread(wait)


async def main(system):
    busy = await system.spawn(Busy, name="busy")
    await getattr(busy, sys.argv[1])()


if __name__ == "__main__":
    rlinf.run(main, grace=0.1)
