"""Data of runs on text: loaded as a configuration says, checked against the reward, and looked at by a dry run.

In: a `RunConfig`, and rows and rewards that were passed instead of being named. Out: streams of problems or of
conversations in an order drawn from the seed; lines on what a run will read, and one error that names the key.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import fields, replace
from typing import Any

from rlinf.actors.judge import try_reward
from rlinf.agents.configuration import check_tools_shown
from rlinf.config.learning import REWARD_MODEL, SFT, SUPERVISED
from rlinf.config.load import ConfigError, InputError, Problem
from rlinf.config.text import RewardConfig, RunConfig
from rlinf.data.datasets import source
from rlinf.data.datasets.benchmarks import benchmarks_of
from rlinf.data.datasets.load import (
    ConversationOptions,
    Conversations,
    Data,
    PromptOptions,
    Rooms,
    load_conversations,
    load_data,
)
from rlinf.data.datasets.prompts import Room
from rlinf.data.datasets.source import DataError, counted
from rlinf.data.datasets.stream import Counted, left_out
from rlinf.data.sample import Prompt
from rlinf.metrics.alarms import DEFAULT_REWARD, right_answers
from rlinf.models.language.sources import limits, pictures_of
from rlinf.rewards.base import OFFERED, Reward, RewardSource
from rlinf.runs.prepare import InMemory, RunPlan
from rlinf.runs.roles import naming


def read_from(config: RunConfig, objects: InMemory | None) -> dict[str, Any]:
    """Where a configuration has rows to learn from and to be evaluated on, as arguments of what loads them.

    Args:
        config: what.
        objects: rows that were passed instead of being named.
    """
    data, evaluation = config.data, config.evaluation
    passed = InMemory() if objects is None else objects
    return {
        "train": data.train if passed.train is None else passed.train,
        "split": data.split,
        "shuffle": data.shuffle,
        "seed": config.seed,
        "task": config.task.name,
        "digits": config.task.digits,
        "evaluation": evaluation.data if passed.evaluation is None else passed.evaluation,
        "evaluation_split": evaluation.split,
        "evaluation_columns": evaluation.columns,
        "problems": evaluation.problems,
        "pictures": lambda tokenizer: pictures_of(config.model.path or config.model.config, tokenizer),
    }


def room_of(config: RunConfig, answer: int, key: str) -> Room:
    """The longest prompt that the model and its engine take.

    Args:
        config: of the run.
        answer: tokens that the answer behind it may have; 0 for none.
        key: of the configuration that says so.
    """
    model = limits(config.model.path or config.model.config)
    served = None if config.rollout.engine == "transformers" else config.rollout.max_tokens
    lengths = {"the model has positions for": model.length, "a server's cache, rollout.max_tokens, holds": served}
    limits_known = [(length, what) for what, length in lengths.items() if length is not None]
    if not limits_known:
        return Room(ids=model.vocabulary)
    length, what = min(limits_known)
    behind = f", and an answer may have {answer:,} of them by {key}" if answer else ""
    return Room(length - answer, f"{what} {length:,}{behind}", model.vocabulary)


def rooms_of(config: RunConfig, objects: InMemory | None) -> Rooms:
    """Room that the model's length leaves for problems, behind which an answer as long as allowed must fit; an agent's
    answers are as long as there is room for."""
    if config.agent.function is not None or (objects is not None and objects.agent is not None):
        one = room_of(config, 1, "its least length")
        return Rooms(one, one)
    own, evaluated = config.rollout.max_new_tokens, config.evaluation.max_new_tokens
    train = room_of(config, own, "rollout.max_new_tokens")
    return Rooms(train, train if evaluated is None else room_of(config, evaluated, "evaluation.max_new_tokens"))


def load_data_of(config: RunConfig, objects: InMemory | None = None) -> Data:
    """Load what a configuration learns from and is evaluated on, in an order drawn from its seed.

    Args:
        config: what.
        objects: problems that were passed instead of being named.

    Raises:
        InputError: something cannot be read or used, or the chat template hides the tools of the agent.
    """
    options = {field.name: getattr(config.data, field.name) for field in fields(PromptOptions)}
    try:
        data = load_data(
            config.model.tokenizer or config.model.path,
            named=benchmarks_of(config.evaluation.named),
            rooms=rooms_of(config, objects),
            **read_from(config, objects),
            **options,
        )
    except DataError as error:
        raise InputError(str(error)) from error
    check_tools_shown(config, data.tokenizer, None if objects is None else objects.agent)
    return data


def conversations_of(config: RunConfig, objects: InMemory | None = None) -> Conversations:
    """Load what a configuration learns from, in an order drawn from its seed.

    Args:
        config: what.
        objects: rows that were passed instead of being named.

    Raises:
        InputError: something cannot be read or used.
    """
    data, name = config.data, config.algorithm.name
    options = ConversationOptions(
        kind="sft" if name == SFT else "pairs",
        scored=name == REWARD_MODEL,
        learn=config.supervised.learn,
        columns=data.columns,
        chat=data.chat,
        system=data.system,
        chat_template=data.chat_template,
        chat_args=data.chat_args,
        max_tokens=config.supervised.max_tokens,
        overlong=data.overlong,
        unusable=data.unusable,
        room=room_of(config, 0, ""),
    )
    try:
        return load_conversations(
            config.model.tokenizer or config.model.path,
            options=options,
            **read_from(config, objects),
        )
    except DataError as error:
        raise InputError(str(error)) from error


# Rewards and ends of answers ------------------------------------------------------------------------------------------


def reward_is_default(config: RunConfig, objects: InMemory) -> bool:
    """True for rows of the user's own that nobody chose a reward for; the generated problems are made for `exact`."""
    own_reward = objects.reward is not None or bool(config.reward.parts)
    own = objects.train is not None or config.data.train is not None
    return own and not own_reward and config.reward.function == RewardConfig().function


def scores_alone(config: RunConfig, passed: RewardSource | None) -> bool:
    """Tell whether no reward function scores, only a reward model."""
    return passed is None and config.reward.function is None and not config.reward.parts


def check_reward(config: RunConfig, data: Data, passed: RewardSource | None) -> None:
    """See that rows have what the reward takes; and benchmarks what theirs do, which are to work on this machine, too.

    Raises:
        InputError, ConfigError: it takes a column that there is not; or a benchmark's reward does, or cannot work here.
    """
    for name, benchmark in benchmarks_of(config.evaluation.named).items():
        columns = {column for prompt in data.named[name] for column in prompt.row}
        with naming(f"evaluation.named.{name}.reward", benchmark.reward):
            own = Reward.of(benchmark.reward, benchmark.args, make=False)
            own.check((*OFFERED, "answer", "prompt", *columns))
            own.ready()
    reward = config.reward
    if data.columns:  # they are not known yet where rows come one by one
        try:
            Reward.of(passed or reward.source, reward.args, make=False).check({*OFFERED, "messages", *data.columns})
        except ValueError as error:
            raise InputError(f"reward: {error}") from error
        columns = {*OFFERED, "messages", *data.columns}
        fields = source.fields(config.reward_model.template or "")
        if missing := [name for name in fields if name not in columns and name.partition(".")[0] not in columns]:
            raise InputError(f"reward_model.template: there is no column {missing[0]!r}; there are {sorted(columns)}")


def no_end_token(config: RunConfig, data: Data) -> str:
    """A line on answers that cannot end, as neither tokenizer nor model nor configuration names an end; else ""."""
    model, rollout = config.model.path or config.model.config, config.rollout
    ends = data.tokenizer.eos_token_id is not None or limits(model).end_ids
    if ends or rollout.stop or rollout.stop_token_ids:
        return ""
    return (
        f"Neither tokenizer nor model names an end token, so every answer runs into rollout.max_new_tokens="
        f"{rollout.max_new_tokens}; set rollout.stop_token_ids or rollout.stop, or the tokenizer's eos_token"
    )


# Dry runs -------------------------------------------------------------------------------------------------------------

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
        if config.sft.steps and prepared.objects.player is None:
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
