"""Runs checks one after the other, each in a process of its own with its own limit, and writes down what they found.

In: a list of `Check`s, and a command line. Out: a JSON file, written anew after every check, and a table. A second call
on the same file makes the checks that the first did not reach.

    python3 -m benchmarks.gpu.checks                      on a GPU
    python3 -m benchmarks.gpu.checks --rehearse           the same lines on a CPU, with tiny shapes
    python3 -m benchmarks.gpu.checks --only decode,park   these alone, whether or not they were made before
    python3 -m benchmarks.gpu.checks --failed             those that did not pass, again
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import hashlib
import importlib
import importlib.util
import json
import os
import platform
import re
import select
import signal
import subprocess
import sys
import tempfile
import textwrap
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.gpu.measuring.bars import compared

ROOT = Path(__file__).parents[2]
BEGAN = time.monotonic()
"""Beginning of this process, but for Python itself."""
BUDGET = 540.0
"""Seconds after which no more checks are begun."""
LEAST = 5.0
"""Seconds that must be left for a check to be begun."""
TAIL = 3000
"""Characters of a failed check's output that are kept."""
PACKAGES = ("torch", "transformers", "triton", "numpy", "flash-attn")
PASSED = ("passed", "measured")
INTERRUPTED = "interrupted"
"""State of the check that was being made when the command was told to end: its figures so far are in the file, and the
next call makes it anew."""
ANSWERED = (*PASSED, "failed", "not run")
NEEDED = ("torch", "transformers")
"""Packages without which no check is begun."""
MARK = "RLINF_GPU_CHECK"
"""In the environment of all that a check starts, with a value of its own."""
INDENT = " " * 24
WIDTH = 120
"""Columns of what is printed."""
SOLID = "\N{NO-BREAK SPACE}"
"""Between a figure's name and its value."""


@dataclass(frozen=True, slots=True)
class Check:
    """One question, and who answers it."""

    name: str
    """For `--only`."""
    run: str
    """`module:function`, the module below the list's package; it is called with a `Scale` and returns an `Outcome`."""
    limit: float
    """Seconds."""
    criterion: str
    """When it passes, for the table."""


def main(
    kind: str,
    package: str,
    checks: Sequence[Check],
    arguments: Sequence[str] | None = None,
    *,
    ends: Callable[[Mapping[str, Any]], str] | None = None,
) -> int:
    """The command line; returns the exit status.

    Args:
        kind: "checks" or "measures", for the file's name.
        package: in which the checks' modules are.
        checks: the most valuable first.
        arguments: of the command line; None for the program's own.
        ends: what is printed last, given the record that the file holds.

    Returns:
        0 when all that was run passed or has no criterion, 1 when something failed, 2 when it could not begin, 3 when
        time ran out before all were made, 130 when it was interrupted.
    """
    options = _options(kind, arguments)
    asked = _named(checks, options.only)
    out, before = options.out, None if options.against is None else _read(options.against, "--against")
    if missing := [name for name in NEEDED if importlib.util.find_spec(name) is None]:
        print(f"{sys.executable} has no {' and no '.join(missing)}: name a Python that has, as PYTHON=/path/to/python3",
              file=sys.stderr)  # fmt: skip
        return 2
    with _interruptible(), tempfile.TemporaryDirectory(prefix="rlinf-gpu-") as temporary:
        work = options.work or Path(temporary)
        work.mkdir(parents=True, exist_ok=True)
        machine = _child(f"{__name__}:machine", options.rehearse, work, 120.0)
        about = machine.get("figures", {})
        if machine["state"] != "measured":
            print(machine.get("output", machine["why"]), file=sys.stderr)
            return 2
        if not options.rehearse and "card" not in about:
            print("no CUDA device here; --rehearse makes the same checks on the CPU, with tiny shapes", file=sys.stderr)
            return 2
        out = out or _file(kind, about, options.rehearse)
        record = _before(out, kind, about, options.rehearse)
        print(f"{kind} on {about.get('card', about['processor'])}, torch {about.get('torch')} -> {out}", flush=True)
        chosen = _chosen(asked, record["outcomes"], options)
        began = time.monotonic()
        for check in chosen:
            left = options.budget - (time.monotonic() - began)
            if left < LEAST:
                continue
            print(f"  {check.name} ... ", end="", flush=True)
            found = _child(f"{package}.{check.run}", options.rehearse, work, min(check.limit, left))
            if found["state"] == "timed out" and left < check.limit:
                found = {"state": "not reached", "seconds": found["seconds"], "why": "the time for all ran out"}
            record["outcomes"][check.name] = {"criterion": check.criterion, **found}
            _write(out, record)
            if found["state"] == INTERRUPTED:
                raise SystemExit(130)  # whose line was printed; what was known is written
            print(f"{found['state']}, {found['seconds']:.1f} s", flush=True)
    status = _told(checks, asked, record["outcomes"])
    if ends is not None:
        print(f"\n{ends(record)}")
    if before is not None:
        print(f"\nbeside {options.against}, of {before['date']}:\n{compared(record['outcomes'], before['outcomes'])}")
    return status


def _options(kind: str, arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog=f"python3 -m benchmarks.gpu.{kind}", description=__doc__.split("\n")[0])
    parser.add_argument("--rehearse", action="store_true", help="tiny shapes on the CPU")
    parser.add_argument("--only", default="", help="names, with commas between")
    parser.add_argument("--failed", action="store_true", help="make again what did not pass")
    parser.add_argument("--out", type=Path, help="the JSON file; what it holds already is not made again")
    parser.add_argument("--work", type=Path, help="directory for models that are made; it is kept")
    parser.add_argument("--against", type=Path, metavar="FILE", help="compare every figure with those of that file")
    parser.add_argument("--budget", type=float, default=BUDGET, help="seconds for all")
    return parser.parse_args(arguments)


def _file(kind: str, about: Mapping[str, Any], rehearse: bool) -> Path:
    card = "rehearsal" if rehearse else re.sub(r"[^a-z0-9]+", "-", str(about["card"]).lower()).strip("-")
    folder = ROOT / ("outputs" if rehearse else "benchmarks/results")
    return folder / f"{datetime.date.today().isoformat()}-gpu-{kind}-{card}.json"


def _named(checks: Sequence[Check], only: str) -> Sequence[Check]:
    """Those that `--only` names; all, where it names none."""
    names = [name.strip() for name in only.split(",")] if only else [check.name for check in checks]
    if unknown := [name for name in names if name not in {check.name for check in checks}]:
        known = ", ".join(check.name for check in checks)
        sys.exit(f"no check is called {', '.join(unknown)}; there are {known}")
    return [check for check in checks if check.name in names]


@contextlib.contextmanager
def _interruptible() -> Iterator[None]:
    """End in good order when told to: the check that is being made must not stay on the card."""

    def interrupt(number: int, frame: object) -> None:
        print("\ninterrupted; the same command goes on with what was not reached", flush=True)
        raise SystemExit(130)

    told_by = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = {number: signal.signal(number, interrupt) for number in told_by}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _read(path: Path, option: str) -> dict[str, Any]:
    """An earlier record."""
    try:
        found: dict[str, Any] = json.loads(path.read_text())
        found["date"], found["outcomes"]
    except (OSError, ValueError, TypeError, KeyError) as error:
        sys.exit(f"{option} {path}: no file that this command wrote ({type(error).__name__}: {error})")
    return found


def _before(out: Path, kind: str, about: Mapping[str, Any], rehearse: bool) -> dict[str, Any]:
    """The record that `out` holds, if it is of the same code on the same machine; else a new one."""
    fresh = {"kind": kind, "rehearsal": rehearse, "date": datetime.date.today().isoformat(), "commit": _commit()}
    fresh |= {"code": _code(), "machine": dict(about), "outcomes": {}}
    if out.exists():
        found = _read(out, "--out")
        if all(found.get(key) == fresh[key] for key in ("kind", "rehearsal", "code", "machine")):
            return found
        print(f"{out} is of other code or another machine: all is made anew")
    return fresh


def _chosen(asked: Sequence[Check], done: Mapping[str, Any], options: argparse.Namespace) -> list[Check]:
    """Choose, of those that were asked for, the ones to make now."""
    if options.only:
        return [*asked]
    states = {name: found["state"] for name, found in done.items()}
    if options.failed:
        return [check for check in asked if states.get(check.name) not in PASSED]
    return [check for check in asked if states.get(check.name) not in ANSWERED]


def _write(out: Path, record: Mapping[str, Any]) -> None:
    out.parent.mkdir(parents=True, exist_ok=True)
    part = out.with_name(out.name + ".part")
    part.write_text(json.dumps(record, indent=1) + "\n")
    part.replace(out)


def _told(checks: Sequence[Check], asked: Sequence[Check], done: Mapping[str, Any]) -> int:
    """Print what was found by those that were asked for, and count the states of all; returns the exit status."""
    print()
    for check in asked:
        found = done.get(check.name, {"state": "not reached", "seconds": 0.0})
        print(f"{found['state']:>11}  {found['seconds']:6.1f} s  {check.name}: {check.criterion}")
        for line in (found.get("why"), _figures(found.get("figures", {}))):
            if line:
                lines = textwrap.wrap(line, WIDTH - len(INDENT), break_long_words=False, break_on_hyphens=False)
                print("".join(f"{INDENT}{each}\n" for each in lines).replace(SOLID, " "), end="")
        if found.get("output") and found["state"] != "passed":
            print("".join(f"{INDENT}| {line}\n" for line in found["output"].splitlines()[-12:]), end="")
    states = [done.get(check.name, {"state": "not reached"})["state"] for check in checks]
    print("\n" + ", ".join(f"{states.count(state)} {state}" for state in dict.fromkeys(states)))
    if any(state in ("failed", "crashed", "timed out") for state in states):
        return 1
    if "not reached" in states and len(asked) == len(checks):
        print("the same command once more makes those that were not reached")
        return 3
    return 0


def _figures(figures: Mapping[str, Any]) -> str:
    shown = (f"{value:.4g}" if isinstance(value, float) else str(value) for value in figures.values())
    return ", ".join(f"{name}{SOLID}{value}" for name, value in zip(figures, shown, strict=True))


# One check, in a process of its own -----------------------------------------------------------------------------------


def _child(target: str, rehearse: bool, work: Path, limit: float) -> dict[str, Any]:
    """Have `target` answered by a new process, which is killed with all it started when its time is over."""
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="rlinf-check-") as folder:
        result, log, so_far = (Path(folder) / name for name in ("result.json", "log", "so_far.json"))
        command = [sys.executable, "-m", __name__, target, str(result), str(so_far), str(work), f"{limit:.1f}"]
        environment = {**os.environ, "PYTHONUNBUFFERED": "1", "TOKENIZERS_PARALLELISM": "false", MARK: folder}
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH", "")]))
        if rehearse:
            environment |= {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1")}
        with log.open("wb") as output:
            process = subprocess.Popen(
                [*command, *(["--rehearse"] if rehearse else [])],
                cwd=ROOT, env=environment, stdout=output, stderr=subprocess.STDOUT, start_new_session=True,
            )  # fmt: skip
            interrupted = False
            try:
                process.wait(limit)
            except subprocess.TimeoutExpired:
                pass
            except SystemExit:
                interrupted = True
            finally:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)  # what it started too
                process.wait()
                _end_all(f"{MARK}={folder}")
        seconds = time.monotonic() - began
        tail = log.read_text(errors="replace")[-TAIL:]
        if result.exists() and not interrupted:
            found = json.loads(result.read_text())
            return {**found, "seconds": seconds, **({} if found["state"] in PASSED else {"output": tail})}
        known = {
            "seconds": seconds,
            "figures": json.loads(so_far.read_text()) if so_far.exists() else {},
            "output": tail,
        }
        if interrupted:
            return {"state": INTERRUPTED, "why": f"told to end after {seconds:.0f} s", **known}
        if process.returncode == -signal.SIGKILL and seconds >= limit:
            return {"state": "timed out", "why": f"longer than {limit:.0f} s", **known}
        return {"state": "crashed", "why": f"exit status {process.returncode}", **known}


def _end_all(mark: str) -> None:
    """Kill what a check left in sessions of its own, as torchrun's workers are, and wait until they are gone: they
    have memory of the card."""
    for path in Path("/proc").glob("[0-9]*/environ"):
        with contextlib.suppress(OSError):  # gone, or of somebody else
            if mark.encode() not in path.read_bytes().split(b"\0"):
                continue
            handle = os.pidfd_open(int(path.parent.name))
            try:
                signal.pidfd_send_signal(handle, signal.SIGKILL)
                select.select([handle], [], [], 10.0)
            finally:
                os.close(handle)


def machine(scale: Any) -> Any:
    """Card, driver and versions of this machine."""
    import importlib.metadata as metadata

    import torch

    from benchmarks.gpu.scale import Outcome

    about: dict[str, Any] = {"processor": f"{platform.machine()}, {os.cpu_count()} cores"}
    about["python"] = platform.python_version()
    for package in PACKAGES:
        with contextlib.suppress(metadata.PackageNotFoundError):
            about[package] = metadata.version(package)
    if not scale.rehearse and torch.cuda.is_available():
        properties = torch.cuda.get_device_properties(0)
        about |= {"card": properties.name, "memory_gb": round(properties.total_memory / 1e9, 1)}
        about |= {"cuda": torch.version.cuda, "driver": _driver()}
    return Outcome(None, about)


def _driver() -> str:
    asked = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader", "--id=0"]
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        return subprocess.run(asked, capture_output=True, text=True, timeout=20, check=True).stdout.strip()
    return "unknown"


def _commit() -> str | None:
    """Commit of the checkout, with a mark if files differ from it; None where git does not say."""
    try:
        asked = ["git", "-C", str(ROOT), "describe", "--always", "--dirty", "--abbrev=12"]
        return subprocess.run(asked, capture_output=True, text=True, timeout=20, check=True).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return None


def _code() -> str:
    """A digest of all that a check may run; the tree may have been copied here without its git."""
    digest = hashlib.sha256()
    for folder in ("rlinf", "benchmarks/gpu"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            digest.update(path.read_bytes())
    return digest.hexdigest()[:12]


def _answer(arguments: Sequence[str]) -> None:
    """The child: make one check and write what it found."""
    from benchmarks.gpu.scale import NotRun, Outcome, Scale

    target, result, so_far, work, limit, *rest = arguments
    module, function = target.split(":")
    try:
        check = getattr(importlib.import_module(module), function)
        left = float(limit) - (time.monotonic() - BEGAN)
        outcome = check(Scale("--rehearse" in rest, Path(work), left, Path(so_far)))
        state = {True: "passed", False: "failed", None: "measured"}[outcome.passed]
    except NotRun as missing:
        state, outcome = "not run", Outcome(None, why=str(missing))
    except ModuleNotFoundError as missing:
        if (missing.name or "rlinf").split(".")[0] in ("rlinf", "benchmarks"):
            raise
        traceback.print_exc()
        state, outcome = "not run", Outcome(None, why=f"{missing.name} is not installed")
    figures = dict(outcome.figures)
    if (torch := sys.modules.get("torch")) is not None and torch.cuda.is_initialized():
        figures.setdefault("peak_gb", torch.cuda.max_memory_allocated() / 1e9)
    part = Path(result + ".part")
    part.write_text(json.dumps({"state": state, "figures": figures, "why": outcome.why}))
    part.replace(result)


if __name__ == "__main__":
    _answer(sys.argv[1:])
