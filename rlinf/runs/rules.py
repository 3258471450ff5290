"""Reads and checks a configuration: `load_config(path, overrides)` gives a `RunConfig`, or one error with all mistakes.

Types and limits of single keys stand beside the keys in `rlinf.config`; here are rules that they cannot say. Mistakes
are listed by key. Nothing heavy is imported: checking a configuration is quick.
"""

from __future__ import annotations

import dataclasses
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import yaml

from rlinf.config.common import best_mistakes, common_mistakes
from rlinf.config.embodied import (
    DAGGER,
    IMITATION,
    OFF_POLICY,
    DaggerConfig,
    EmbodiedConfig,
    EnvConfig,
    ImitationConfig,
    task_names,
)
from rlinf.config.importing import looks_local, mistake_in, shipped_file
from rlinf.config.learning import BACK_ENDS, RECIPES, SUPERVISED, NamedTeacher, RewardModelConfig
from rlinf.config.load import ConfigError, InputError, Problem, RunFailure, dump, load
from rlinf.config.reading import read_bytes
from rlinf.config.schema import nearest
from rlinf.config.text import DataConfig, EvaluationConfig, RewardConfig, RunConfig
from rlinf.data.datasets.benchmarks import benchmark_mistakes
from rlinf.engines import ENGINES
from rlinf.placement.seats import CONTROL, TEXT, mistakes_in, own_kinds, teacher_kinds


@dataclass(frozen=True, slots=True)
class Suite:
    """A set of environments that trials are played in."""

    episodes: int
    """How many."""
    options: dict[str, Any]
    """Options of its simulators."""
    max_steps: int | None
    """Steps after which an episode is cut off; None for the simulator's own limit."""


_SUITE = {"options": dict, "episodes": int, "max_steps": int}
"""Keys of an entry of `trials.suites`, and their types."""


def suites_of(config: EmbodiedConfig) -> dict[str, Suite]:
    """The sets of environments that trials are played in, by name; those of training are "" and come first.

    Args:
        config: without mistakes in `trials.suites`.
    """
    env, trials = config.env, config.trials
    common = {**env.options, **trials.options}
    suites = {"": Suite(trials.episodes, common, env.max_steps)}
    for name, entry in trials.suites.items():
        options = {**common, **entry.get("options", {})}
        suites[name] = Suite(entry.get("episodes", trials.episodes), options, entry.get("max_steps", env.max_steps))
    return {name: suite for name, suite in suites.items() if suite.episodes}


def suite_mistakes(suites: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """(key, advice) for every mistake in `trials.suites`.

    Args:
        suites: as they were written.
    """
    for name, entry in suites.items():
        key = f"trials.suites.{name}"
        if not re.fullmatch(r"[\w.-]+", str(name)) or str(name).startswith("."):
            yield key, "this names metrics and directories: write it with letters, digits, - and _ alone"
        if not isinstance(entry, Mapping):
            yield key, "write {options: {...}}, and episodes or max_steps where they differ"
            continue
        for each, value in entry.items():
            if each not in _SUITE:
                yield f"{key}.{each}", f"it has no such key; its keys are {', '.join(_SUITE)}"
            elif not isinstance(value, _SUITE[each]) or isinstance(value, bool) or value == 0:
                wanted = "a mapping of options" if each == "options" else "a whole number from 1 on"
                yield f"{key}.{each}", f"{value!r}: write {wanted}"


WITH_TARGETS = ("sac", "iql")
"""Algorithms that keep a second copy of the critics."""
_ALL = ("sac", "crossq", "iql")
READ_BY: Mapping[str, tuple[str, ...]] = {
    **dict.fromkeys(("batch", "capacity"), (*_ALL, DAGGER)),
    **dict.fromkeys(("demonstrations", "failed_demonstrations"), (*_ALL, DAGGER)),
    **dict.fromkeys(("warmup", "utd", "actor_every", "gamma", "n_step", "solved_only"), _ALL),
    **dict.fromkeys(("demo_share", "offline_steps", "offline_updates"), _ALL),
    **dict.fromkeys(("tau",), WITH_TARGETS),
    **dict.fromkeys(("alpha", "alpha_lr", "target_entropy", "subset", "shift"), ("sac", "crossq")),
    **dict.fromkeys(("expectile", "beta"), ("iql",)),
}
"""Which algorithms read each key of `off_policy`."""

OPTIMIZER_READ_BY: Mapping[str, tuple[str, ...]] = {
    **dict.fromkeys(("lr", "betas", "grad_clip"), (*_ALL, DAGGER, IMITATION)),
    "critic_lr": _ALL,
    "weight_decay": (DAGGER, IMITATION),
    **dict.fromkeys(("schedule", "warmup_steps", "min_lr_ratio"), (IMITATION,)),
}
"""Which of them, and of imitation, read each key of `optimizer`; the others are PPO's and its like."""
_PREPARED = ("dtype", "train", "lora", "gradient_checkpointing", "sharding")
_OTHERS_READ_BY: Mapping[str, Mapping[str, tuple[str, ...]]] = {
    "off_policy": READ_BY,
    "optimizer": OPTIMIZER_READ_BY,
    "policy": dict.fromkeys(_PREPARED, (IMITATION,)),
    "algorithm": {"micro_batch": (IMITATION,), "staleness": (*_ALL, DAGGER)},  # of flows that work ahead
}
"""Which of them read each key of a section, where PPO and its like read all but `off_policy`."""


def policy_settings(config: EmbodiedConfig) -> dict[str, Any]:
    """`type` and settings of the policy, with what its algorithm stands on where nothing else is said."""
    name = config.algorithm.name
    kind = config.policy.type or ("soft" if name in OFF_POLICY else "mlp")
    own: dict[str, Any] = {"batch_norm": True} if name == "crossq" else {}
    return {"type": kind, **own, **config.policy.settings}


def off_policy_mistakes(config: EmbodiedConfig) -> Iterator[tuple[str, str]]:
    """Yield mistakes in the keys of `off_policy` and `dagger`, as (key, advice)."""
    name, settings = config.algorithm.name, config.off_policy
    yield from _unread(config)
    normed = policy_settings(config).get("batch_norm")
    if normed is True and name in WITH_TARGETS:
        yield "policy.settings.batch_norm", "it is for crossq, which has no target critics: remove it"
    if normed is False and name == "crossq":
        yield "policy.settings.batch_norm", "crossq stands on it: remove this"
    if settings.offline_steps and settings.demonstrations is None:
        yield "off_policy.offline_steps", "there is nothing to learn from offline: name off_policy.demonstrations"
    if settings.solved_only and not config.env.fresh:
        yield "off_policy.solved_only", "an episode must begin and end in one step: set env.fresh=true, or remove it"
    if settings.shift and config.policy.type in (None, "soft", "steered"):
        yield "off_policy.shift", f"policy.type={config.policy.type or 'soft'} looks at no pictures: take soft_pixels"
    if name == "iql" and config.policy.type not in (None, "soft"):
        yield "policy.type", "iql learns from states: take soft"
    if config.policy.type == "steered":
        yield from _steered_mistakes(config)
    yield from _dagger_mistakes(config)


def _unread(config: EmbodiedConfig) -> Iterator[tuple[str, str]]:
    """Keys that were set and that the algorithm does not read."""
    name, usual = config.algorithm.name, EmbodiedConfig()
    alone = name in (*OFF_POLICY, DAGGER, IMITATION)
    for section, read_by in _OTHERS_READ_BY.items() if alone else (("off_policy", READ_BY),):
        values, first = getattr(config, section), getattr(usual, section)
        keys = read_by if section == "policy" else [key.name for key in fields(values) if key.name != "name"]
        for key in keys:
            readers = read_by.get(key, ())
            if name not in readers and getattr(values, key) != getattr(first, key):
                others = f", but {', '.join(readers)}" if readers else ""
                yield f"{section}.{key}", f"{name} does not read it{others}: remove it"


def _steered_mistakes(config: EmbodiedConfig) -> Iterator[tuple[str, str]]:
    base = config.policy.settings.get("base")
    if not isinstance(base, str) or not os.path.isdir(os.path.expanduser(base)):
        yield "policy.settings.base", f"{base!r} is no directory: name that of the policy that is steered"
    for key, directory in (
        ("imitation.path", config.imitation.path),
        ("off_policy.demonstrations", config.off_policy.demonstrations),
    ):
        if directory is not None:
            yield key, "a steered policy cannot learn from demonstrations; the policy in settings.base can: remove it"


def _dagger_mistakes(config: EmbodiedConfig) -> Iterator[tuple[str, str]]:
    expert = config.dagger.expert
    if config.algorithm.name != DAGGER:
        if config.dagger != DaggerConfig():
            yield "dagger", f"{config.algorithm.name} asks no expert: set algorithm=dagger, or remove it"
        return
    if expert is None:
        yield "dagger.expert", "dagger learns from an expert: name a function, or the directory of a saved policy"
    elif not os.path.isdir(os.path.expanduser(expert)) and (advice := mistake_in(expert)) is not None:
        yield "dagger.expert", f"it is no directory, and as a function: {advice}"
    if config.policy.settings.get("memory"):
        yield "policy.settings.memory", "dagger learns decision by decision, without what came before: remove it"
    if config.off_policy.failed_demonstrations:
        yield "off_policy.failed_demonstrations", "dagger imitates what it begins with: leave out what failed"


def imitation_mistakes(config: EmbodiedConfig) -> Iterator[tuple[str, str]]:
    """Yield mistakes in the keys of `imitation`, as (key, advice)."""
    settings, alone = config.imitation, config.algorithm.name == IMITATION
    if settings.mixture and settings.path is not None:
        yield "imitation.path", "it is one data set or several: name all of them in imitation.mixture, or remove that"
    if settings.statistics is not None and not (settings.mixture or settings.path):
        yield "imitation.statistics", "there are no demonstrations: name them in imitation.path, or remove it"
    if settings.statistics is not None and not _is_name(settings.statistics):
        yield "imitation.statistics", "checkpoints keep files under it: take a name, such as my_robot or me/my_robot"
    for key, path in _paths(settings):
        if not isinstance(path, str):
            yield key, "write {path: DIRECTORY}, and weight, format, names, bounds where they differ"
        elif not os.path.exists(os.path.expanduser(shipped_file(path))):
            yield key, "there is no such directory or file; name one with demonstrations"
    if alone and config.policy.type in ("soft", "soft_pixels", "steered"):
        yield "policy.type", f"{config.policy.type} is of sac and its like: take another for imitation"


def _is_name(text: str) -> bool:
    return bool(text) and all(part.strip(". ") for part in text.split("/"))


def _paths(settings: ImitationConfig) -> Iterator[tuple[str, Any]]:
    if settings.path is not None:
        yield "imitation.path", settings.path
    for name, about in settings.mixture.items():
        yield f"imitation.mixture.{name}", about.get("path") if isinstance(about, Mapping) else None


def preparation_of(config: EmbodiedConfig) -> dict[str, Any]:
    """How the policy is made ready to learn, as arguments of `Preparation`."""
    policy = config.policy
    names = ("dtype", "gradient_checkpointing", "sharding")
    train = None if policy.train is None else tuple(policy.train)
    return {"train": train, "lora": policy.lora.settings, **{name: getattr(policy, name) for name in names}}


__all__ = ["ConfigError", "InputError", "Problem", "RunConfig", "RunFailure", "dump", "load_config"]

_ROLE_KEYS = ("class", "hosts", "devices", "settings", "memory_gb")
_FILES = (".jsonl", ".json", ".csv", ".parquet")


def load_config(path: str | Path | None, overrides: Sequence[str] = (), hosts: int | None = None) -> RunConfig:
    """Read a configuration.

    Args:
        path: YAML file; None takes the defaults alone.
        overrides: `a.b=value`; they win over the file, later ones over earlier ones.
        hosts: number of processes of this job; given, the placement is checked against it too.

    Raises:
        ConfigError: with every mistake, before anything is started.
        InputError: if the file cannot be read as YAML at all.
    """
    return load(RunConfig, path, overrides, lambda config: _mistakes(config, hosts))


def config_of(values: Mapping[str, Any], who: str) -> RunConfig:
    """A configuration from Python values.

    Args:
        values: by dotted key; what is not there has its default.
        who: gave them, for errors.

    Raises:
        ConfigError: with every mistake.
    """
    return load(RunConfig, None, (), lambda config: _mistakes(config, None), values, who)


def _mistakes(config: RunConfig, hosts: int | None) -> Iterator[tuple[str, str]]:
    """(key, advice) for what the type and the limits of a single key cannot say."""
    yield from common_mistakes(config)
    yield from _reward_mistakes(config.reward)
    yield from _reward_model_mistakes(config.reward, config.reward_model)
    if (engine := config.rollout.engine) not in ENGINES and (advice := mistake_in(engine)) is not None:
        yield "rollout.engine", f"{advice}; or take {' or '.join(ENGINES)}"
    yield from _recipe_mistakes(config.algorithm.name)
    yield from _experts_mistakes(config)
    yield from _reference_mistakes(config)
    for key, directory in (
        ("model.path", config.model.path),
        ("model.tokenizer", config.model.tokenizer),
        ("critic.model", config.critic.model),
        ("reference.model", config.reference.model),
        ("teacher.model", config.teacher.model),
        ("reward_model.path", config.reward_model.path),
        ("reward_model.tokenizer", config.reward_model.tokenizer),
    ):
        if directory is not None and looks_local(directory) and not os.path.isdir(os.path.expanduser(directory)):
            advice = "there is no such directory; name one that save_pretrained wrote, or owner/name on the hub"
            yield key, advice
    if config.model.path is None and "model_type" not in config.model.config:
        yield "model.config", "a new model needs its model_type, such as qwen2; or set model.path to a saved model"
    backend = config.trainer.backend
    if backend not in BACK_ENDS and (advice := mistake_in(backend)) is not None:
        yield "trainer.backend", f"{advice}; or take {' or '.join(BACK_ENDS)}"
    if config.trainer.attention == "flash" and not any(map(find_spec, ("flash_attn", "flash_attn_interface"))):
        yield "trainer.attention", "neither flash_attn nor flash_attn_interface is installed; install one, or take auto"
    if "" in config.rollout.stop:
        yield "rollout.stop", "an empty text would end every answer before it begins; remove it"
    if config.data.train is not None and config.model.path is None and config.model.tokenizer is None:
        yield "model.tokenizer", "a new model that learns from data of yours needs a tokenizer: name a saved one"
    yield from _data_mistakes("data.train", config.data.train)
    yield from _data_mistakes("evaluation.data", config.evaluation.data)
    yield from _evaluation_mistakes(config.evaluation, config.data)
    yield from best_mistakes(config.checkpoint, config.evaluation.patience, config.evaluation.every, "evaluation")
    yield from _named_mistakes(config)
    kinds = (*TEXT, *own_kinds(config.roles), *teacher_kinds(config.teachers))
    yield from mistakes_in(config.placement, kinds, hosts)


def _reference_mistakes(config: RunConfig) -> Iterator[tuple[str, str]]:
    if config.reference.kind == "precomputed" and config.algorithm.name not in SUPERVISED:
        yield "reference.kind", "answers that are yet to be generated have no log-probs in the data; take frozen"
    if config.reference.kind == "adapters_off" and not config.model.lora.on:
        yield "reference.kind", "there are no adapters to switch off; set model.lora.r, or take frozen"
    for role, settings in (("reference", config.reference), ("teacher", config.teacher)):
        if settings.adapter is not None and not config.model.lora.on:
            yield f"{role}.adapter", "the trainer's own model has no adapters that these could stand in for; set lora.r"
        if settings.adapter is not None and settings.model is not None:
            yield f"{role}.adapter", f"it is either these or {role}.model"
    if config.reference.adapter is not None and config.reference.kind != "frozen":
        yield (
            "reference.adapter",
            f"a reference of kind {config.reference.kind} is made of the policy itself; remove it",
        )
    if config.reference.kind != "frozen" and config.reference.model is not None:
        yield "reference.model", f"a reference of kind {config.reference.kind} is made of the policy itself; remove it"


def _reward_mistakes(reward: RewardConfig) -> Iterator[tuple[str, str]]:
    if reward.parts and reward.args:
        yield "reward.args", "with several functions, the arguments of each stand in reward.parts: {function, args}"
    for name, part in reward.parts.items():
        path = part.get("function") if isinstance(part, dict) else part
        if not isinstance(path, str):
            yield "reward.parts", f"{name} needs the dotted path of a function, or {{function: PATH, weight: 1.0}}"
        elif (advice := mistake_in(path)) is not None:
            yield "reward.parts", f"{name}: {advice}"
    if not reward.parts and reward.function and (advice := mistake_in(reward.function)) is not None:
        yield "reward.function", advice


def _reward_model_mistakes(reward: RewardConfig, model: RewardModelConfig) -> Iterator[tuple[str, str]]:
    if model.path is None:
        if reward.function is None and not reward.parts:
            yield "reward.function", "nothing scores: name a function, or a model in reward_model.path"
        for key in ("template", "tokenizer", "label"):
            if getattr(model, key) is not None:
                yield f"reward_model.{key}", "there is no reward model: name it in reward_model.path, or remove this"
        return
    if model.kind == "generative":
        if model.template is None:
            yield "reward_model.template", "a generative judge is asked by it: write what it reads, with {response}"
        if model.label is not None:
            yield "reward_model.label", "a generative judge has no labels; remove it, or set kind: classifier"
        values = model.choices.values()
        if len(values) == 1 or any(isinstance(one, bool) or not isinstance(one, int | float) for one in values):
            yield "reward_model.choices", 'write at least two replies and what each is worth, {" yes": 1, " no": 0}'
        try:
            groups = re.compile(model.pattern).groups
        except re.error as error:
            yield "reward_model.pattern", f"this is no regular expression: {error}"
        else:
            if not groups:
                yield "reward_model.pattern", "put the number into a group, such as Score: (\\d+)"
    elif model.choices:
        yield "reward_model.choices", "a classifier gives no replies; remove it, or set kind: generative"
    if model.template is not None and "{response}" not in model.template:
        yield "reward_model.template", "it does not show the answer: write {response} where it belongs"


def _named_mistakes(config: RunConfig) -> Iterator[tuple[str, str]]:
    """Yield mistakes in entries of `roles` and `teachers`, as (key, advice)."""
    names = {kind.name for kind in TEXT} | {"step", *(f"teacher_{name}" for name in config.teachers)}
    for name, entry in config.roles.items():
        key = f"roles.{name}"
        if not str(name).isidentifier() or name in names:
            yield key, "there is a role of that name: take another" if name in names else "write a Python name"
        if not isinstance(entry, Mapping) or "class" not in entry:
            yield key, "write {class: my_module.MyActor}, and hosts or devices, settings, memory_gb where it has them"
            continue
        if unknown := sorted(entry.keys() - _ROLE_KEYS):
            yield key, f"it has no {unknown[0]}; its keys are {', '.join(_ROLE_KEYS)}"
        if {"hosts", "devices"} <= entry.keys():
            yield key, "it has hosts and devices: name devices if it computes on them, else hosts"
        if not isinstance(entry.get("settings") or {}, Mapping):
            yield key, "settings: write a mapping of what its setup takes, by name"
        memory = entry.get("memory_gb", 0)
        if isinstance(memory, bool) or not isinstance(memory, int | float) or memory < 0:
            yield key, f"memory_gb: {memory!r}: write how much it holds on each of its devices, GB"
        advice = mistake_in(entry["class"]) if isinstance(entry["class"], str) else "write the dotted path of a class"
        if advice is not None:
            yield key, f"class: {advice}"
    for name, entry in config.teachers.items():
        yield from ((f"teachers.{name}", advice) for advice in _teacher_mistakes(str(name), entry))
    if config.teachers and config.teacher.model is not None:
        yield "teacher.model", "there are several, in `teachers`: make it one of them, or remove it"
    if config.teacher.route is not None and len(config.teachers) < 2:
        yield "teacher.route", "there is nothing to route: name several `teachers`, or remove it"


def _teacher_mistakes(name: str, entry: Any) -> Iterator[str]:
    keys = [field.name for field in dataclasses.fields(NamedTeacher)]
    if not name.isidentifier():
        yield "write a Python name"
    if not isinstance(entry, Mapping) or not isinstance(entry.get("model"), str):
        yield "write {model: DIR}, and weight, dtype or devices if they differ"
        return
    if unknown := sorted(entry.keys() - set(keys)):
        yield f"it has no {unknown[0]}; its keys are {', '.join(keys)}"
    weight = entry.get("weight", 1.0)
    if isinstance(weight, bool) or not isinstance(weight, int | float) or not 0 < weight < float("inf"):
        yield f"weight: {weight!r}: write a number above 0"
    if entry.get("dtype", "float32") not in ("float32", "bfloat16"):
        yield "dtype: write float32 or bfloat16"
    if looks_local(entry["model"]) and not Path(entry["model"]).expanduser().is_dir():
        yield "model: there is no such directory; name one that save_pretrained wrote, or owner/name on the hub"


def _data_mistakes(key: str, source: str | None) -> Iterator[tuple[str, str]]:
    if source is None or any(character in source for character in "*?["):  # a pattern: opening it tells
        return
    if (looks_local(source) or source.endswith(_FILES)) and not os.path.exists(os.path.expanduser(source)):
        yield key, f"there is no such file or directory; it is looked for from {Path.cwd()}"


def _evaluation_mistakes(evaluation: EvaluationConfig, data: DataConfig) -> Iterator[tuple[str, str]]:
    if evaluation.samples > 1 and evaluation.temperature == 0:
        yield "evaluation.samples", "at temperature 0 all answers to a problem are equal; set evaluation.temperature"
    if any(k > evaluation.samples for k in evaluation.k):
        yield "evaluation.k", f"more than the {evaluation.samples} answers per problem; raise evaluation.samples"
    yield from benchmark_mistakes(evaluation.named)
    if data.train is not None and evaluation.data is None and evaluation.every and not evaluation.named:
        yield "evaluation.every", "there is nothing to evaluate on: data.train is yours, so name evaluation.data too"


def _recipe_mistakes(name: str) -> Iterator[tuple[str, str]]:
    if name not in (names := (*RECIPES, *SUPERVISED)):
        near = nearest(name, (*names, *OFF_POLICY, DAGGER, IMITATION))
        advice = f"did you mean {near}?" if near else f"take {', '.join(names)}"
        yield "algorithm.name", f"there is no such recipe; {advice}"


def load_any(
    path: str | Path | None, overrides: Sequence[str] = (), hosts: int | None = None
) -> RunConfig | EmbodiedConfig:
    """Read a configuration of either kind; see `load_config`."""
    return (load_embodied if is_embodied(path) else load_config)(path, overrides, hosts)


def is_embodied(path: str | Path | None) -> bool:
    """True if a file is a configuration of a policy that acts; False if it cannot be read."""
    if path is None:
        return False
    try:
        tree = yaml.compose(read_bytes(Path(path)).decode("utf-8"))
    except (OSError, ValueError, RecursionError, yaml.YAMLError):
        return False  # reading it as any configuration tells what is wrong
    return isinstance(tree, yaml.MappingNode) and any(name.value in ("env", "imitation") for name, _ in tree.value)


def load_embodied(path: str | Path | None, overrides: Sequence[str] = (), hosts: int | None = None) -> EmbodiedConfig:
    """Read the configuration of a run in which a policy acts; arguments and errors are those of `load_config`."""
    return load(EmbodiedConfig, path, overrides, lambda config: _embodied_mistakes(config, hosts))


def _embodied_mistakes(config: EmbodiedConfig, hosts: int | None) -> Iterator[tuple[str, str]]:
    yield from common_mistakes(config)
    if config.algorithm.name not in (*OFF_POLICY, DAGGER, IMITATION):
        yield from _recipe_mistakes(config.algorithm.name)
    yield from off_policy_mistakes(config)
    if (simulator := mistake_in(config.env.simulator)) is not None:
        yield "env.simulator", simulator
    env = config.env
    parts = max(env.workers, 1) * env.slices * env.group_size
    if env.num_envs % parts:
        yield (
            "env.num_envs",
            f"it must be a multiple of workers x slices x group_size = {parts}, so that shares are equal; take "
            f"{max(parts, env.num_envs // parts * parts)}, or fewer workers or slices",
        )
    if config.policy.path is not None and not os.path.isdir(os.path.expanduser(config.policy.path)):
        yield "policy.path", "there is no such directory; name the `policy` directory of a checkpoint"
    yield from imitation_mistakes(config)
    directory = config.off_policy.demonstrations
    if directory is not None and not os.path.exists(os.path.expanduser(directory)):
        yield "off_policy.demonstrations", "there is no such directory; name one with demonstrations"
    yield from _task_mistakes(env)
    yield from _trials_mistakes(config)
    yield from mistakes_in(config.placement, CONTROL, hosts)


def _task_mistakes(env: EnvConfig) -> Iterator[tuple[str, str]]:
    keys = ("name", "options", "weight")
    for number, task in enumerate(env.tasks):
        key = f"env.tasks[{number}]"
        if not isinstance(task, Mapping) or not isinstance(task.get("options", {}), Mapping):
            yield "env.tasks", f"{key}: write {{options: {{...}}}}, and weight or name where it has them"
            return
        weight = task.get("weight", 1)
        if unknown := sorted(task.keys() - set(keys)):
            yield "env.tasks", f"{key} has no {unknown[0]}; its keys are {', '.join(keys)}"
        if isinstance(weight, bool) or not isinstance(weight, int | float) or not 0 < weight < float("inf"):
            yield "env.tasks", f"{key}.weight: {weight!r}: write a number above 0"
    names = task_names(env.tasks)
    if twice := sorted({name for name in names if names.count(name) > 1}):
        yield "env.tasks", f"two of them are called {twice[0]!r}: give each a name of its own"
    if not env.tasks and env.curriculum.floor < 1:
        yield "env.curriculum.floor", "there is nothing to choose from: name several env.tasks"
    if env.curriculum.low > env.curriculum.high:
        yield "env.curriculum.low", f"it must be at most env.curriculum.high, {env.curriculum.high}"
    if env.reward is None and env.reward_args:
        yield "env.reward_args", "there is no function that takes them: name it in env.reward"
    for key, path in (("env.reward", env.reward), ("env.success", env.success)):
        if path is not None and (advice := mistake_in(path)) is not None:
            yield key, advice


def _trials_mistakes(config: EmbodiedConfig) -> Iterator[tuple[str, str]]:
    trials = config.trials
    if wrong := list(suite_mistakes(trials.suites)):
        yield from wrong
        return
    most = max((suite.episodes for suite in suites_of(config).values()), default=0)
    if trials.videos > most:
        yield "trials.videos", f"there are only {most} episodes; raise trials.episodes"
    every = trials.every if most or config.algorithm.name == IMITATION else 0  # which has held-out episodes, too
    yield from best_mistakes(config.checkpoint, trials.patience, every, "trials")


def _experts_mistakes(config: RunConfig) -> Iterator[tuple[str, str]]:
    """Yield keys that ask for experts where the model has none, or engine or back end cannot replay their routes."""
    shape, key = config.model.config, "trainer.router_replay"
    keys = [key] if config.trainer.router_replay is True else []
    keys += ["algorithm.router_aux_loss"] if config.algorithm.router_aux_loss else []
    for each in keys:
        if shape and not any("expert" in str(name) for name in shape):
            yield each, "the model has no experts: leave the key out"
        elif config.rollout.engine == "vllm" or config.trainer.backend == "megatron":
            yield each, "it needs an engine that tells of experts and a back end that replays them: transformers, fsdp"
