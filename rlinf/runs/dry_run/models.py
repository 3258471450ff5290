"""Dry run of the models that a configuration names: built without memory, and run once.

In: a configuration. Out: transformers' own configuration of the model, and what is wrong, by key. On the meta device
tensors have shapes and no values, so a model of any size is tried in a second, and no weights are read.
"""

from __future__ import annotations

import copy
import functools
import inspect
import warnings
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
import transformers
from transformers import CONFIG_MAPPING, AutoConfig, PreTrainedTokenizerBase
from transformers.utils import logging

from rlinf.config.importing import RAISED
from rlinf.config.learning import REWARD_MODEL, SUPERVISED
from rlinf.config.load import Problem
from rlinf.config.schema import nearest
from rlinf.config.text import ModelConfig, RunConfig
from rlinf.data.datasets.toy_tasks import make_task
from rlinf.data.images import FAMILIES, auto_class
from rlinf.data.rng import ONE_AT_A_TIME
from rlinf.data.tokenizer import load_tokenizer, pretrained, without_own_code
from rlinf.models.language.arrangement import arranged
from rlinf.models.language.sources import new_config, pictures_of, unreadable_weights, unsupported
from rlinf.runs.dry_run.footprint import MOST_PARTS
from rlinf.runs.dry_run.transformer import remembered
from rlinf.runs.roles import problem

_META = torch.device("meta")


def policy_model(config: RunConfig) -> tuple[Any, list[Problem]]:
    """The transformers config of the policy, with the vocabulary that it will have; or what is wrong with it."""
    with _quiet():
        return _policy_model(config)


def _policy_model(config: RunConfig) -> tuple[Any, list[Problem]]:
    model = config.model
    key: str = "model.path"
    value: Any = model.path
    engine = config.rollout.engine == "transformers"
    try:
        if model.path is not None:
            model_config = pretrained(AutoConfig, model.path)
            key, value = ("model.tokenizer", model.tokenizer) if model.tokenizer else (key, value)
            tokenizer = load_tokenizer(model.tokenizer or model.path)
            if model_config.model_type in FAMILIES:
                pictures_of(model.path, tokenizer)
        else:
            if problems := list(_mistakes_in(model.config)):
                return None, problems
            key, value = "model.tokenizer", model.tokenizer
            tokenizer = load_tokenizer(model.tokenizer or make_task(config.task.name, digits=1).tokenizer)
            key, value = "model.config", model.config
            model_config = new_config(model.config, tokenizer)
            pictures_of(model.config, tokenizer)  # sees that they fit
        if (reason := _too_many_tokens(model_config, tokenizer)) is not None:
            return None, [Problem("configuration", key, value, reason)]
        key, value = ("model.path", model.path) if model.path is not None else ("model.config", model.config)
        if engine and config.algorithm.name not in SUPERVISED and (reason := unsupported(model_config)) is not None:
            return None, [Problem("configuration", *_where(model, model_config), reason)]
        if config.algorithm.name == REWARD_MODEL and (
            type(model_config) not in transformers.MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING
        ):
            reason = f"transformers puts no scoring head on a {model_config.model_type}, so it becomes no reward model"
            return None, [
                Problem("configuration", *_where(model, model_config), f"{reason}; take a model of text alone")
            ]
        _tried_out(model_config, engine=engine)
        if model.path is not None and (damage := unreadable_weights(model.path)) is not None:
            return None, [Problem("configuration", key, value, damage)]
    except RAISED as error:  # of transformers, which checks little of what it is given
        if key == "model.config":
            key, value = _guilty(model.config, tokenizer) or (key, value)
        return None, [problem(key, value, error, "loading it" if isinstance(error, OSError) else "")]
    return model_config, list(_adapter_mistakes(config, model_config))


def _too_many_tokens(model_config: Any, tokenizer: PreTrainedTokenizerBase) -> str | None:
    """Why a tokenizer is another model's; None if it may be this one's. Tokens that were added to one later, such as
    for padding, may lie behind the model's: rows that have one are left out as they are drawn."""
    vocabulary = getattr(model_config.get_text_config(), "vocab_size", None)
    if vocabulary is None or tokenizer.vocab_size <= vocabulary:
        return None
    return (
        f"the tokenizer has {tokenizer.vocab_size:,} tokens and the model an embedding of {vocabulary:,}: it is "
        "another model's; take the model's own"
    )


def _where(model: ModelConfig, model_config: Any) -> tuple[str, Any]:
    """The key that chose the type of the model, and its value."""
    if model.path is not None:
        return "model.path", model.path
    return "model.config.model_type", model_config.model_type


def other_models(config: RunConfig, roles: Collection[str]) -> Iterator[Problem]:
    """Yield problems of the saved models of critic, reference and teacher, as far as a run has these roles, and of the
    reward model's tokenizer."""
    for key, path in (
        ("critic.model", config.critic.model),
        ("reference.model", config.reference.model),
        ("teacher.model", config.teacher.model),
    ):
        if path is not None and path != config.model.path and key.partition(".")[0] in roles:
            try:
                with _quiet():
                    _tried_out(pretrained(AutoConfig, path), engine=False)
                if (damage := unreadable_weights(path)) is not None:
                    yield Problem("configuration", key, path, damage)
            except RAISED as error:  # as above
                yield problem(key, path, error)
    judge = config.reward_model
    if judge.path is not None and judge.chat:
        key, path = ("path", judge.path) if judge.tokenizer is None else ("tokenizer", judge.tokenizer)
        try:
            if not load_tokenizer(path).chat_template:
                advice = f"the tokenizer of {path} has no chat template; set it to false or null"
                yield Problem("configuration", "reward_model.chat", judge.chat, advice)
        except RAISED as error:
            yield problem(f"reward_model.{key}", path, error)


@contextmanager
def _quiet() -> Iterator[None]:
    """Without the warnings of transformers and peft about what is only tried."""
    before = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        with warnings.catch_warnings(action="ignore"):
            yield
    finally:
        logging.set_verbosity(before)


# One model ------------------------------------------------------------------------------------------------------------


def _empty(model_config: Any) -> transformers.PreTrainedModel:
    with ONE_AT_A_TIME, _META:
        kind = auto_class(model_config)
        model: transformers.PreTrainedModel = without_own_code(kind, copy.deepcopy(model_config), dtype=torch.float32)
    if hasattr(model, "set_experts_implementation"):
        model.set_experts_implementation("eager")  # the grouped one asks for other types here than where it computes
    return model.eval()


def _tried_out(model_config: Any, *, engine: bool) -> None:
    """`_try_out`, unless a model like this was found to work before."""
    what = f"runs {type(model_config).__qualname__} {engine} {model_config.to_json_string()}"
    remembered(what, lambda: _try_out(model_config, engine=engine))


@torch.no_grad()
def _try_out(model_config: Any, *, engine: bool) -> None:
    """Build a model without memory, and let it read once, as the engine does if it is to. Raises what that raises."""
    from rlinf.engines.transformers.model import ModelForward

    model, ids = _empty(model_config), torch.zeros(2, 3, dtype=torch.int64, device=_META)
    with _without_values():
        if engine:
            ModelForward(model, 0).read(ids, None)
        else:  # without a cache, shapes go unchecked
            model(input_ids=ids, past_key_values=transformers.DynamicCache(), use_cache=True)


class _without_values:  # reads as a statement
    """Passes over what fails only since tensors have no values here, such as the choice of experts."""

    def __enter__(self) -> None:
        return None

    def __exit__(self, _: object, error: BaseException | None, __: object) -> bool:
        return isinstance(error, NotImplementedError) or (isinstance(error, RuntimeError) and "meta" in str(error))


# A new model's keys ---------------------------------------------------------------------------------------------------


def _mistakes_in(settings: Mapping[str, Any], path: str = "model.config", kind: Any = None) -> Iterator[Problem]:
    """Keys that a model type has not, and numbers that no model has; of its parts, too."""
    kind = settings.get("model_type", kind)
    if not isinstance(kind, str) or kind not in CONFIG_MAPPING:
        near = nearest(str(kind), CONFIG_MAPPING.keys())
        advice = "transformers has no such model type" + (f"; did you mean {near}?" if near else "")
        yield Problem("configuration", f"{path}.model_type", kind, advice)
        return
    keys, parts = _keys_of(kind), _parts_of(kind)
    for key, value in settings.items():
        if key in parts and isinstance(value, Mapping):
            yield from _mistakes_in(value, f"{path}.{key}", parts[key])
        elif key not in keys:
            near = nearest(str(key), keys)
            advice = f"{kind} has no such key" + (f"; did you mean {near}?" if near else "")
            yield Problem("configuration", f"{path}.{key}", value, advice)
        elif any(part in key for part in ("layer", "expert", "head")) and _exceeds(value):
            yield Problem("configuration", f"{path}.{key}", value, f"no model has more than {MOST_PARTS:,}")


def _exceeds(value: Any) -> bool:
    return isinstance(value, int | float) and value > MOST_PARTS


@functools.cache
def _keys_of(kind: str) -> frozenset[str]:
    """The keys that a transformers configuration takes; it would silently keep any other."""
    default: Any = CONFIG_MAPPING[kind]
    return frozenset(
        {*default().to_dict(), *default.attribute_map, *inspect.signature(default).parameters} - {"kwargs"}
    )


@functools.cache
def _parts_of(kind: str) -> dict[str, str]:
    """Model types of the parts of a model that reads pictures, by their keys; empty for others."""
    default: Any = CONFIG_MAPPING[kind]() if kind in FAMILIES else None
    return {} if default is None else {key: getattr(default, key).model_type for key in default.sub_configs}


def _guilty(settings: Mapping[str, Any], tokenizer: PreTrainedTokenizerBase) -> tuple[str, Any] | None:
    """The key without which, or with another value of which, a new model can be built and run; None if no single one
    is to blame."""
    for key in settings:
        rest = {name: value for name, value in settings.items() if name != key}
        if key != "model_type" and any(_works({**rest, **other}, tokenizer) for other in _others(key)):
            return f"model.config.{key}", settings[key]
    return None


def _others(key: str) -> Iterator[dict[str, Any]]:
    """The default, which may be too large for the other keys, and a few values that fit most."""
    yield {}
    for value in (None, 1, 2, 64):
        yield {key: value}


def _works(settings: Mapping[str, Any], tokenizer: PreTrainedTokenizerBase) -> bool:
    try:
        _try_out(new_config(settings, tokenizer), engine=True)
    except RAISED:  # another key is to blame, or this one too
        return False
    return True


# A copy that is split ------------------------------------------------------------------------------------------------


def split_mistakes(config: RunConfig, model_config: Any, processes: Mapping[str, int]) -> Iterator[Problem]:
    """Why back end `fsdp` cannot split the model as `trainer.parallel` says, all at once.

    Args:
        config: of the run.
        model_config: of its model, from transformers.
        processes: of each role that learns.
    """
    trainer, parallel = config.trainer, config.trainer.parallel
    split = {name: size for name, size in vars(parallel).items() if size > 1}
    if trainer.backend != "fsdp" or not split:
        return
    wrong = []
    for role, number in processes.items():
        try:
            arranged("shard", [role] * number, parallel)
        except ValueError as error:
            wrong.append(f"{role}: {error}")
    from rlinf.models.language.fsdp import mistakes_in

    with _quiet():
        model = _empty(model_config)
    wrong += mistakes_in(model, parallel, adapters=config.model.lora.settings is not None)
    wrong += [
        f"{key}={value}: a model whose copies are split over processes is {instead}"
        for key, value, odd, instead in (
            ("trainer.attention", trainer.attention, trainer.attention == "padded", "always packed"),
            ("trainer.compile", "true", trainer.compile is True, "never compiled"),
        )
        if odd
    ]
    if wrong:
        yield Problem("configuration", "trainer.parallel", split, "; ".join(wrong))


# Adapters -------------------------------------------------------------------------------------------------------------


def _adapter_mistakes(config: RunConfig, model_config: Any) -> Iterator[Problem]:
    low_rank, frozen = config.model.lora, config.model.freeze
    if low_rank.settings is None and not frozen:
        return
    from rlinf.models.language import build, lora

    model = _empty(model_config)
    try:
        build.freeze(model, frozen)
    except ValueError as error:
        yield problem("model.freeze", frozen, error)
    if low_rank.settings is None:
        return
    own = (
        ("model.lora.target_modules", low_rank.target_modules)
        if low_rank.path is None
        else ("model.lora.path", low_rank.path)
    )
    others = {"reference": config.reference.adapter, "teacher": config.teacher.adapter}
    wanted = [(*own, low_rank.settings, lora.POLICY)]
    wanted += [(f"{role}.adapter", path, {"path": path}, role) for role, path in others.items() if path is not None]
    for key, value, settings, name in wanted:
        try:
            with _META:
                lora.add_adapters(model, settings, name)
        except RAISED as error:  # of peft
            yield problem(key, value, error)
            return
