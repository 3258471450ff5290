"""Runs a program on all processes of a job; what is not a bug ends it with one message.

In: what rank 0 runs, and a configuration's section `system`. Out: nothing, or errors that the commands print as they
are. The runtime finds lost and stuck processes.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from typing import TYPE_CHECKING

from rlinf.config.common import SystemConfig
from rlinf.config.loading import InputError, RunFailure
from rlinf.runtime.base.errors import StallError, TraceError, UserError

if TYPE_CHECKING:
    from rlinf.runtime.system.system import ActorSystem


def run_to_end(
    main: Callable[[ActorSystem], Awaitable[None]], limits: SystemConfig, memory: Mapping[int, int] | None = None
) -> None:
    """Run a program on the processes that torchrun started, or in this one.

    Args:
        main: what rank 0 runs.
        limits: how long to wait for hosts, and for something to move.
        memory: bytes per device; None lets any number of roles fit.

    Raises:
        InputError: the job cannot run as it was started, for instance because its processes do not meet.
        RunFailure: nothing moved any more, or the trace could not be written.
        HostLost: a process died or fell silent, and that has been printed.
        Exception: whatever `main` raised.
    """
    from rlinf.runtime.system.torchrun import run  # torch comes with it, which takes seconds

    try:
        # Always traced: where a step's time went is told from it; the key `trace` only decides about the file.
        run(
            main,
            hosts=1,
            trace=True,
            device_memory=memory,
            stall_after=limits.stall_after,
            host_timeout=limits.host_timeout,
        )
    except UserError as error:
        raise InputError(str(error)) from error
    except (StallError, TraceError) as error:
        raise RunFailure(str(error)) from error
