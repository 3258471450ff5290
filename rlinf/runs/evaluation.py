"""Evaluations of language models: on held-out problems, and on benchmarks by name, each with its own sampling.

In: problems, and roles that are running. Out: an `Evaluation`, also as JSON for checkpoints and back; of benchmarks
pass@1 over all answers and how far it may be off, in lines. Answers to benchmarks are kept in a file as they come, so
that an evaluation that ended early goes on where it was: a line says by which model, prompts and sampling its answer
was made, and those of others are refused. Evaluations of a saved model lie below the run that made it, each in a
directory of its own: `outputs/<run>/evaluations/step_000100/`.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import itertools
import json
import os
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from rlinf.algos.evaluation import standard_errors
from rlinf.config.load import InputError
from rlinf.config.reading import parse_json
from rlinf.config.text import RunConfig
from rlinf.data.datasets.benchmarks import Benchmark, benchmarks_of
from rlinf.data.datasets.load import Data
from rlinf.data.sample import Evaluation, Group, Prompt, Sample
from rlinf.flows.evaluate import evaluate, is_right, measure
from rlinf.models.language.sources import context_length
from rlinf.rewards.base import RewardSource
from rlinf.runs.data import scores_alone
from rlinf.runs.roles import REWARD_MODEL, Roles
from rlinf.runtime.base.progress import Work, work
from rlinf.runtime.streams.stream import Stream


async def evaluate_on(data: Data, roles: Roles, config: RunConfig, passed: RewardSource | None = None) -> Evaluation:
    """Answer the held-out problems as a configuration says: the same while training and for a saved model.

    The judge scores; a reward model does where it alone scores.

    Args:
        data: its problems.
        roles: running.
        config: what.
        passed: a reward that was passed instead of being named.
    """
    settings = config.evaluation
    with work("evaluating", len(data.held_out), "problems") as evaluating:

        async def heard(group: Group) -> None:
            evaluating.advance()

        return await evaluate(
            Stream.of(data.held_out),
            roles["rollout"],
            roles["judge"],
            roles.get(REWARD_MODEL) if scores_alone(config, passed) else None,
            n=settings.samples,
            temperature=settings.temperature,
            ks=settings.k,
            on_group=heard,
            top_p=settings.top_p,
            max_new_tokens=settings.max_new_tokens,
        )


def answers_of(evaluation: Evaluation | None) -> dict[str, Any] | None:
    """An evaluation as JSON: its numbers and texts, without token ids; of benchmarks the numbers alone, since their
    answers may come to gigabytes."""
    if evaluation is None:
        return None
    answers = [
        {
            "id": sample.prompt.id,
            "prompt": sample.prompt.text,
            "answer": sample.prompt.answer,
            "text": sample.text,
            "reward": sample.reward,
            "outcome": sample.outcome,
            "truncated": sample.truncated,
            **({} if sample.extracted is None else {"extracted": sample.extracted}),
            **({"remark": sample.remark} if sample.remark else {}),
        }
        for group in evaluation.groups
        for sample in group.samples
    ]
    named = {name: each.metrics for name, each in evaluation.named.items()}
    return {"metrics": evaluation.metrics, "answers": answers, **({"named": named} if named else {})}


def evaluation_of(saved: dict[str, Any] | None) -> Evaluation | None:
    """Read what `answers_of` wrote, with empty token ids and benchmarks without answers."""
    if saved is None:
        return None
    groups: dict[int, list[Sample]] = {}
    none, nothing = np.empty(0, dtype=np.int64), np.empty(0, dtype=np.float32)
    for answer in saved["answers"]:
        prompt = Prompt(answer["id"], none, answer["prompt"], answer["answer"])
        its_group = groups.setdefault(prompt.id, [])
        columns = (none, nothing, none.astype(np.int32), answer["text"], answer["truncated"])
        sample = Sample(
            prompt,
            len(its_group),
            *columns,
            reward=answer["reward"],
            outcome=answer["outcome"],
            extracted=answer.get("extracted"),
        )
        its_group.append(sample)
    judged = tuple(Group(samples[0].prompt, tuple(samples)) for samples in groups.values())
    named = {name: Evaluation(each["accuracy"], (), each) for name, each in saved.get("named", {}).items()}
    return Evaluation(saved["metrics"]["accuracy"], judged, saved["metrics"], named)


class AnswerFile:
    """The answers to benchmarks of one model.

    Args:
        path: of the file; what it has is read.
        model: tells models apart: see `model_mark`.
        seed: of the samples.

    Raises:
        InputError: the file has something else in it.
    """

    def __init__(self, path: Path, model: str, seed: int):
        self._path, self._model, self._seed = path, model, seed
        self._rows: dict[str, list[Mapping[str, Any]]] = defaultdict(list)
        self._name, self._mark = "", ""
        if path.exists():
            self._read()

    def _read(self) -> None:
        """Read what is there. A last line that was cut off is removed, and its problem answered again."""
        text = self._path.read_bytes()
        whole = text[: text.rfind(b"\n") + 1]
        for number, line in enumerate(whole.splitlines(), 1):
            try:
                row = parse_json(line)
                if not isinstance(row["mark"], str):
                    raise TypeError("a mark is a text")
                self._rows[row["benchmark"]].append(row)
            except (ValueError, TypeError, LookupError):
                raise InputError(
                    f"{self._path}, line {number}: this is no answer to a benchmark; name another file"
                ) from None
        if len(whole) < len(text):
            os.truncate(self._path, len(whole))  # not written anew: a second cut must not cost all that is there

    def open(self, name: str, benchmark: Benchmark, prompts: Sequence[Prompt]) -> dict[int, Group]:
        """Begin with a benchmark; the groups that are there already, by the ids of their prompts.

        Raises:
            InputError: its answers here were made by another model, of other prompts, or with other settings.
        """
        self._name, self._mark = name, self._mark_of(benchmark, prompts)
        by_id, samples_of = {prompt.id: prompt for prompt in prompts}, defaultdict[int, dict[int, Sample]](dict)
        for row in self._rows[name]:
            if row["mark"] != self._mark:
                raise InputError(
                    f"{self._path}: its answers to {name} are of another model, other problems or other settings; "
                    "name another file, or remove this one"
                )
            samples_of[row["id"]][row["index"]] = _sample(by_id[row["id"]], row)  # what a cut left over comes again
        return {
            key: Group(by_id[key], tuple(samples[index] for index in range(benchmark.samples)))
            for key, samples in samples_of.items()
            if len(samples) == benchmark.samples
        }

    def heard(self, group: Group) -> None:
        """Write the answers to one problem of the benchmark that was begun with; what was there of it stays unused."""
        rows = [{"benchmark": self._name, "mark": self._mark, **_row(sample)} for sample in group.samples]
        with self._path.open("a", encoding="utf-8") as file:
            file.write("".join(json.dumps(row) + "\n" for row in rows))

    def _mark_of(self, benchmark: Benchmark, prompts: Sequence[Prompt]) -> str:
        digest = hashlib.sha256(f"{self._model} {self._seed} ".encode())
        digest.update(json.dumps({**_how(benchmark), "data": "", "split": ""}, sort_keys=True).encode())
        for prompt in prompts:
            digest.update(np.asarray(prompt.token_ids, dtype=np.int64).tobytes() + prompt.answer.encode() + b"\0")
        return digest.hexdigest()[:16]


def _how(benchmark: Benchmark) -> dict[str, Any]:
    """Fields of a benchmark; the form of its files only where it has one: files of answers are older than it."""
    fields = asdict(benchmark)
    return fields if benchmark.form else {name: value for name, value in fields.items() if name != "form"}


def model_mark(path: str) -> str:
    """Tells models apart: the name, and of a directory the sizes and times of the files in it."""
    directory = Path(path).expanduser()
    files = sorted(each for each in directory.iterdir() if each.is_file()) if directory.is_dir() else []
    return " ".join([path, *(f"{each.name} {(s := each.stat()).st_size} {s.st_mtime_ns}" for each in files)])


def _row(sample: Sample) -> dict[str, Any]:
    return {
        "id": sample.prompt.id,
        "index": sample.index,
        "prompt": sample.prompt.text,
        "answer": sample.prompt.answer,
        "text": sample.text,
        "reward": sample.reward,
        "extracted": sample.extracted,
        "outcome": sample.outcome,
        "truncated": sample.truncated,
        "tokens": sample.learned_tokens,
        **({"scores": dict(sample.scores)} if sample.scores else {}),
        **({"remark": sample.remark} if sample.remark else {}),
    }


def _sample(prompt: Prompt, row: Mapping[str, Any]) -> Sample:
    """An answer as it was written, with as many tokens as it had, which are not known any more."""
    count = row["tokens"]
    tokens, logprobs = np.zeros(count, dtype=np.int64), np.zeros(count, dtype=np.float32)
    known = {name: row[name] for name in ("index", "text", "truncated", "reward", "outcome", "extracted")}
    return Sample(
        prompt,
        response_ids=tokens,
        logprobs=logprobs,
        versions=tokens.astype(np.int32),
        remark=row.get("remark", ""),
        scores=row.get("scores", {}),
        **known,
    )


PASS = "pass@1"
"""Share of answers that are right, averaged over problems."""


async def evaluate_named(
    data: Data, roles: Roles, config: RunConfig, model_config: Any, answers: AnswerFile | None = None
) -> dict[str, Evaluation]:
    """Answer the problems of all benchmarks that a configuration names.

    Args:
        data: has their problems.
        roles: running.
        config: what.
        model_config: of the model, from transformers: answers end where it has no positions left.
        answers: where answers are written as they come, and read if they are there already; None keeps none.

    Raises:
        InputError: a problem leaves no room for an answer, or what is kept is of something else.
        NotScored: not one answer to a benchmark could be scored.
    """
    evaluations = {}
    for name, benchmark in benchmarks_of(config.evaluation.named).items():
        prompts = data.named[name]
        done = {} if answers is None else answers.open(name, benchmark, prompts)
        unanswered = [prompt for prompt in prompts if prompt.id not in done]
        groups = [*done.values()]
        if unanswered:
            with work(f"evaluating {name}", len(prompts), "problems") as evaluating:
                evaluating.at(len(done))
                evaluation = await evaluate(
                    Stream.of(unanswered),
                    roles["rollout"],
                    roles["judge"],
                    n=benchmark.samples,
                    temperature=benchmark.temperature,
                    top_p=benchmark.top_p,
                    max_new_tokens=longest_answer(name, benchmark, prompts, model_config),
                    on_group=partial(_heard, answers, evaluating),
                )
            groups += evaluation.groups
        evaluations[name] = measured(groups, benchmark)
    return evaluations


async def _heard(answers: AnswerFile | None, evaluating: Work, group: Group) -> None:
    """One more problem is answered."""
    if answers is not None:
        await asyncio.to_thread(answers.heard, group)
    evaluating.advance()


def longest_answer(name: str, benchmark: Benchmark, prompts: Sequence[Prompt], model_config: Any) -> int:
    """Tokens of the longest answer that a model has positions for, at most as many as a benchmark wants.

    Raises:
        InputError: there are none left behind the longest problem.
    """
    context = context_length(model_config)
    longest = max((len(prompt.token_ids) for prompt in prompts), default=0)
    if context is not None and context <= longest:
        raise InputError(
            f"evaluation.named.{name}: the model has positions for {context:,} tokens, and the longest problem has "
            f"{longest:,}: no answer fits behind it"
        )
    return benchmark.max_new_tokens if context is None else min(benchmark.max_new_tokens, context - longest)


def measured(groups: Sequence[Group], benchmark: Benchmark) -> Evaluation:
    """Measure answers to a benchmark: all that `measure` tells, pass@1, and its standard errors.

    Args:
        groups: judged answers, at least one group.
        benchmark: whose.

    Raises:
        NotScored: not one answer could be scored.
    """
    groups = sorted(groups, key=lambda group: group.prompt.id)
    metrics = measure(groups, sorted({1, *benchmark.k}))
    right = [[float(is_right(reward)) for reward in group.rewards] for group in groups if group.rewards]
    drawing, choosing = standard_errors(right)
    metrics |= {f"{PASS}/stderr": drawing} if drawing is not None else {}
    metrics |= {f"{PASS}/stderr_problems": choosing} if choosing is not None else {}
    metrics |= {f"score/{name}": mean for name, mean in _means_of_parts(groups).items()}
    metrics |= {"problems": float(len(groups)), "samples": float(max(len(group.samples) for group in groups))}
    return Evaluation(metrics["accuracy"], tuple(groups), metrics)


def _means_of_parts(groups: Sequence[Group]) -> dict[str, float]:
    """The mean of each part of the rewards, over the answers that have it: a category's answers share a name."""
    parts = defaultdict[str, list[float]](list)
    for name, value in (part for group in groups for sample in group.samples for part in sample.scores.items()):
        parts[name].append(value)
    return {name: sum(values) / len(values) for name, values in sorted(parts.items())}


def with_benchmarks(evaluation: Evaluation | None, named: Mapping[str, Evaluation]) -> Evaluation:
    """An evaluation with those of benchmarks.

    Args:
        evaluation: on held-out problems; None: there are none, and its accuracy is the mean of the benchmarks' pass@1.
        named: by name, at least one.
    """
    if evaluation is not None:
        return Evaluation(evaluation.accuracy, evaluation.groups, evaluation.metrics, named)
    mean = sum(each.metrics[PASS] for each in named.values()) / len(named)
    return Evaluation(mean, (), {"accuracy": mean}, named)


def numbers_of(evaluation: Evaluation) -> dict[str, float]:
    """An evaluation as metrics, those of benchmarks behind their names: `aime24/pass@1`."""
    named = {f"{name}/{key}": value for name, each in evaluation.named.items() for key, value in each.metrics.items()}
    return {**evaluation.metrics, **named}


def named_in_words(evaluation: Evaluation) -> Iterator[str]:
    """A line for each benchmark: pass@1 with the standard error of drawing answers."""
    for name, each in evaluation.named.items():
        metrics = each.metrics
        count = f"{metrics['problems']:.0f} problems, {metrics['samples']:.0f} answers each"
        yield f"{name}: {PASS} {_share(metrics)} ({count})"


def compared_named(before: Evaluation, after: Evaluation) -> Iterator[str]:
    """A line for each benchmark on what came of a run.

    Args:
        before, after: benchmarks that the first one lacks are told by themselves.
    """
    for name, each in after.named.items():
        first = before.named.get(name)
        change = f"{_share(first.metrics)} -> " if first is not None else ""
        yield f"{name}: {PASS} {change}{_share(each.metrics)}"


def _share(metrics: Mapping[str, float]) -> str:
    error = metrics.get(f"{PASS}/stderr")
    return f"{metrics[PASS]:.1%}" + ("" if error is None else f" ± {error:.1%}")


_STEP = re.compile(r"step_\d+")


@contextlib.contextmanager
def new_evaluation(model: Path, outputs: Path) -> Iterator[Path]:
    """An empty directory for an evaluation, which nothing else has: `<run>/evaluations/step_000100`.

    It is named by the checkpoint's step or the model's own name, with `-2` and so on behind it where that is there. One
    that nothing was written to, because the evaluation failed, is removed again.

    Args:
        model: directory of a model or policy, or a name that is none.
        outputs: of all runs: what no run made is evaluated there.

    Raises:
        InputError: it cannot be made.
    """
    directory = _made(model, outputs)
    try:
        yield directory
    finally:
        with contextlib.suppress(OSError):  # it is not empty
            directory.rmdir()
            directory.parent.rmdir()


def _made(model: Path, outputs: Path) -> Path:
    path = model.expanduser().resolve()  # `latest` leads to the checkpoint of a step
    run = next((each for each in (path, *path.parents) if (each / "metrics.jsonl").is_file()), None)
    step = next((each.name for each in (path, *path.parents) if _STEP.fullmatch(each.name)), None)
    # relative where it can be: that is how runs are named, and lines of a terminal are short
    root = (outputs if run is None else _from_here(run)) / "evaluations"
    for number in itertools.count(1):
        directory = root / ((step or path.name) + (f"-{number}" if number > 1 else ""))
        try:
            directory.mkdir(parents=True)  # fails where it is there: two evaluations at once have one each
        except FileExistsError:
            continue
        except OSError as error:
            raise InputError(
                f"{directory} cannot be made: {error.strerror or error}; --output FILE writes elsewhere"
            ) from None
        return directory
    raise AssertionError


def _from_here(path: Path) -> Path:
    here = Path().resolve()
    return path.relative_to(here) if path.is_relative_to(here) else path
