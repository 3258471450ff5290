"""Evaluation on held-out problems, as a configuration says, and what checkpoints keep of it.

In: the problems of a run, and its roles. Out: an `Evaluation`, also as JSON and back.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from rlinf.config.text import RunConfig
from rlinf.data.datasets.load import Data
from rlinf.data.sample import Evaluation, Group, Prompt, Sample
from rlinf.flows.evaluation.answers import evaluate
from rlinf.job.roles.of_text import scores_alone
from rlinf.job.roles.running import REWARD_MODEL, Roles
from rlinf.rewards.base import RewardSource
from rlinf.runtime.base.progress import work
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
            heard=heard,
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
    """What `answers_of` wrote, with empty token ids and benchmarks without answers."""
    if saved is None:
        return None
    groups: dict[int, list[Sample]] = {}
    none, nothing = np.empty(0, dtype=np.int64), np.empty(0, dtype=np.float32)
    for answer in saved["answers"]:
        prompt = Prompt(answer["id"], none, answer["prompt"], answer["answer"])
        its_group = groups.setdefault(prompt.id, [])
        read = (none, nothing, none.astype(np.int32), answer["text"], answer["truncated"])
        sample = Sample(
            prompt,
            len(its_group),
            *read,
            reward=answer["reward"],
            outcome=answer["outcome"],
            extracted=answer.get("extracted"),
        )
        its_group.append(sample)
    judged = tuple(Group(samples[0].prompt, tuple(samples)) for samples in groups.values())
    named = {name: Evaluation(each["accuracy"], (), each) for name, each in saved.get("named", {}).items()}
    return Evaluation(saved["metrics"]["accuracy"], judged, saved["metrics"], named)
