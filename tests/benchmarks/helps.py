"""Asks every benchmark that takes arguments for its help, in one process; prints those that give none, and why."""

import contextlib
import io
import runpy
import sys
import traceback
from pathlib import Path

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


def why_not(name: str) -> str:
    """What is wrong with a benchmark; nothing, if it says how it is used."""
    sys.argv = [name, "--help"]
    said = io.StringIO()
    try:
        with contextlib.redirect_stdout(said):
            runpy.run_module(f"benchmarks.{name}", run_name="__main__")
    except SystemExit as end:
        return "" if not end.code and said.getvalue().startswith("usage: ") else f"{end.code}: {said.getvalue()}"
    except Exception:
        return traceback.format_exc()
    return "it ran instead"


if __name__ == "__main__":
    names = [path.stem for path in sorted(BENCHMARKS.glob("*.py")) if "ArgumentParser" in path.read_text("utf-8")]
    wrong = {name: why for name in names if (why := why_not(name))}
    print(len(names), wrong)
