"""Answers to benchmarks in a file, written as they come, so that an evaluation that ended early goes on where it was.

In: judged groups. Out: a line of JSON for each answer; and, of a file that is there already, the groups that are whole.
A line says by which model, prompts and sampling its answer was made: those of others are refused, never mixed in.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from rlinf.config.loading import InputError
from rlinf.config.reading import parse_json
from rlinf.data.datasets.benchmarks import Benchmark
from rlinf.data.sample import Group, Prompt, Sample


class KeptAnswers:
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
        by_id, found = {prompt.id: prompt for prompt in prompts}, defaultdict[int, dict[int, Sample]](dict)
        for row in self._rows[name]:
            if row["mark"] != self._mark:
                raise InputError(
                    f"{self._path}: its answers to {name} are of another model, other problems or other settings; "
                    "name another file, or remove this one"
                )
            found[row["id"]][row["index"]] = _sample(by_id[row["id"]], row)  # what a cut left over comes again
        return {
            key: Group(by_id[key], tuple(samples[index] for index in range(benchmark.samples)))
            for key, samples in found.items()
            if len(samples) == benchmark.samples
        }

    def heard(self, group: Group) -> None:
        """Write the answers to one problem of the benchmark that was begun with; what was there of it stays unused."""
        rows = [{"benchmark": self._name, "mark": self._mark, **_row(sample)} for sample in group.samples]
        with self._path.open("a", encoding="utf-8") as file:
            file.write("".join(json.dumps(row) + "\n" for row in rows))

    def _mark_of(self, benchmark: Benchmark, prompts: Sequence[Prompt]) -> str:
        digest = hashlib.sha256(f"{self._model} {self._seed} ".encode())
        digest.update(json.dumps({**asdict(benchmark), "data": "", "split": ""}, sort_keys=True).encode())
        for prompt in prompts:
            digest.update(np.asarray(prompt.token_ids, dtype=np.int64).tobytes() + prompt.answer.encode() + b"\0")
        return digest.hexdigest()[:16]


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
        **({"remark": sample.remark} if sample.remark else {}),
    }


def _sample(prompt: Prompt, row: Mapping[str, Any]) -> Sample:
    """An answer as it was written, with as many tokens as it had, which are not known any more."""
    count = row["tokens"]
    tokens, logprobs = np.zeros(count, dtype=np.int64), np.zeros(count, dtype=np.float32)
    return Sample(
        prompt, row["index"], tokens, logprobs, tokens.astype(np.int32), row["text"], row["truncated"],
        reward=row["reward"], outcome=row["outcome"], extracted=row["extracted"], remark=row.get("remark", ""),
    )  # fmt: skip
