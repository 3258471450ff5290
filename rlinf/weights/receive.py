"""Receiving weights: all ranks of a group switch to a new version, or none does.

Flows in: `load(weights)` on the whole group. Flows out: the version in use, or an error that names the rank, its host
and the phase. Who wakes whom: a `load` call that has arrived wakes rank 0's question on its rank; the answers of all
ranks wake rank 0, whose decision wakes every rank's `load`.

It is a two-phase commit, led by rank 0. First each rank verifies the checksums and checks that the weights fit, which
changes nothing; rank 0 asks every rank whether it has (`load_ready`), and a rank that has said yes does what rank 0
decides, whatever becomes of its own call. Then rank 0 has all of them switch (`load_decided`), or drops the round
(`load_abandon`) because somebody refused, failed, was cancelled or did not answer in time; a round that was dropped
cannot switch any more. Every rank switches in the order of rank 0's decisions, so ranks that get two versions at once
end on the same.

Devices are needed for the switch alone, and each rank takes its own for it: `load(trainer.weights())` holds none while
the trainer still needs them, and a rank that generates shares its lease with the switch. A rank that is parked knows
when it is onloaded that the new weights are `coming`, so that it need not bring back the old ones first.
"""

from __future__ import annotations

import asyncio
import itertools
from dataclasses import dataclass, field

import torch

from rlinf.data.weights import Weights
from rlinf.runtime.actor.actor import Actor, endpoint
from rlinf.runtime.base.errors import RuntimeFault
from rlinf.runtime.observe.stalls import Lock
from rlinf.weights.clock import Clock, tell_bytes

DEADLINE = 300.0
"""Seconds for all ranks to be ready, and again for all to switch: a slow network moves a large model in that time, and
other roles end what they do on shared devices."""
GRACE = 5.0
"""Seconds that a late rank has to say how far it is: an answer takes milliseconds unless its host is in trouble."""

Key = tuple[int, tuple[int, ...]]
"""`Weights.key`: by this, ranks know that they mean the same weights."""


class LoadError(RuntimeFault):
    """Weights were not loaded; the text names ranks, hosts and phase."""


class LoadRefused(LoadError, ValueError):
    """A rank found the weights damaged or not fitting, so no rank switched."""


class LoadTimeout(LoadError, TimeoutError):
    """Not all ranks were ready by the deadline, so no rank switched."""


class LoadTorn(LoadError):
    """Every rank was ready, but not all could switch: the group has more than one version."""


@dataclass(slots=True, eq=False)
class Offer:
    """Weights that one `load` call has brought to one rank."""

    weights: Weights
    """The weights."""
    phase: str = "verifying the checksums"
    """What the rank is doing with them."""
    ready: asyncio.Future[None] = field(default_factory=lambda: asyncio.get_running_loop().create_future())
    """Done when they were found whole and fitting, or not."""
    outcome: asyncio.Future[int] = field(default_factory=lambda: asyncio.get_running_loop().create_future())
    """The version in use after rank 0's decision, or why there is none."""
    asked: bool = False
    """A round waits for it."""
    round: int | None = None
    """The round that counts on it: rank 0 alone decides from then on."""


class Receiver(Actor):
    """Base class of actors that take over published weights. Subclasses say what fits, and how to switch.

    `load` is called on the whole group: a rank that is not called keeps the others from switching.
    """

    through_host = False
    """It hands weights on through host memory, wherever they come from."""

    def __init__(self) -> None:
        super().__init__()
        self._offers: list[Offer] = []
        self._arrival = asyncio.Condition()
        self._switching = Lock("switching weights")
        self._numbers = itertools.count()
        self.coming: Weights | None = None
        """What this rank will switch to as soon as it has its devices."""
        self.early: Weights | None = None
        """Those of them that it took over when it was onloaded."""

    async def check_weights(self, weights: Weights) -> None:
        """See whether the weights fit, and change nothing.

        Raises:
            ValueError: they do not; the text says what differs.
        """
        raise NotImplementedError

    async def switch_weights(self, weights: Weights) -> None:
        """Use these weights from now on. They were verified and checked, every other rank is ready too, and this rank
        has its devices."""
        raise NotImplementedError

    @endpoint(joint=True)
    async def load(self, weights: Weights, *, deadline: float = DEADLINE) -> int:
        """Switch to other weights, on all ranks or, with an error, on none.

        An older version, or the one in use, is as good as any. Cancelled before the decision, no rank switches;
        cancelled after it, all do, and then it takes effect.

        Args:
            weights: what to use; the same on every rank.
            deadline: seconds for all ranks to be ready, and again for all to switch.

        Returns:
            The version now in use.

        Raises:
            LoadRefused: (a ValueError) the weights are damaged, or do not fit.
            LoadTimeout: a rank was not ready in time.
            LoadTorn: a rank failed while it switched, or was too slow: the error says which rank has which version.
        """
        if not isinstance(weights, Weights):
            raise TypeError(f"load wants Weights, as trainer.weights() gives on rank 0, not {type(weights).__name__}")
        until = asyncio.get_running_loop().time() + deadline
        self.note("weights/arrived")
        offer = Offer(weights)
        async with self._arrival:
            self._offers.append(offer)
            self._arrival.notify_all()
        try:
            await self._prepare(offer, until, deadline)
            if self.rank == 0:
                return await self._lead(offer, until, deadline)
            return await self._follow(offer, until, deadline)
        finally:
            if offer.round is None:
                self._offers.remove(offer)
                if not offer.ready.done():
                    offer.ready.set_exception(LoadRefused(f"{self._here(offer)}: its call was cancelled"))
                    offer.ready.exception()  # seen: there may be nobody who asks

    # What every rank does ----------------------------------------------------------------------------------------

    async def _prepare(self, offer: Offer, until: float, deadline: float) -> None:
        """Verify and check; nothing changes."""
        clock = Clock()
        try:
            async with asyncio.timeout_at(until):
                await self.compute(_verify, offer.weights, clock)
                clock.tell(self)
                offer.phase = "checking that they fit"
                await self.check_weights(offer.weights)
        except Exception as error:
            here = f"{self._here(offer)}, {offer.phase}"
            if isinstance(error, TimeoutError):
                failure: LoadError = LoadTimeout(f"{here}, was not done after {deadline:g} s. No rank has switched")
            else:
                failure = LoadRefused(f"{here}: {type(error).__name__}: {error}. No rank has switched")
            offer.ready.set_exception(failure)
            offer.ready.exception()  # seen: there may be nobody who asks
            raise failure from error
        offer.phase = "ready"
        offer.ready.set_result(None)

    async def _follow(self, offer: Offer, until: float, deadline: float) -> int:
        """Wait for rank 0's decision: with a deadline until it counts on this rank, then for as long as it takes."""

        def expire() -> None:
            if offer.round is None and not offer.outcome.done():
                offer.outcome.set_exception(
                    LoadTimeout(
                        f"{self._here(offer)} was ready, but rank 0 (host {self.group.hosts[0]}) did not lead the "
                        f"switch within {deadline:g} s: was load() called on the whole group? No rank has switched"
                    )
                )

        timer = asyncio.get_running_loop().call_at(until, expire)
        try:
            return await asyncio.shield(offer.outcome)
        finally:
            timer.cancel()

    @endpoint
    async def load_ready(self, number: int, key: Key) -> None:
        """Rank 0 asks: returns once this rank has these weights, whole and fitting, and leaves the decision to rank 0.

        Args:
            number: of the round.
            key: `Weights.key`.

        Raises:
            LoadError: the weights are damaged, do not fit, or the call that brought them has ended.
        """
        async with self._arrival:
            await self._arrival.wait_for(lambda: self._unasked(key) is not None)
            offer = self._unasked(key)
            assert offer is not None
            offer.asked = True
        try:
            await asyncio.shield(offer.ready)
        finally:
            offer.asked = False
        if offer not in self._offers or offer.outcome.done():
            raise LoadRefused(f"{self._here(offer)}: its call has ended before all ranks were ready")
        offer.round = number

    @endpoint
    async def load_decided(self, number: int) -> int:
        """Rank 0 has decided: switch. Returns the version now in use."""
        offer = self._bound(number)
        if offer is None:
            raise LoadError(f"rank {self.rank} (host {self.host}) knows of no round {number} of load")
        self.coming = offer.weights
        try:
            version: int = await self.group[self.rank].load_switch(number)
            return version
        finally:
            if self.coming is offer.weights:
                self.coming = None

    @endpoint(device=True)
    async def load_switch(self, number: int) -> int:
        """Switch, on this rank's devices: what `load_decided` waits for. Returns the version now in use."""
        offer = self._bound(number)
        if offer is None:
            raise LoadError(f"rank {self.rank} (host {self.host}) knows of no round {number} of load")
        offer.phase, clock = "switching", Clock()
        async with self._switching:
            early, self.early = self.early, None
            with clock.phase("load"):
                if early is not offer.weights:  # if it fails, rank 0 tells this rank's `load` what became of all
                    await self.switch_weights(offer.weights)
                if any(bucket.is_cuda for bucket in offer.weights.buckets):
                    await self.compute(_copied, offer.weights)
        clock.tell(self)
        tell_bytes(self, offer.weights.buckets, through_host=self.through_host)
        self._offers.remove(offer)
        if not offer.outcome.done():
            offer.outcome.set_result(offer.weights.version)
        return offer.weights.version

    @endpoint
    async def load_abandon(self, number: int, key: Key, torn: str | None = None) -> str:
        """Rank 0 has given the round up. Returns how far this rank is.

        Args:
            number, key: see `load_ready`.
            torn: why, if ranks had begun to switch.
        """
        offer = self._bound(number)
        if offer is not None:
            self._offers.remove(offer)
            given_up = LoadError(f"{self._here(offer)} was ready, but rank 0 gave up. No rank has switched")
            if not offer.outcome.done():
                offer.outcome.set_exception(given_up if torn is None else LoadTorn(torn))
                offer.outcome.exception()  # seen: there may be nobody who asks
            return offer.phase
        return next((offer.phase for offer in self._offers if offer.weights.key == key), "the weights have not arrived")

    def _unasked(self, key: Key) -> Offer | None:
        # The newest: an older one of these weights may belong to a call that has failed and is just being cancelled.
        free = (offer for offer in reversed(self._offers) if not offer.asked and offer.round is None)
        return next((offer for offer in free if offer.weights.key == key), None)

    def _bound(self, number: int) -> Offer | None:
        return next((offer for offer in self._offers if offer.round == number), None)

    def _here(self, offer: Offer) -> str:
        return f"weights of version {offer.weights.version}: rank {self.rank} (host {self.host})"

    # What rank 0 does --------------------------------------------------------------------------------------------

    async def _lead(self, offer: Offer, until: float, deadline: float) -> int:
        """Run one round: all ready, then all switch."""
        number = next(self._numbers)
        await self._all_ready(number, offer, until, deadline)
        await self._all_switch(number, offer, deadline)
        return offer.weights.version

    async def _all_ready(self, number: int, offer: Offer, until: float, deadline: float) -> None:
        key = offer.weights.key
        asked = [rank.load_ready(number, key) for rank in self.group]
        left = max(0.0, until - asyncio.get_running_loop().time())
        try:
            done, late = await asyncio.wait(asked, timeout=left, return_when=asyncio.FIRST_EXCEPTION)
        except asyncio.CancelledError:
            for question in asked:
                question.cancel()
            self.group.load_abandon(number, key)  # a message each; nobody has to wait for its arrival
            raise
        failed = [question for question in asked if question in done and (question.cancelled() or question.exception())]
        if not failed and not late:
            return
        waiting = [rank for rank, question in enumerate(asked) if question in late]
        for question in late:
            question.cancel()
        phases = await self._abandon(number, key)
        if failed and not failed[0].cancelled():
            await failed[0]  # raises what that rank did
        whose = "; ".join(f"{self._name(rank)}: {phases[rank]}" for rank in waiting)
        raise LoadTimeout(
            f"weights of version {offer.weights.version}: {len(waiting)} of {self.world_size} ranks were not ready "
            f"after {deadline:g} s ({whose}). No rank has switched"
        )

    async def _abandon(self, number: int, key: Key) -> list[str]:
        """Have every rank drop a round; how far each of them was."""
        told = [rank.load_abandon(number, key) for rank in self.group]
        await asyncio.wait(told, timeout=GRACE)
        phases = []
        for answer in told:
            if not answer.done():
                answer.cancel()
                phases.append(f"does not answer within {GRACE:g} s")
            else:
                gone = answer.cancelled() or answer.exception() is not None
                phases.append("is gone" if gone else answer.result())
        return phases

    async def _all_switch(self, number: int, offer: Offer, deadline: float) -> None:
        """Have every rank switch. The decision has been made: a cancellation waits for its end."""
        told = [rank.load_decided(number) for rank in self.group]
        ended = asyncio.ensure_future(asyncio.wait(told, timeout=deadline))
        cancelled = False
        while not ended.done():
            try:
                await asyncio.shield(ended)
            except asyncio.CancelledError:
                cancelled = True
        states = [_ended(answer, offer.weights.version, deadline) for answer in told]
        if any(states):
            each = "; ".join(f"{self._name(rank)} {state or 'has them'}" for rank, state in enumerate(states))
            torn = (
                f"weights of version {offer.weights.version}: not every rank has switched, so load weights again or "
                f"resume from a checkpoint: {each}"
            )
            self.group.load_abandon(number, offer.weights.key, torn)  # a message each, as above
            raise LoadTorn(torn)
        if cancelled:
            raise asyncio.CancelledError

    def _name(self, rank: int) -> str:
        return f"rank {rank} (host {self.group.hosts[rank]})"


def _verify(weights: Weights, clock: Clock) -> None:
    with clock.phase("verify", weights.buckets):
        weights.verify()


def _copied(weights: Weights) -> None:
    """Wait until a GPU has read the buckets: their owner may use their memory for something else then."""
    for device in {bucket.device for bucket in weights.buckets if bucket.is_cuda}:
        torch.cuda.synchronize(device)


def _ended(answer: asyncio.Future[int], version: int, deadline: float) -> str:
    """Why a rank has not switched; nothing if it has."""
    if not answer.done():
        answer.cancel()
        return f"was still switching after {deadline:g} s"
    if answer.cancelled():
        return "was cancelled"
    error = answer.exception()
    if error is None:
        return ""
    return (
        f"failed while it switched, so neither the old version nor {version} is sure ({type(error).__name__}: {error})"
    )
