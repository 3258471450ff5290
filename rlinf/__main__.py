"""`python -m rlinf`: see `rlinf.cli`."""

import sys

from rlinf.cli import main

if __name__ == "__main__":
    sys.exit(main())
