"""Tiny runs one after the other in this process, as many as are asked for.

Its argument is a configuration; each line of standard input is a JSON list: `resume`, then overrides.
"""

import json
import sys

from rlinf.runs.rules import is_embodied, load_config, load_embodied
from rlinf.runs.start import train

if __name__ == "__main__":
    load = load_embodied if is_embodied(sys.argv[1]) else load_config
    for line in sys.stdin:
        resume, *overrides = json.loads(line)
        train(load(sys.argv[1], overrides), resume=resume)
