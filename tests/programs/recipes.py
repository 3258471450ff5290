"""Tiny runs one after the other in this process, as many as are asked for, since most of a run's time is imports.

Each line of standard input is a JSON list: `resume`, then overrides of the quickstart's configuration.
"""

import json
import sys

from rlinf.config import load_config
from rlinf.launch import train

if __name__ == "__main__":
    for line in sys.stdin:
        resume, *overrides = json.loads(line)
        train(load_config("configs/quickstart.yaml", overrides), resume=resume)
