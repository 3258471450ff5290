"""The front door for one command line after the other, each a JSON list on a line of standard input: for each a line
with the exit code, what was said, and the child processes that are left."""

import contextlib
import io
import json
import os
import subprocess
import sys

from rlinf.cli.main import main

if __name__ == "__main__":
    for line in sys.stdin:
        with contextlib.redirect_stderr(io.StringIO()) as said:
            code = main(json.loads(line))
        left = subprocess.run(["pgrep", "-P", str(os.getpid()), "python"], capture_output=True, text=True).stdout
        print("told " + json.dumps([code, said.getvalue(), left]))
