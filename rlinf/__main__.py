"""`python -m rlinf` is the command `rlinf`: see `rlinf.cli.commands`. `rlinf train` has the process to itself: signals
are answered in it from before the imports, which take seconds, to its end."""

import ctypes
import gc
import os
import signal
import sys
from collections.abc import Sequence

from rlinf.runs.starting import Starting

PR_SET_PDEATHSIG = 1
M_ARENA_MAX = -8
"""Option of glibc's `mallopt`."""


def main() -> int:
    """Answer the command line of this process; returns the exit code."""
    if sys.argv[1:2] == ["train"]:
        return launch(sys.argv[2:])
    from rlinf.cli.commands import main as answer

    return answer()


def share_heap() -> None:
    """Have all threads allocate from one heap, so that what one has freed serves the others: glibc gives threads heaps
    of their own, into which no large tensor fits. To be called before the first thread starts; elsewhere nothing
    happens."""
    if sys.platform == "linux" and (mallopt := getattr(ctypes.CDLL(None), "mallopt", None)) is not None:
        mallopt(M_ARENA_MAX, 1)


def launch(arguments: Sequence[str]) -> int:
    """Run `rlinf train`, which is all that this process is for; returns the exit code.

    Args:
        arguments: of `rlinf train`.
    """
    if "TORCHELASTIC_RUN_ID" in os.environ and sys.platform == "linux":
        # Whoever kills torchrun while this process still imports ends it too: it would wait for the others, and hold
        # the lock of its run directory, for minutes.
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
    share_heap()
    starting = Starting(process=True)
    gc.disable()  # imports make much and drop little: looking through it was a fifth of a start; a run turns it on
    try:
        from rlinf.cli.main import main as train  # which takes a while

        return train(arguments, starting=starting)
    finally:
        gc.freeze()  # the interpreter looks through what there is at its end, too, where nothing is to be freed


if __name__ == "__main__":
    sys.exit(main())
