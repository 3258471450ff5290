"""Tiny runs one after the other in one job of torchrun, as many as are asked for, as a user starts one.

Its argument is a file with a JSON list per line: path of a configuration, then overrides.
"""

import asyncio
import json
import os
import sys
from pathlib import Path

from rlinf.runs.rules import load_any
from rlinf.runs.start import loop_of, open_run_directory, prepare
from rlinf.runtime.system.torchrun import run


def read(path, hosts):
    """What each line asks for, ready to run: planning must not be done in a running event loop."""
    for line in Path(path).read_text().splitlines():
        file, *overrides = json.loads(line)
        config = load_any(file, overrides, hosts)
        yield config, prepare(config, hosts)


async def serve(system):
    """Of the other ranks: they run what rank 0 starts there."""


async def everything(system):
    for config, prepared in wanted:
        async with system.scope():
            path = Path(config.output_dir) / config.name
            directory = await asyncio.to_thread(open_run_directory, path, config, None)
            await loop_of(system, prepared.config or config, prepared, directory).run()


if __name__ == "__main__":
    hosts = int(os.environ.get("WORLD_SIZE", "1"))
    wanted = list(read(sys.argv[1], hosts)) if os.environ.get("RANK", "0") == "0" else []
    run(everything if wanted else serve, hosts=1)
