"""Hardware and software versions of a run, written once into its directory."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import shlex
import sys
import time
from typing import Any

import torch

PACKAGES = ("rlinf", "torch", "transformers", "numpy", "peft", "math-verify")
"""Those whose versions change results or speed."""


def environment(hosts: int) -> dict[str, Any]:
    """Return the content of environment.json, as seen from this process.

    Args:
        hosts: processes of the job.
    """
    devices = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    return {
        "started": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "command": shlex.join(sys.argv),
        "hosts": hosts,
        "threads": torch.get_num_threads(),
        "cpus": os.cpu_count(),
        "devices": devices,
        "machine": f"{platform.system()} {platform.release()} {platform.machine()}",
        "python": platform.python_version(),
        **{package: version for package in PACKAGES if (version := _version(package)) is not None},
    }


def machine() -> str:
    """Name of the hardware that this process computes on, as a profile has it."""
    if torch.cuda.is_available():
        return torch.cuda.get_device_name(0)
    return f"CPU {platform.machine()}, {os.cpu_count()} cores"


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None
