"""Queue items that their queue's host does not open: small ones ride along as bytes, big ones stay at their producer.

Flows in: bytes, or where a value is kept. Flows out: the value, on the host that consumes it. Who wakes whom: the end
of an item at its queue tells the producer's host that it need not be kept any more.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rlinf.runtime.values.codec import ValueRef
from rlinf.runtime.values.dereference import holds_promise, resolve

if TYPE_CHECKING:
    from rlinf.runtime.actor.host import Host


class Sealed:
    """An item as its queue has it. What travels on to the consumer is a copy that keeps nothing.

    Args:
        host: the queue's; None for a copy.
        blob: the item, if it rode along.
        ref: where it is kept otherwise.
    """

    __slots__ = ("blob", "host", "ref")

    def __init__(self, host: Host | None, blob: bytes | None, ref: ValueRef | None):
        self.host = host
        self.blob = blob
        self.ref = ref

    def __reduce__(self) -> Any:
        return Sealed, (None, self.blob, self.ref)

    def __del__(self) -> None:
        if self.host is not None and self.ref is not None:
            self.host.drop(self.ref.owner, self.ref.key)


async def opened(value: Any, host: Host) -> Any:
    """The value of an item (or of a list of items), on the host where it is consumed."""
    if type(value) is Sealed:
        if value.ref is not None:
            return await host.values.fetch(value.ref)
        assert value.blob is not None
        return host.codec.unseal(value.blob)
    if type(value) is list and any(type(each) is Sealed for each in value):
        return [await opened(each, host) for each in value]
    return await resolve(value) if holds_promise(value) else value


def is_kept(value: Any) -> bool:
    """Whether opening it means fetching it from its producer."""
    if type(value) is list:
        return any(type(each) is Sealed and each.ref is not None for each in value)
    return type(value) is Sealed and value.ref is not None
