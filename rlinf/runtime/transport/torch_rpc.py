"""The torch RPC transport, and the only file that imports `torch.distributed.rpc`.

Flows in: frames from `Link`. Flows out: one `rpc_async` per frame, whose response carries the peer's own next frame.
Who wakes whom: RPC threads hand frames and responses to the loop with `call_soon_threadsafe`; they never touch more.

Known about torch RPC, and met here: a peer's death only fails what is in flight to it, so `watch` keeps one call open
that a living peer answers only when it leaves; messages may run on any thread, so order is kept by `Link`'s sequence
numbers; arguments are pickled, so every peer is trusted (docs/security.md).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import sys
import threading
import warnings
from collections.abc import Callable, Collection
from typing import Any

import torch
from torch.distributed import rpc

from rlinf.runtime.base.errors import UserError
from rlinf.runtime.base.tasks import cores, in_thread, settle
from rlinf.runtime.transport import network
from rlinf.runtime.transport.link import Frame, Packed, Receiver, pack, unpack
from rlinf.runtime.transport.network import SCHEME

NOTHING: Packed = (b"", [])
PULSE = torch.zeros(())
"""The tensor that `probe` sends there and back."""
THREADS = 16
"""Of each process's agent, however many hosts there are: handlers only hand over to the loop. Torch's own joining once
hung beyond 18 workers with fewer threads than workers (pytorch#85607); 40 processes with 4 threads each join and end
with torch 2.13 (`tests/runtime/test_scale.py`)."""
FAREWELL = 5.0
"""Seconds that leaving waits for the others to leave as well."""
BREAKING_OFF = 2.0
"""Seconds that leaving without a farewell may take, which only has to stop threads of this process."""

_current: RpcTransport | None = None  # torch RPC holds one agent per process; its handlers find it here


class RpcTransport:
    """This process's end of the torch RPC mesh.

    Args:
        host, hosts: rank and number of processes, as torchrun gives them.
        timeout: seconds until joining the mesh is given up.
    """

    def __init__(self, host: int, hosts: int, *, timeout: float = 300.0):
        global _current
        self.host = host
        self.hosts = hosts
        self._loop: asyncio.AbstractEventLoop | None = None
        self._receiver: Receiver | None = None
        self._lock = threading.Lock()  # between RPC threads and the loop's: guards what follows
        self._early: list[Callable[[], None]] = []
        self._watchers: list[torch.futures.Future[bytes]] = []
        self._closing = False
        self._graceful = False
        self._watched: set[int] = set()
        self.offer: tuple[str, bytes] | None = None
        """Where this host listens for processes of its machine, and the token to say there."""
        _current = self
        options = rpc.TensorPipeRpcBackendOptions(
            num_worker_threads=THREADS,
            rpc_timeout=timeout,
            init_method=f"{SCHEME}://",
            **_transport_options(),
        )
        with warnings.catch_warnings():  # of init_rpc, about init_rpc
            warnings.filterwarnings("ignore", "You are using a Backend", UserWarning)
            with network.noticing() as opened:
                rpc.init_rpc(_name(host), rank=host, world_size=hosts, rpc_backend_options=options)
        network.close_to_strangers(opened, host, hosts, _reach, timeout)

    def bind(self, receiver: Receiver) -> None:
        self._receiver = receiver
        with self._lock:
            self._loop = asyncio.get_running_loop()
            for arrive in self._early:  # a fast peer may speak before this process has a loop
                self._loop.call_soon(arrive)
            self._early.clear()

    # Sending -----------------------------------------------------------------------------------------------------

    def send(self, host: int, frame: Frame, answered: Callable[[Frame | None], None]) -> None:
        try:
            packed = pack(frame)
        except Exception as error:  # without this frame the lane can deliver nothing behind it
            self._break(host, f"a frame for it could not be pickled: {error!r}")
            return
        self._call(host, _receive, (self.host, *packed), lambda answer: answered(_unpack_answer(answer)))

    def watch(self, host: int) -> None:
        if host not in self._watched and host != self.host:
            self._watched.add(host)
            self._call(host, _stay, (self.host,), lambda _: None)

    def neighbours(self, hosts: Collection[int]) -> None:
        """Torch RPC chooses its ways itself."""

    async def ask_offer(self, host: int) -> tuple[str, bytes] | None:
        """Where a host of this machine listens, if it does (see `lane.py`)."""
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[tuple[str, bytes] | None] = loop.create_future()

        def settled(future: torch.futures.Future[Any]) -> None:  # on an RPC thread
            try:
                offer = future.value()
            except Exception:  # its loss is told by whoever watches it; here it only means that there is no lane
                offer = None
            _post(loop, settle, answer, offer, None)

        rpc.rpc_async(_name(host), _offer, timeout=0).add_done_callback(settled)
        return await answer

    def probe(self, host: int, answered: Callable[[], None]) -> None:
        """Ask whether a host's process lives; `answered` runs on the loop.

        A tensor operator is answered by the threads of its agent without Python: a blocked loop or a held GIL there
        keeps nobody waiting.
        """
        self._call(host, torch.neg, (PULSE,), lambda _: answered())

    def _call(self, host: int, handler: Callable[..., Any], args: tuple[Any, ...], done: Callable[[Any], None]) -> None:
        assert self._loop is not None
        loop = self._loop

        def settled(future: torch.futures.Future[Any]) -> None:  # on an RPC thread
            try:
                answer = future.value()
            except Exception as error:  # whatever the agent raises means that the lane to this peer is broken
                _post(loop, self._lost, host, str(error))
            else:
                _post(loop, done, answer)

        try:
            future = rpc.rpc_async(_name(host), handler, args=args, timeout=0)
        except RuntimeError as error:
            self._break(host, str(error))
            return
        future.add_done_callback(settled)

    def _break(self, host: int, reason: str) -> None:
        """Report a loss soon: whoever is sending must not be told while it does."""
        assert self._loop is not None
        self._loop.call_soon(self._lost, host, reason)

    def _lost(self, host: int, reason: str) -> None:
        if self._receiver is not None and not self._closing:
            self._receiver.lost(host, _described(reason))

    # Receiving (handlers run on RPC threads) ---------------------------------------------------------------------

    def _take(self, source: int, packed: Packed, answer: torch.futures.Future[Packed]) -> None:
        def arrive() -> None:
            if self._receiver is None or self._closing:
                if self._graceful:
                    answer.set_result(NOTHING)
                return
            try:
                frame = unpack(*packed)
            except Exception as error:  # nothing behind this frame can be delivered any more
                answer.set_exception(error)  # type: ignore[arg-type]  # torch's annotation is wrong
                self._lost(source, f"it sent a frame that cannot be read here: {error!r}")
                return
            self._receiver.receive(source, frame, lambda reply: answer.set_result(_pack_answer(reply)))

        with self._lock:
            if self._loop is None:
                self._early.append(arrive)
                return
        _post(self._loop, arrive)

    def _hold(self) -> torch.futures.Future[bytes]:
        future: torch.futures.Future[bytes] = torch.futures.Future()
        with self._lock:
            if not self._closing:
                self._watchers.append(future)
            elif self._graceful:
                future.set_result(b"")
        return future

    async def close(self, graceful: bool) -> None:
        """Leave the mesh. Graceful waits until every host leaves; otherwise peers see this host as lost."""
        with self._lock:
            self._closing, self._graceful = True, graceful
            watchers, self._watchers = self._watchers, []
        if graceful:
            for future in watchers:
                future.set_result(b"")
        logging.getLogger("torch.distributed.rpc").setLevel(logging.CRITICAL)  # it logs what is suppressed here
        # fails where a peer that is already gone cannot take part in the farewell
        leaving = in_thread(lambda: rpc.shutdown(graceful=graceful, timeout=FAREWELL))
        await asyncio.wait({leaving}, timeout=2 * FAREWELL if graceful else BREAKING_OFF)
        self._receiver = None


SPINNING_CORES = 4
"""Cores per host from which on TensorPipe may use its shared-memory transport. That one spins on a core in every
process, idle or not: it answers sooner on an idle machine, but on shared cores it was measured to take half the CPU of
a training run, and to answer later than sockets do."""


CHANNELS = ("cma", "mpt_uv", "basic") if sys.platform == "linux" else ("mpt_uv", "basic")
"""TensorPipe's channels for memory of the CPU, best first. Where there is a GPU it would also start those for CUDA
(cuda_ipc, cuda_gdr, cuda_xth, cuda_basic), each with threads, and streams on every GPU, for tensors that never enter
it: CUDA tensors go by other routes, or as copies."""


def _transport_options() -> dict[str, Any]:
    """Which of TensorPipe's transports to use; `RLINF_RPC_TRANSPORT=shm` or `=uv` (sockets) overrides the choice."""
    choice = os.environ.get("RLINF_RPC_TRANSPORT")
    if choice not in (None, "shm", "uv"):
        raise UserError(f"RLINF_RPC_TRANSPORT is {choice!r}; it can be shm or uv")
    per_host = cores() / int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    if choice == "shm" or (choice is None and per_host >= SPINNING_CORES):
        return {"_channels": list(CHANNELS)} if torch.cuda.is_available() else {}
    return {"_transports": ["uv"], "_channels": ["basic"]}


def _name(host: int) -> str:
    return f"host{host}"


def _reach(others: list[int]) -> None:
    """Make the pipes to these hosts."""
    torch.futures.wait_all([rpc.rpc_async(_name(other), _nothing) for other in others])


def _nothing() -> None:
    pass


def _described(reason: str) -> str:
    """Why a connection broke, without the places in TensorPipe, which are of use there only."""
    first_line, *_ = reason.splitlines() or [""]
    words = first_line.partition(" (this error originated at ")[0]
    if words.startswith("EOF") or "connection reset" in words:
        return f"{words}: its process has ended (killed with exit code -9: by the kernel, if memory ran out: see dmesg)"
    return words


def _post(loop: asyncio.AbstractEventLoop, fn: Callable[..., None], *args: Any) -> None:
    with contextlib.suppress(RuntimeError):  # the loop is closed: nobody is left to tell
        loop.call_soon_threadsafe(fn, *args)


@rpc.functions.async_execution  # type: ignore[untyped-decorator]
def _receive(source: int, data: bytes, tensors: list[torch.Tensor]) -> torch.futures.Future[Packed]:
    answer: torch.futures.Future[Packed] = torch.futures.Future()
    assert _current is not None
    _current._take(source, (data, tensors), answer)
    return answer


@rpc.functions.async_execution  # type: ignore[untyped-decorator]
def _stay(source: int) -> torch.futures.Future[bytes]:
    """Answered when this host leaves; a broken lane answers it with an error at the other end."""
    assert _current is not None
    return _current._hold()


def _offer() -> tuple[str, bytes] | None:
    """Where this host listens for processes of its machine."""
    return None if _current is None else _current.offer


def _pack_answer(frame: Frame | None) -> Packed:
    return NOTHING if frame is None else pack(frame)


def _unpack_answer(answer: Packed) -> Frame | None:
    data, tensors = answer
    return unpack(data, tensors) if data else None
