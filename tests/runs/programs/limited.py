"""launch.py where no file may get larger than 64 KB, as if the disk were full: less than a model has."""

import resource
import sys

from rlinf.cli.main import main

if __name__ == "__main__":
    resource.setrlimit(resource.RLIMIT_FSIZE, (64 * 1024, 64 * 1024))
    sys.exit(main())
