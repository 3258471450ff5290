"""What a run learns from and is evaluated on, from its configuration; and evaluations as JSON, for checkpoints."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import numpy as np

from rlinf.config.loading import InputError
from rlinf.config.text import RunConfig
from rlinf.data.datasets.load import Data, PromptOptions, load_data
from rlinf.data.datasets.rows import DataError
from rlinf.data.sample import Evaluation, Group, Prompt, Sample


def load_problems(config: RunConfig) -> Data:
    """What a configuration learns from and is evaluated on, in an order drawn from its seed.

    Raises:
        InputError: something cannot be read or used.
    """
    data, evaluation = config.data, config.evaluation
    options = {field.name: getattr(data, field.name) for field in fields(PromptOptions)}
    try:
        return load_data(
            config.model.tokenizer or config.model.path,
            train=data.train,
            split=data.split,
            shuffle=data.shuffle,
            seed=config.seed,
            task=config.task.name,
            digits=config.task.digits,
            evaluation=evaluation.data,
            evaluation_split=evaluation.split,
            evaluation_columns=evaluation.columns,
            problems=evaluation.problems,
            **options,
        )
    except DataError as error:
        raise InputError(str(error)) from error


def evaluation_settings(config: RunConfig) -> dict[str, Any]:
    """How `evaluate` answers, from a configuration: the same while training and for a saved model."""
    evaluation = config.evaluation
    return {
        "n": evaluation.samples,
        "temperature": evaluation.temperature,
        "ks": evaluation.k,
        "top_p": evaluation.top_p,
        "max_new_tokens": evaluation.max_new_tokens,
    }


def answers_of(evaluation: Evaluation | None) -> dict[str, Any] | None:
    """An evaluation as JSON: its numbers and texts, without token ids."""
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
        }
        for group in evaluation.groups
        for sample in group.samples
    ]
    return {"metrics": evaluation.metrics, "answers": answers}


def evaluation_of(saved: dict[str, Any] | None) -> Evaluation | None:
    """What `answers_of` wrote, with empty token ids."""
    if saved is None:
        return None
    groups: dict[int, list[Sample]] = {}
    none, nothing = np.empty(0, dtype=np.int64), np.empty(0, dtype=np.float32)
    for answer in saved["answers"]:
        prompt = Prompt(answer["id"], none, answer["prompt"], answer["answer"])
        its_group = groups.setdefault(prompt.id, [])
        sample = Sample(
            prompt, len(its_group), none, nothing, none.astype(np.int32), answer["text"], answer["truncated"],
            reward=answer["reward"], outcome=answer["outcome"],
        )  # fmt: skip
        its_group.append(sample)
    judged = tuple(Group(samples[0].prompt, tuple(samples)) for samples in groups.values())
    return Evaluation(saved["metrics"]["accuracy"], judged, saved["metrics"])
