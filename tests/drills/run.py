"""What drills run and kill: a run directory, the processes that work in it, and how one of them is found and killed.

In: a drill, and random numbers. Out: processes that are started, waited for and killed; what checkpoints hold.
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from rlinf.agents.episodes import KINDS
from rlinf.data.in_flight.snapshot import read_kept
from rlinf.engines.base import PartialGroup
from rlinf.storage.directory import find_checkpoint
from rlinf.storage.files import read_lines
from tests.drills.parts import TOKENS
from tests.launching import ROOT, Ranks, command, environment, start, steps_noted
from tests.runtime.programs.jobs import descendants, until

VICTIMS = ("rank 0", "rank 1", "all", "reward", "engine", "torchrun")
"""Whom a drill kills: hosts, all of them at once, a child process of the judge, the engine's server, or torchrun."""
MOMENTS = ("start", "step", "step", "step", "writing", "named", "evaluation")
"""When: while it starts, some time after some step, while a checkpoint is written, just after it got its name, in or
near an evaluation. Random moments of steps are the most."""
EVERY = {"checkpoint": 4, "evaluation": 10}
"""Steps between two of them."""
PATIENCE = 90.0
"""Seconds for what takes one or two: the machine may be busy."""


@dataclass(frozen=True, slots=True)
class Drill:
    """What is run."""

    flow: str = "grpo_async"
    """Name of a flow: grpo, grpo_async, agentic, agentic_async, ppo, ppo_async."""
    staleness: int = 1
    """Its `staleness.max`."""
    mode: str = "mask"
    """Its `staleness.mode`."""
    steps: int = 60
    """Of a run."""
    more: tuple[str, ...] = ()
    """Further overrides."""

    def arguments(self, output: Path, *, engine: bool) -> tuple[str, ...]:
        """Of launch.py.

        Args:
            output: where the run goes.
            engine: by a server in a child process, instead of the engine that counts its tokens.
        """
        made = "imitation" if engine else "counting"
        ahead = (f"staleness.max={self.staleness}", f"staleness.mode={self.mode}") if "async" in self.flow else ()
        agent = "agentic" in self.flow
        path = "rlinf.flows.agentic" if agent else f"rlinf.flows.{self.flow.removesuffix('_async')}"
        flow = (f"flow={path}.{self.flow}" if agent else f"flow=rlinf.flows.{self.flow}",)
        return (
            "--config", "configs/quickstart.yaml", f"steps={self.steps}", "log_every=1", "sft.steps=2",
            "algorithm.prompts_per_step=8", "algorithm.group_size=4", "algorithm.epochs=1",
            "model.config.hidden_size=16", "model.config.intermediate_size=16", "model.config.num_hidden_layers=1",
            "rollout.max_new_tokens=24", f"rollout.engine=tests.drills.parts.{made}",
            "reward.function=tests.drills.rewards.reward", "reward.workers=1",
            "evaluation.problems=16", f"evaluation.every={EVERY['evaluation']}",
            f"checkpoint.every={EVERY['checkpoint']}", "checkpoint.keep=2", "placement.trainer=1",
            "trace=false", "metrics.live=never", f"output_dir={output}", *ahead, *flow,
            *(("agent.function=tests.drills.parts.agent",) if agent else ()), *self.more,
        )  # fmt: skip


class Torchrun:
    """A run by a real torchrun, with the surface of `Ranks` as far as drills need it."""

    def __init__(self, arguments: Sequence[str], **more: str) -> None:
        self._output = tempfile.TemporaryFile("w+")  # noqa: SIM115  # closed with the object
        self._process = subprocess.Popen(
            command(*arguments, processes=2), cwd=ROOT, env=environment(**more), start_new_session=True,
            stdout=self._output, stderr=subprocess.STDOUT,
        )  # fmt: skip
        self.pids = [self._process.pid]

    def kill_all(self, number: int) -> None:
        self._process.send_signal(number)

    def ended(self) -> bool:
        return self._process.poll() is not None

    def codes(self, seconds: float) -> list[int]:
        return [self._process.wait(seconds)]

    def everything(self) -> str:
        self._output.seek(0)
        return self._output.read()

    def end(self) -> None:
        for pid in [*descendants(self._process.pid), self._process.pid]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self._process.wait()
        self._output.close()


class Run:
    """One run directory, and the processes that work in it now.

    Args:
        drill: what.
        output: where.
        rng: of moments and victims.
        engine: by a server in a child process.
        torchrun: started by torchrun, which takes longer.
    """

    def __init__(self, drill: Drill, output: Path, rng: random.Random, *, engine: bool, torchrun: bool) -> None:
        self.drill, self.output, self.rng, self.engine, self.torchrun = drill, output, rng, engine, torchrun
        self.path = output / "quickstart"
        self.tokens = output / "tokens"
        self.arguments = drill.arguments(output, engine=engine)
        self.processes: Ranks | Torchrun | None = None
        self.went_on: int | None = None  # from the checkpoint of this step
        self.held = 0  # tokens in flight there

    def begin(self) -> Ranks | Torchrun:
        """Start it, or go on with it."""
        self.tokens.unlink(missing_ok=True)
        found = find_checkpoint(self.path) if self.path.exists() else None
        self.went_on = None if found is None else found.step
        self.held = 0 if found is None else tokens_held(found.path)
        more = {TOKENS: str(self.tokens)}
        arguments = (*self.arguments, "--resume", "auto")
        self.processes = Torchrun(arguments, **more) if self.torchrun else start(*arguments, processes=2, **more)
        return self.processes

    def again(self) -> Ranks | Torchrun:
        """Go on after a death."""
        self.end()
        return self.begin()

    def torn(self) -> bool:
        """It has ended because its engine died while it took new weights, which no replica may go on from."""
        here = self.processes
        return here is not None and here.ended() and "not every rank has switched" in here.everything()

    def choose(self) -> tuple[str, str]:
        """A victim and a moment."""
        victims = [
            name for name in VICTIMS if (name != "engine" or self.engine) and (name != "torchrun" or self.torchrun)
        ]
        weights = [3 if name in ("engine", "torchrun") else 1 for name in victims]
        return self.rng.choices(victims, weights)[0], self.rng.choice(MOMENTS)

    def until_moment(self, moment: str) -> bool:
        """Wait for it; False if the run has ended before."""
        path, rng, here = self.path, self.rng, self.processes
        assert here is not None
        begun, target = steps_noted(path), rng.randint(1, 15)
        named = set(_checkpoints(path))
        evaluated = _evaluations(path)
        came: dict[str, Callable[[], bool]] = {
            "start": lambda: True,
            "step": lambda: steps_noted(path) >= begun + target or steps_noted(path) >= self.drill.steps,
            "writing": lambda: any((path / "checkpoints").glob(".step_*.partial")),
            "named": lambda: bool(set(_checkpoints(path)) - named),
            "evaluation": lambda: _evaluations(path) > evaluated or 0 < steps_noted(path) % EVERY["evaluation"] < 2,
        }
        until(lambda: here.ended() or came[moment](), lambda: f"{moment}\n{here.everything()}", PATIENCE)
        later = {"start": 3.0, "writing": 0.01, "named": 0.01}.get(moment, 0.15)
        end = time.monotonic() + rng.uniform(0.0, later)
        while time.monotonic() < end and not here.ended():
            time.sleep(0.001)
        return not here.ended()

    def kill(self, victim: str) -> tuple[list[int], list[tuple[int, str]]]:
        """Kill it.

        Returns:
            Who was killed, and every process that there was, with its time of birth.
        """
        here = self.processes
        assert here is not None
        everyone = [*here.pids, *(pid for each in here.pids for pid in descendants(each))]
        born = [(pid, birth) for pid in dict.fromkeys(everyone) if (birth := birth_of(pid))]
        hosts = [pid for pid in everyone if pid not in here.pids and _is_host(pid)] if self.torchrun else here.pids
        children = {"reward": "keeper.py json", "engine": "sleep "}
        if victim in children:
            below = [pid for pid in everyone if pid not in here.pids and " keep " not in command_of(pid)]
            chosen = [pid for pid in below if children[victim] in command_of(pid)][-1:]
        elif victim == "torchrun":
            chosen = here.pids
        else:
            chosen = hosts if victim == "all" else hosts[int(victim[-1]) :][:1]
        for pid in chosen:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        return chosen, born

    def end(self) -> None:
        """Whatever is left of it."""
        if self.processes is not None:
            self.processes.end()


def tokens_held(checkpoint: Path) -> int:
    """Generated tokens of the samples in flight in a checkpoint, of half answers too."""
    kept = read_kept(checkpoint, KINDS)
    total = 0
    for entry in () if kept is None else kept.entries:
        if entry.result is not None:
            total += sum(sample.learned_tokens for group in entry.result for sample in group.samples)
            continue
        for part in entry.partial:
            if not isinstance(part, PartialGroup):  # a task of an agent's
                total += part.tokens
                continue
            total += sum(len(one.response_ids) for one in part.done.values())
            total += sum(one.answered for one in part.left.values())
    return total


def _checkpoints(path: Path) -> list[str]:
    there = path / "checkpoints"
    return [entry.name for entry in there.iterdir() if entry.name.startswith("step_")] if there.is_dir() else []


def _evaluations(path: Path) -> int:
    return sum("evaluation/accuracy" in line for line in read_lines(path / "metrics.jsonl"))


def birth_of(pid: int) -> str:
    """When a living process began; "" if there is none of that number, or a dead one that nobody has waited for."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return ""
    return "" if fields[0] == "Z" else fields[19]


def command_of(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ")
    except OSError:
        return ""


def _is_host(pid: int) -> bool:
    return "launch.py" in command_of(pid) and "torch.distributed.run" not in command_of(pid)
