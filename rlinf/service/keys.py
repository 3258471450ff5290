"""Keys of a service: who has which, and how much each may ask for at the same time."""

from __future__ import annotations

import hmac
from collections import Counter
from collections.abc import Mapping
from contextvars import ContextVar

from rlinf.service.checkpoints import Refused

KEY: ContextVar[str | None] = ContextVar("KEY", default=None)
"""Name of the key that a request shows; None: the service's own work, which sees everything."""


class Busy(Refused):
    """A request that is to be sent again later; it has had no turn."""

    def __init__(self, message: str) -> None:
        super().__init__(message, 429)


class Keys:
    """Whoever may use a service, and what each is waiting for.

    Args:
        keys: by name.
        most_requests: of a key that are promised and not done.
        most_tokens: of these.
    """

    def __init__(self, keys: Mapping[str, str], most_requests: int, most_tokens: int) -> None:
        self._keys = {name: key.encode() for name, key in keys.items()}
        self._most_requests, self._most_tokens = most_requests, most_tokens
        self._open: dict[str, tuple[str, int]] = {}  # requests: whose, and their tokens
        self._requests: Counter[str] = Counter()
        self._tokens: Counter[str] = Counter()

    def named(self, key: str) -> str:
        """Name of a key that a client shows.

        Raises:
            Refused: it is none.
        """
        encoded = key.encode("utf-8", "surrogateescape")
        names = [name for name, each in self._keys.items() if hmac.compare_digest(encoded, each)]
        if not names:
            raise Refused("show the service's key: api_key=…, or the environment variable TINKER_API_KEY", 401)
        return names[0]

    def signature(self, name: str, text: str) -> str:
        """Sign a text by a key.

        Raises:
            Refused: it is none any more.
        """
        if name not in self._keys:
            raise Refused(f"there is no key {name} any more", 403)
        return hmac.new(self._keys[name], text.encode(), "sha256").hexdigest()

    def admit(self, name: str, tokens: int) -> None:
        """See that a key has room for another request; for the first one it has always.

        Raises:
            Busy: it has not.
        """
        requests, waiting = self._requests[name], self._tokens[name]
        if requests >= self._most_requests:
            raise Busy(f"{requests} requests of this key are under way, as many as it may have; send it again later")
        if requests and waiting + tokens > self._most_tokens:
            raise Busy(
                f"requests of this key with {waiting} tokens are under way, and it may have {self._most_tokens}; send "
                f"the one of {tokens} again later"
            )

    def begin(self, id: str, name: str, tokens: int) -> None:
        """Count a request that was promised."""
        self._open[id] = name, tokens
        self._requests[name] += 1
        self._tokens[name] += tokens

    def end(self, id: str) -> None:
        """Count a request as done, if it was counted."""
        if id in self._open:
            name, tokens = self._open.pop(id)
            self._requests[name] -= 1
            self._tokens[name] -= tokens
