"""`rlinf train` in a checkout: `torchrun --nproc-per-node 2 launch.py --config configs/quickstart.yaml`."""

import ctypes
import os
import signal
import sys

if "TORCHELASTIC_RUN_ID" in os.environ and sys.platform == "linux":
    # Whoever kills torchrun while this process still imports ends it too: it would wait for the others, and hold the
    # lock of its run directory, for minutes. 1 is PR_SET_PDEATHSIG.
    ctypes.CDLL(None).prctl(1, signal.SIGTERM)

from rlinf.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
