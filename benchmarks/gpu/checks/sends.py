"""Does memory come back that was sent to other processes: read there, thrown away unread, and held by one that dies?"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import weakref
from typing import Any

import torch

import rlinf
from benchmarks.gpu.checks import ranks
from benchmarks.gpu.checks.device import SHARED, emptied, held_bytes
from benchmarks.gpu.checks.judging import Bound, judge
from benchmarks.gpu.scale import Outcome, Scale
from rlinf.runtime.actor.actor import Actor, endpoint
from rlinf.runtime.base.errors import HostLost
from rlinf.runtime.system.system import ActorSystem

HELD = 8
"""Tensors that the process holds which is killed."""
SENDS = (
    Bound("sent", least=20),
    Bound("discarded", least=10),
    Bound("read_too_few", most=0),
    Bound("read_though_discarded", most=0),
    Bound("sender_left_tensors", most=0),
    Bound("sender_left_bytes", most=0, needs=SHARED),
    Bound("answers_left_bytes", most=0, needs=SHARED),
    Bound("held_by_the_dead_bytes", least=1),
    Bound("after_the_loss_left_bytes", most=0, needs=SHARED),
    Bound("loss_seen", equals="yes"),
    Bound("ipc_share", least=0.9, needs=SHARED),
)


class Holder(Actor):
    """Takes tensors, and gives some."""

    async def setup(self, scale: Scale) -> None:
        self.scale = scale
        self.kept: list[torch.Tensor] = []
        self.arrived = 0
        self.before = held_bytes(scale.device)

    @endpoint
    async def take(self, tensor: torch.Tensor, keep: bool = False, gate: object = None) -> float:
        """Read a tensor, once `gate` has a value, and keep it for good if told so."""
        self.arrived += 1
        if keep:
            self.kept.append(tensor)
        return float(tensor[0])

    @endpoint
    async def give(self, number: int) -> torch.Tensor:
        """A tensor that the caller may or may not read."""
        return made(self.scale, number)

    @endpoint
    async def never(self) -> None:
        """Has no value until the call is cancelled."""
        await asyncio.get_running_loop().create_future()

    @endpoint
    async def seen(self) -> dict[str, int]:
        """How many tensors came, and the bytes that are on the device here beyond those at the beginning."""
        emptied(self.scale.device)
        return {"arrived": self.arrived, "left": held_bytes(self.scale.device) - self.before}

    @endpoint
    async def die(self) -> None:
        """End this process as a crash would."""
        os.kill(os.getpid(), signal.SIGKILL)


def made(scale: Scale, number: int) -> torch.Tensor:
    """A tensor that is large enough to go by a handle."""
    return torch.full((scale.of(2 << 20, 40_000),), float(number), device=scale.device)


def sends(scale: Scale) -> Outcome:
    """500 tensors to another process, half of them thrown away unread, as many back; a third process that holds some is
    killed."""
    ended = ranks.run(scale, "sends:one_rank", 3, scale.limit * 0.9)
    print(ended.output)
    return judge(scale, {**ended.told, "exit": str(ended.codes)}, SENDS)


def one_rank(scale: Scale) -> None:
    """In each of three ranks: 0 sends, 1 receives, 2 dies."""
    before = held_bytes(scale.device)
    lost = "no"
    try:
        rlinf.run(lambda system: _sent(system, scale, before))
    except HostLost:
        lost = "yes"
    if os.environ["RANK"] == "0":
        emptied(scale.device)
        ranks.tell({"loss_seen": lost, "after_the_loss_left_bytes": held_bytes(scale.device) - before})


async def _sent(system: ActorSystem, scale: Scale, before: int) -> None:
    near = await system.spawn(Holder, hosts=[1], name="near", scale=scale)
    doomed = await system.spawn(Holder, hosts=[2], name="doomed", scale=scale)
    count = scale.of(500, 40)
    alive: list[weakref.ref[torch.Tensor]] = []
    gate = doomed[0].never()
    for number in range(count):
        tensor = made(scale, number)
        alive.append(weakref.ref(tensor))
        if number % 2:
            await asyncio.gather(near[0].take(tensor), near[0].give(number))
        else:
            await _thrown_away(near[0].take(tensor, gate=gate), near[0].give(number))
        del tensor
    await _thrown_away(gate)
    seen = await near[0].seen()
    trace = scale.work / "sends.json"
    await system.trace(trace)
    sent = ranks.routes(trace)
    emptied(scale.device)
    await asyncio.sleep(0.2)  # what was read is told to its sender by messages of its own
    emptied(scale.device)
    ranks.tell(
        {
            "sent": count,
            "discarded": count // 2,
            "read_too_few": count // 2 - seen["arrived"],
            "read_though_discarded": seen["arrived"] - count // 2,
            "sender_left_tensors": sum(one() is not None for one in alive),
            "sender_left_bytes": held_bytes(scale.device) - before,
            "answers_left_bytes": (await near[0].seen())["left"],
            "ipc_share": sent.get("ipc", 0) / max(1, sum(sent.values())),
            "routes": str(sent),
        }
    )
    held = 0
    for number in range(HELD):
        tensor = made(scale, number)
        held += tensor.nbytes
        await doomed[0].take(tensor, keep=True)
        del tensor
    ranks.tell({"held_by_the_dead_bytes": held})
    with contextlib.suppress(Exception):  # a call that cannot be answered; the loss of the host is what ends this
        await doomed[0].die()
    await asyncio.sleep(30)


async def _thrown_away(*promises: Any) -> None:
    """Want these no more, now that they are on their way: what comes is not read, and no more than begun to be sent."""
    await asyncio.sleep(0)
    for promise in promises:
        promise.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await promise
