"""Whether a group of actors can be made as asked, before anything is.

Flows in: the arguments of `ActorSystem.spawn`. Flows out: one message that says what to change. Nobody is woken.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from rlinf.runtime.actor.actor import Actor
from rlinf.runtime.base.errors import UserError
from rlinf.runtime.transport.link import check_hosts

if TYPE_CHECKING:
    from .system import ActorSystem

RESERVED = frozenset({"each", "any", "names", "hosts"})
"""Names that groups use, so that no endpoint may have them."""


def check_spawn(
    system: ActorSystem,
    cls: Any,
    hosts: Sequence[int],
    name: str,
    devices: Sequence[Any] | None,
    kwargs: dict[str, Any],
) -> None:
    """See that a group can be made as asked.

    Raises:
        UserError: it cannot; the text says what to change.
    """
    if not (isinstance(cls, type) and issubclass(cls, Actor)):
        raise UserError(f"spawn needs a subclass of rlinf.Actor, got {cls!r}")
    if not hosts:
        raise UserError(f"{name}: hosts is empty; name at least one host")
    complaint = system._network.want(hosts) if system._network else check_hosts(hosts, system.hosts)
    if complaint:
        fix = "" if system._network else f"; start more processes (torchrun --nproc-per-node {max(hosts) + 1})"
        raise UserError(f"{name}: {complaint}{fix}")
    if devices is not None and len(devices) != len(hosts):
        raise UserError(f"{name}: devices has {len(devices)} entries for {len(hosts)} ranks; give one per rank")
    if bad := RESERVED & set(cls.endpoints):
        raise UserError(f"{cls.__name__}: an endpoint cannot be called {sorted(bad)[0]!r}, groups use that name")
    abroad = [h for h in hosts if not system._host.codec.by_reference(h)]
    if abroad and "<locals>" in cls.__qualname__:
        raise UserError(
            f"{cls.__qualname__} is defined inside a function, so host {abroad[0]} cannot import it: "
            "move the class to the top level of a module"
        )
    try:
        inspect.signature(cls.setup).bind(None, **kwargs)
    except TypeError as error:
        raise UserError(
            f"{cls.__name__}.setup{inspect.signature(cls.setup)} does not fit spawn's arguments: {error}"
        ) from None
