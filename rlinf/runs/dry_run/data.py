"""Dry run of a run's data: opens it, makes its first prompts, and checks columns, templates, chats, rewards, lengths.

In: a configuration that is prepared. Out: what was found, in lines; or one error that names what cannot be used.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from rlinf.actors.judge import try_reward
from rlinf.config.learning import SUPERVISED
from rlinf.config.load import ConfigError, Problem
from rlinf.config.text import RewardConfig, RunConfig
from rlinf.data.datasets.benchmarks import benchmarks_of
from rlinf.data.datasets.source import counted
from rlinf.data.datasets.stream import Counted, left_out
from rlinf.data.sample import Prompt
from rlinf.metrics.alarms import DEFAULT_REWARD, right_answers
from rlinf.rewards.base import RewardSource
from rlinf.runs.prepare import RunPlan
from rlinf.runs.roles import naming
from rlinf.runs.supervised import conversations_of
from rlinf.runs.text import load_data_of, no_end_token, reward_is_default
from rlinf.runs.text_roles import check_reward, scores_alone

_LOOKED_AT = 32
"""Prompts that are made: enough to meet each kind of row, soon enough for data of any size."""
_SCORED = 4
"""Number of the first prompts whose own answers the reward is tried on."""
_SHOWN = 80
"""Characters of the first prompt."""


def look_at_data(config: RunConfig, prepared: RunPlan) -> list[str]:
    """Describe the data that a run will read, in lines.

    Args:
        config: of a run on text.
        prepared: the same; there must not be a running event loop.

    Raises:
        InputError: something cannot be opened or used, or a reward takes a column that there is not.
    """
    if config.algorithm.name in SUPERVISED:
        return _look_at_conversations(config, prepared)
    tokenizer, train = config.model.tokenizer, config.data.train
    with naming(*("model.tokenizer", tokenizer) if tokenizer else ("data.train", train), doing="opening it"):
        data = load_data_of(config, prepared.objects)
    with naming("data", train or config.task.name, "making the first prompts of it"):
        prompts: list[Prompt] = asyncio.run(data.train.draw(_LOOKED_AT))
        if config.sft.steps:
            data.worked(prompts)
    with naming("reward", config.reward.function):
        check_reward(config, data, prepared.objects.reward)
    tried = [] if config.agent.function else _try_own_reward(config, prepared, prompts)
    for name, benchmark in benchmarks_of(config.evaluation.named).items():
        key, settings = f"evaluation.named.{name}.reward", replace(config.reward, args=dict(benchmark.args))
        tried += _try_reward(key, benchmark.reward, benchmark.reward, settings, data.named[name])
    lengths = sorted(len(prompt.token_ids) for prompt in prompts)
    excerpt = prompts[0].text if len(prompts[0].text) <= _SHOWN else f"{prompts[0].text[:_SHOWN]}..."
    evaluated = f"{len(data.held_out):,} problems" if data.held_out else "nothing"
    unasked = prepared.objects.agent is None and reward_is_default(config, prepared.objects)
    rows = [{"answer": prompt.answer} for prompt in prompts]
    ends = no_end_token(config, data)
    return [
        *(data.notes or (f"generated problems of the task {config.task.name}",)),
        *((f"no reward was chosen: {DEFAULT_REWARD}; {right_answers(rows)}",) if unasked else ()),
        *((ends,) if ends else ()),
        f"first prompts: {lengths[0]} to {lengths[-1]} tokens, such as {excerpt!r}; evaluated on {evaluated}",
        *_warnings(data.train),
        *tried,
    ]


def _warnings(stream: Counted) -> list[str]:
    """Lines on rows of a stream that were left out, cut or hardly known to the tokenizer."""
    return [f"warning: of the first {counted(stream.position, 'row')}, {line}" for line in left_out(stream).values()]


def _try_own_reward(config: RunConfig, prepared: RunPlan, prompts: Sequence[Prompt]) -> list[str]:
    """Try the run's own reward function, if it has one; see `_try_reward`."""
    passed = prepared.objects.reward
    if scores_alone(config, passed):
        return []
    key = "reward.parts" if config.reward.parts else "reward.function"
    value = config.reward.parts or config.reward.function
    return _try_reward(key, value, passed or config.reward.source, config.reward, prompts)


def _try_reward(
    key: str, value: Any, source: RewardSource, settings: RewardConfig, prompts: Sequence[Prompt]
) -> list[str]:
    """Score the first prompts' own answers with a reward, and describe the result in a line.

    Args:
        key, value: where the configuration names it.
        source, settings: see `try_reward`.
        prompts: of which the first are scored.

    Raises:
        ConfigError: it scores none of them.
    """
    with naming(key, value, "calling it"):
        verdicts = asyncio.run(try_reward(source, settings, prompts[:_SCORED]))
    failed = [verdict.remark for _, verdict in verdicts if verdict.outcome != "ok"]
    if len(failed) == len(verdicts):
        advice = f"it scores none of the first {len(failed)} rows' own answers; of the first it is said: {failed[0]}"
        raise ConfigError([Problem("configuration", key, value, advice)])
    answer, first = next((answer, verdict) for answer, verdict in verdicts if verdict.outcome == "ok")
    excerpt = repr(answer if len(answer) <= _SHOWN else f"{answer[:_SHOWN]}...")
    lines = [f"{key.rpartition('.')[0]}: {first.value:g} for a row's own answer, {excerpt}"]
    if failed:
        lines.append(f"warning: the reward fails on {len(failed)} of the first {len(verdicts)} answers: {failed[0]}")
    return lines


def _look_at_conversations(config: RunConfig, prepared: RunPlan) -> list[str]:
    """Describe the data of a run that learns from given texts, in lines; see `look_at_data`."""
    with naming("data.train", config.data.train, "opening it"):
        data = conversations_of(config, prepared.objects)
    with naming("data", config.data.train or config.task.name, "making the first texts of it"):
        groups = asyncio.run(data.train.draw(_LOOKED_AT))
    lengths = sorted(len(group.prompt.token_ids) + len(one.response_ids) for group in groups for one in group.samples)
    learned = sum(sample.learned_tokens for group in groups for sample in group.samples)
    evaluated = f"{len(data.held_out):,} held-out texts" if data.held_out else "nothing"
    return [
        *data.notes,
        f"first texts: {lengths[0]} to {lengths[-1]} tokens, {learned / sum(lengths):.0%} of them learned; evaluated "
        f"on {evaluated}",
        *_warnings(data.train),
    ]
