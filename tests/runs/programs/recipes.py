"""Tiny runs one after the other in this process, as many as are asked for, since most of a run's time is imports.

Each line of standard input is a JSON list: `resume`, then overrides of the quickstart's configuration.
"""

import json
import sys

from rlinf.cli.main import train
from rlinf.cli.validate import load_config

if __name__ == "__main__":
    for line in sys.stdin:
        resume, *overrides = json.loads(line)
        train(load_config("configs/quickstart.yaml", overrides), resume=resume)
