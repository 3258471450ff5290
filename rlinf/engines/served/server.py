"""What a kind of inference server says of itself: the seam between `engine.py` and a folder such as `engines/sglang`.

Flows in: requests as plain token ids, weights. Flows out: chunks of tokens. Nobody waits here: the methods are awaited
by the engine, which supervises the server's process, keeps all tokens and decides when an answer has ended.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np

from rlinf.data.sample import ImageRef
from rlinf.data.weights import Weights
from rlinf.engines.base import Sampling
from rlinf.engines.served.http import Http, Lost, Refused

__all__ = ["Ask", "Chunk", "Lost", "Refused", "Server"]


@dataclass(frozen=True, slots=True)
class Chunk:
    """A piece of an answer, as it streams."""

    tokens: Sequence[int]
    """Those that have come since the last chunk."""
    logprobs: Sequence[float]
    """Of each, nats, under log-softmax(logits / temperature), or log-softmax(logits) where the temperature is 0."""
    routes: np.ndarray | None = None
    """Of the text from its beginning, with the last piece, where the server tells of experts; see `Sample.routes`."""


@dataclass(frozen=True, slots=True)
class Ask:
    """One request of the server's; an answer may take several, one after the other."""

    id: str
    """Unique, and no other's beginning; for `abort`."""
    ids: Sequence[int]
    """Prompt and tokens so far."""
    sampling: Sampling
    """As the answer wants it, but for its lengths: those count from here, and there are no stop texts."""
    seed: int
    """Of the random choices, from 0 to 2^31 - 1: the same for all asks of one answer. A server whose random numbers are
    counted by position then continues an answer as it would have gone on."""
    whole_seed: int
    """The request's own seed, for a server that takes all of its 63 bits."""
    answered: int
    """Tokens at the end of `ids` that are of the answer: the next is drawn by random number `answered` of the seed."""
    images: tuple[ImageRef, ...] = ()
    """Pictures of the prompt, in the order of their placeholders; none for a server that does not read them."""
    banned: tuple[int, ...] = ()
    """Tokens that are never drawn, and whose probability is 0 in the log-probs."""


class Server(Protocol):
    """One server process, of one kind.

    Every method that talks to the server raises `Refused` or `Lost` as `Http` does, and nothing else.
    """

    kind: str
    """What messages call it, such as `SGLang`."""
    seeded: bool
    """A seed decides an answer, whatever shares the batch and wherever it was interrupted, up to rounding."""
    reads_images: bool
    """It takes pictures with a prompt."""
    routes: bool
    """Chunks tell to which experts tokens went."""

    def command(self, model: Path, host: str, port: int) -> Sequence[str]:
        """The command line of the child process."""

    def environment(self) -> Mapping[str, str | None]:
        """Variables to add to ours for the child, or to remove if None (such as RANK of torchrun)."""

    async def greet(self, http: Http) -> None:
        """See whether a server that was just started is up, and learn what its version can do.

        Raises:
            Lost: it is not up yet.
        """

    async def healthy(self, http: Http) -> None:
        """Ask a running server, which may be computing, for a sign of life; raises if there is none."""

    def generate(self, http: Http, ask: Ask) -> AsyncGenerator[Chunk, None]:
        """Stream an answer. It ends at its length, at a stop token (which is its last), or because it was aborted: the
        engine sees from the tokens which."""

    async def abort(self, http: Http, ids: Sequence[str] | None) -> None:
        """End asks, None: all of them; those that the server does not know (any more, or yet) are no error."""

    async def quiet(self, http: Http) -> None:
        """Called when no ask is open: returns once the server computes nothing, and has forgotten what it has read."""

    async def update(self, http: Http, weights: Weights) -> None:
        """Take over other weights. Called after `quiet`, with names and shapes that fit; a failure may leave a mixture
        behind, after which the server is restarted."""

    async def release(self, http: Http) -> None:
        """Give device memory back, if it can. Called after `quiet`."""

    async def regain(self, http: Http, weights: Weights | None) -> None:
        """Undo `release`, with these weights, or the model's own if None, in use afterwards."""

    def close(self) -> None:
        """Let go of what it holds on this side, such as shared memory. The process has ended."""
