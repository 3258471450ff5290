"""`rlinf train` in a checkout: `torchrun --nproc-per-node 2 launch.py --config configs/quickstart.yaml`."""

import sys

from rlinf.__main__ import launch

if __name__ == "__main__":
    sys.exit(launch(sys.argv[1:]))
