"""`rlinf.train`: trains a language model from a script or a notebook, with objects in memory.

In: a model, rewards and data, as names or as objects, and any key of the configuration as a keyword. Out: a run
directory as any configured run has it, and a `Result`, which shows itself well in a notebook. Who wakes whom: `train`
blocks until the run is over; `train_async` runs on the caller's own event loop. Under torchrun every process runs the
same script: what rank 0 passes counts, and the others serve the roles that it places on them, and get None.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import MISSING, dataclass, field, replace
from pathlib import Path
from typing import Any

from rlinf.config.learning import SUPERVISED
from rlinf.config.load import ConfigError, InputError, Problem, RunFailure
from rlinf.data.sample import Evaluation
from rlinf.metrics.live import curve
from rlinf.metrics.progress import clock, progress_bars
from rlinf.metrics.report import ACCURACY_COLUMN, measure_of, problems_of
from rlinf.runs.library.objects import Objects, configured, key_of, recipe_name
from rlinf.runs.library.opening import Arguments, Call, Opened, arguments_of, opened
from rlinf.runs.loop import TrainingLoop
from rlinf.runs.resume import with_resume_hint
from rlinf.runs.start import leaving_gpus, locked, loop_of, run_to_end, runtime_errors_explained
from rlinf.runtime.system.system import ActorSystem
from rlinf.runtime.system.torchrun import switching_often
from rlinf.storage.files import read_lines

_CURVE = 24
"""Columns of the curve of rewards."""


@dataclass(frozen=True, slots=True, repr=False)
class Result:
    """A finished run: its numbers, and where its files are."""

    run_dir: Path
    """Where its files are."""
    steps: int
    """Steps done."""
    metrics: list[dict[str, Any]] = field(default_factory=list)
    """A row for each step, in order: `step` and its numbers by name."""
    before: Evaluation | Mapping[str, float] | None = None
    """How good the model was before the first step: `.accuracy`, `.metrics`, `.groups`; of a run on given texts its
    numbers by name, such as `loss`; None without an evaluation."""
    after: Evaluation | Mapping[str, float] | None = None
    """Likewise after the last step."""
    best_step: int | None = None
    """After which the best evaluation was, where `checkpoint.best` or a patience asked for it."""
    stopped: str | None = None
    """Why the run ended before its last step, if it did."""

    @property
    def model_dir(self) -> Path:
        """The trained model with its tokenizer, for transformers' `from_pretrained`."""
        return self.run_dir / "checkpoints" / "latest" / "hf"

    @property
    def best_model_dir(self) -> Path | None:
        """The model of the best evaluation; None unless `checkpoint.best` asked for it."""
        path = self.run_dir / "checkpoints" / "best" / "hf"
        return path if path.exists() else None

    @property
    def report(self) -> Path:
        """A page with curves, answers and lanes."""
        return self.run_dir / "report.html"

    def history(self, name: str) -> list[float]:
        """The values of one metric, of the steps that have it.

        Raises:
            KeyError: no step has it; the text has those that there are.
        """
        values = [row[name] for row in self.metrics if row.get(name) is not None]
        if not values and self.metrics:
            raise KeyError(
                f"no step has {name}; there are {', '.join(sorted({key for row in self.metrics for key in row}))}"
            )
        return values

    def frame(self) -> Any:
        """`metrics` as a table of pandas, a row per step; needs `pip install pandas`."""
        import pandas

        return pandas.DataFrame(self.metrics).set_index("step")

    def model(self, **how: Any) -> Any:
        """Load the trained model: a language model, or where that was trained, a reward model, a sequence classifier.

        Args:
            how: arguments of transformers' `from_pretrained`, such as dtype.
        """
        from transformers import AutoConfig, AutoModelForSequenceClassification

        from rlinf.data.images import auto_class
        from rlinf.data.tokenizer import pretrained

        config = pretrained(AutoConfig, self.model_dir)
        scores = (config.architectures or [""])[0].endswith("ForSequenceClassification")
        kind = AutoModelForSequenceClassification if scores else auto_class(config)
        return pretrained(kind, self.model_dir, **how)

    def tokenizer(self) -> Any:
        """Load its tokenizer."""
        from transformers import AutoTokenizer

        from rlinf.data.tokenizer import pretrained

        return pretrained(AutoTokenizer, self.model_dir)

    def __repr__(self) -> str:
        took = [row["timing/elapsed"] for row in self.metrics if row.get("timing/elapsed") is not None]
        head = f"{self.steps} steps" + (f" in {clock(took[-1])}" if took else "")
        return "\n".join([f"rlinf.Result: {head}", *(f"  {name:<9} {text}" for name, text in self._lines())])

    def _lines(self) -> Iterator[tuple[str, str]]:
        for name, key in (("reward", "reward/mean"), ("loss", "loss")):
            if numbers := [row[key] for row in self.metrics if row.get(key) is not None]:
                yield name, f"{numbers[0]:.3f} -> {numbers[-1]:.3f}   {curve(numbers, _CURVE)}"
                break
        if isinstance(self.before, Mapping) and isinstance(self.after, Mapping):
            yield "held out", f"loss {self.before['loss']:.4f} -> {self.after['loss']:.4f}"
        elif isinstance(self.before, Evaluation) and isinstance(self.after, Evaluation):
            best = f"; the best after step {self.best_step}" if self.best_step is not None else ""
            count = f"on {len(problems_of(self.after))} held-out problems{best}"
            name, style = measure_of(self.before, self.after)
            change = f"{self.before.accuracy:{style}} -> {self.after.accuracy:{style}}"
            yield (name if name == ACCURACY_COLUMN else "held-out"), f"{change}   {count}"
        if self.stopped is not None:
            yield "stopped", self.stopped
        for name, path in (("model", self.model_dir), ("best", self.best_model_dir), ("report", self.report)):
            if path is not None and path.exists():
                yield name, str(path)


def result_of(loop: TrainingLoop) -> Result:
    """The result of a run that is over."""
    state, best = loop.state, loop.saver.best
    rows: list[Mapping[str, Any]] = list(read_lines(state.directory.metrics))
    return Result(
        state.directory.path,
        state.done,
        [dict(row) for row in rows if row.get("step", 0) > 0],
        state.before,
        state.after,
        None if best is None else best.step,
        state.stopped,
    )


WHO = "train"
"""The call, in errors."""


def train(
    model: Any,
    rewards: Any = None,
    data: Any = None,
    *,
    algorithm: Any = "grpo",
    tokenizer: Any = None,
    evaluation: Any = None,
    run_dir: str | Path | None = None,
    resume: str = "never",
    **settings: Any,
) -> Result | None:
    """Train a language model: by reinforcement learning, or on given conversations or preferences.

        result = rlinf.train("Qwen/Qwen2.5-0.5B-Instruct", my_reward, "problems.jsonl", steps=100, lr=1e-6)
        result = rlinf.train("Qwen/Qwen2.5-0.5B-Instruct", data="pairs.jsonl", algorithm="dpo", steps=100, lr=1e-6)

    Args:
        model: directory, hub name, mapping of a new model such as {"model_type": "qwen2"}, or a transformers model,
            which is saved once into the run directory.
        rewards: `reward(response, answer, **row) -> float`, plain, async, or written for TRL or verl; its dotted path;
            a list of such, or of (reward, weight); or a mapping from names to them. Lambdas and functions of a script
            or notebook will do. None compares with the answer. Given texts (`sft`, `dpo`, `reward_model`) have none.
        data: what to learn from: a file, directory or hub name, a list of dicts, a `datasets.Dataset`, an iterable, an
            async iterable, or a function that makes one. None takes the generated problems of `task`.
        algorithm: name of a recipe, or `sft`, `dpo` or `reward_model`; or a mapping of keys of the section `algorithm`,
            in which `advantage` and `loss` may be functions (docs/algorithms.md).
        tokenizer: directory, hub name, {"characters": …} or a tokenizer; None takes the model's own.
        evaluation: problems that are never trained on, in any of the forms of `data`.
        run_dir: directory of the run; None takes outputs/run.
        resume: `never`, `auto` to go on in run_dir if there is a checkpoint, or the path of a run or checkpoint.
        settings: any key of docs/config.md: by its own name (`steps`, `lr`, `group_size`), as a section with a mapping
            (`rollout={"max_new_tokens": 64}`), or dotted (`**{"rollout.max_new_tokens": 64}`). Three take objects:
            `callbacks` functions `f(step, metrics, run)`, or objects with `on_step`, `on_samples`, `on_evaluate`,
            `on_checkpoint` (docs/train.md); `flow` one step, an async function; `agent` what works on each task, `async
            def agent(task, llm)`, or a mapping of keys of the section, of which `function` is that, and `player` may
            be a function too (docs/agents.md).

    Returns:
        What came of it; None in processes of torchrun other than rank 0.

    Raises:
        InputError: a mistake in what was passed; as `ConfigError` with all mistakes that settings have. Nothing was
            started.
        RunFailure: the run cannot go on, for a reason outside the code, or a callback raised.
        SystemExit: a signal told the process to end; with code 75 if `resume="auto"` is to go on.
        Exception: what a flow or a role raised.
    """
    if _in_loop():
        raise InputError(
            f"{WHO}: an event loop runs here already, as in a notebook: write `await rlinf.train_async(…)`"
        )
    arguments = {"model": model, "rewards": rewards, "data": data, "algorithm": algorithm, "tokenizer": tokenizer}
    call = Call.of(**arguments, evaluation=evaluation, run_dir=run_dir, resume=resume, **settings)
    try:
        return _train(call)
    except (InputError, RunFailure) as error:
        raise error.with_traceback(None)  # noqa: B904  # where in here a mistake was found helps nobody


async def train_async(model: Any, rewards: Any = None, data: Any = None, **rest: Any) -> Result:
    """`train` on the event loop that runs already, in one process: for notebooks, and as a part of async programs.

    Async callbacks run on this loop, and so do async rewards that cannot be sent to another process. Cancelling the
    task ends the run.

    Args:
        model, rewards, data, rest: as for `train`.

    Raises:
        Exception: as `train` does.
    """
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise InputError("train_async: it runs in one process; under torchrun, call rlinf.train")
    call = Call.of(model=model, rewards=rewards, data=data, **rest)
    try:
        arguments = await asyncio.to_thread(_sorted, call, 1)
        with locked(arguments.run_dir, WHO) as lock, progress_bars(), ExitStack() as during:
            ready = await asyncio.to_thread(opened, arguments, 1, lock, during)
            stall_after = ready.config.system.stall_after
            with runtime_errors_explained(), switching_often():
                async with ActorSystem.local(1, device_memory=ready.memory, stall_after=stall_after) as system:
                    return await _run(ready, system)
    except (InputError, RunFailure) as error:
        raise error.with_traceback(None)  # noqa: B904


def _train(call: Call) -> Result | None:
    """Train, in this process's part."""
    if int(os.environ.get("RANK", "0")):
        shared = ("system", "checkpoint", "placement")  # what every process has to know
        limits = {name: each for name, each in call.settings.items() if _key(name, each).startswith(shared)}
        config = configured(call.run_dir, limits, WHO)
        with leaving_gpus(config):
            run_to_end(_serve_only, config.system, grace=config.checkpoint.grace)
        return None
    hosts = int(os.environ.get("WORLD_SIZE", "1"))
    arguments = _sorted(call, hosts)
    with locked(arguments.run_dir, WHO) as lock, progress_bars(), ExitStack() as during:
        ready = opened(arguments, hosts, lock, during)
        grace = ready.config.checkpoint.grace
        with with_resume_hint(ready.directory, ready.config.checkpoint):
            return run_to_end(lambda system: _run(ready, system), ready.config.system, ready.memory, grace)


async def _run(ready: Opened, system: ActorSystem) -> Result:
    """Take a checked run to its end."""
    loop = loop_of(system, ready.config, ready.plan, ready.directory)
    await loop.run(ready.checkpoint)
    return result_of(loop)


def _sorted(call: Call, hosts: int) -> Arguments:
    """Sort what was passed into settings and objects.

    Raises:
        InputError: something cannot be what it was passed as.
    """
    objects = Objects(WHO)
    objects.take_model(call.model)
    objects.take_tokenizer(call.tokenizer, call.model)
    objects.take_data(call.data, call.evaluation)
    if (name := recipe_name(call.algorithm)) in SUPERVISED and call.rewards is not None:
        advice = f"{name} learns from given texts, data=…, and nothing is scored: remove it"
        raise ConfigError([Problem(WHO, "rewards", MISSING, advice)])
    objects.take_rewards(call.rewards)
    settings = dict(call.settings)
    callbacks, flow = settings.pop("callbacks", ()), settings.pop("flow", None)
    if not isinstance(callbacks, Iterable):
        raise ConfigError([Problem(WHO, "callbacks", MISSING, "give a list of them, [my_callback]")])
    objects.take_agent(settings.pop("agent", None))
    objects.passed = replace(objects.passed, callbacks=tuple(callbacks), flow=flow if callable(flow) else None)
    if flow is not None and not callable(flow):
        settings["flow"] = flow
    spread = {"placement.mode": "collocated"} if hosts > 1 and not _placed(settings) else {}
    settings = {"algorithm": objects.take_algorithm(call.algorithm), **spread, **settings}
    return arguments_of(objects, settings, call.run_dir, call.resume)


def _placed(settings: Mapping[str, Any]) -> bool:
    """True if some setting says where roles run; otherwise every process of the job is used."""
    return any(_key(name, each).partition(".")[0] == "placement" for name, each in settings.items())


def _key(name: str, value: Any) -> str:
    return key_of(name, value=value) or ""


def _in_loop() -> bool:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True


async def _serve_only(system: Any) -> None:
    """Run nothing, on ranks other than 0: they serve the actors that rank 0 starts there."""
