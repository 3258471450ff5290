"""Objects in memory in place of names in a configuration: arguments of `Session` and `train`, sorted and checked.

In: models, tokenizers, data and reward functions, as objects or names, and keyword arguments. Out: a `RunConfig`, as if
it had been read from a file; the `InMemory` objects that it cannot name; and a directory aside with models and
tokenizers that were objects, which roles read in their own processes once the run directory has taken them in; or one
error with every mistake. Names of settings that TRL 1.16's `GRPOConfig` has are answered with ours.
"""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import AsyncIterable, Iterable, Mapping, Sequence
from dataclasses import MISSING, dataclass, field, replace
from pathlib import Path
from typing import Any

from rlinf.config.learning import SUPERVISED
from rlinf.config.load import ConfigError, Problem
from rlinf.config.schema import leaves, nearest, sections
from rlinf.config.text import RunConfig
from rlinf.data.tokenizer import CHARACTERS, load_tokenizer
from rlinf.rewards.base import ByValue, RewardSource, name_in_main, name_of
from rlinf.runs.prepare import InMemory
from rlinf.runs.rules import config_of
from rlinf.storage.directory import PASSED

OURS: Mapping[str, str] = {
    "reward_funcs": "rewards",
    "reward_weights": "rewards=[(f, 1.0), (g, 0.5)]",
    "train_dataset": "data",
    "eval_dataset": "evaluation",
    "processing_class": "tokenizer",
    "peft_config": 'lora_r=8, **{"model.lora.alpha": 16.0}',
    "rollout_func": "flow",
    "output_dir": "run_dir",
    "max_steps": "steps",
    "learning_rate": "lr",
    "lr_scheduler_type": "schedule",
    "max_grad_norm": "grad_clip",
    "num_generations": "group_size",
    "per_device_train_batch_size": "prompts_per_step; it counts prompts, those of all processes together",
    "gradient_accumulation_steps": "micro_batch_tokens; it changes memory, never what is learned",
    "num_iterations": "epochs",
    "steps_per_generation": "minibatches; optimizer steps on each batch of answers",
    "max_completion_length": "max_new_tokens",
    "chat_template_kwargs": "chat_args",
    "beta": 'kl={"place": "loss", "kind": "k3", "beta": 0.04}',
    "epsilon": 'loss={"clip_low": 0.2, "clip_high": 0.2}',
    "epsilon_high": 'loss={"clip_high": 0.28}',
    "importance_sampling_level": 'loss={"ratio": "sequence"}; or algorithm="gspo"',
    "scale_rewards": 'advantage={"scale": "none"}',
    "loss_type": 'algorithm="grpo"; for TRL\'s default, "dapo"; "dr_grpo", "cispo" and "sapo" have the same names',
    "mask_truncated_completions": 'truncated="mask"',
    "sync_ref_model": 'reference={"kind": "ema"}',
    "use_vllm": "engine",
    "bf16": 'trainer={"dtype": "bfloat16"}, rollout={"dtype": "bfloat16"}',
    "logging_steps": "log_every",
    "report_to": 'wandb="project", tensorboard=True',
    "log_completions": 'metrics={"samples": 8}',
    "eval_steps": '**{"evaluation.every": 20}',
    "save_steps": 'checkpoint={"every": 20}',
    "save_total_limit": 'checkpoint={"keep": 3}',
    "metric_for_best_model": 'checkpoint={"best": "evaluation/accuracy"}, **{"evaluation.every": 20}',
    "resume_from_checkpoint": 'resume="auto"',
}
"""By TRL's name, as an argument of a call, perhaps with a remark after a semicolon; what has the same name and meaning
in both is not here."""
OF_GIVEN_TEXTS: Mapping[str, str] = {
    "per_device_train_batch_size": "batch_size; it counts those of all processes together",
    "num_train_epochs": "epochs",
    "max_length": "max_tokens",
    "loss_type": "loss",
}
"""Our arguments by TRL's name, for those that mean something else in `SFTConfig`, `DPOConfig` and `RewardConfig`."""


_SHORT = {"lr": "optimizer.lr", "engine": "rollout.engine", "backend": "trainer.backend", "lora_r": "model.lora.r"}
"""Names of keys that stand in several sections, or whose last part says little."""
_SECTIONS = ("", "algorithm", "optimizer", "rollout", "trainer", "data", "evaluation", "checkpoint", "metrics", "model")
"""Where the name of a key is looked for, in this order; a dotted key says it all. Runs on given texts look into
`supervised` first."""


def configured(run_dir: str | Path | None, settings: Mapping[str, Any], who: str) -> RunConfig:
    """A configuration from keyword arguments.

    Args:
        run_dir: directory of the run; None takes `outputs/run`.
        settings: by name: a section with a mapping of its keys (`rollout={"max_new_tokens": 8}`), a dotted key
            (`**{"optimizer.lr": 1e-6}`), or the last part of a key (`lr`, `group_size`, `steps`, `max_new_tokens`).
        who: the call, for errors.

    Raises:
        ConfigError: with every name that there is not, and every value that cannot be.
    """
    values: dict[str, Any] = {}
    problems, recipe = [], recipe_name(settings.get("algorithm"))
    for name, value in settings.items():
        if (key := key_of(name, recipe, value)) is None:
            problems.append(Problem(who, name, value, f"there is no such setting{_instead(name, recipe)}"))
        else:
            values[key] = value
    if problems:
        raise ConfigError(problems)
    path = Path("outputs/run" if run_dir is None else run_dir).expanduser()
    return config_of({"output_dir": str(path.parent), "name": path.name, **values}, who)


def recipe_name(algorithm: Any) -> Any:
    """The recipe that an argument `algorithm` names: itself, or the `name` of a mapping of keys of that section."""
    return algorithm.get("name") if isinstance(algorithm, Mapping) else algorithm


def key_of(name: str, recipe: Any = None, value: Any = None) -> str | None:
    """The dotted key that a setting's name stands for; None if there is none.

    Args:
        name: of the setting.
        recipe: name of the run's algorithm.
        value: of the setting: a text is no section, so `system="Be brief."` is `data.system`.
    """
    keys = {leaf.key for leaf in leaves(RunConfig)}
    names = keys | dict(sections(RunConfig)).keys()
    if isinstance(value, str) and name in names - keys:
        return next((key for section in _SECTIONS if (key := f"{section}.{name}") in keys), name)
    if name in names or ("." in name and name.partition(".")[0] in names):
        return name
    if name in _SHORT:
        return _SHORT[name]
    first = ("supervised", f"supervised.{recipe}") if recipe in SUPERVISED else ()
    return next((key for section in (*first, *_SECTIONS) if (key := f"{section}.{name}".lstrip(".")) in names), None)


def _instead(name: str, recipe: Any) -> str:
    """Advice on what to write in place of a setting that there is not."""
    theirs = {**OURS, **OF_GIVEN_TEXTS} if recipe in SUPERVISED else OURS
    if name in theirs:
        return f": this is TRL's name; here it is {theirs[name]}"
    if inside := [leaf.key.removesuffix(f".{name}") for leaf in leaves(RunConfig) if leaf.key.endswith(f".{name}")]:
        return f" outside of a section; did you mean {' or '.join(f'{each}={{{name!r}: …}}' for each in inside)}?"
    near = nearest(name, [*_names()])
    return f"; did you mean {near}?" if near else "; docs/config.md has every key"


def _names() -> set[str]:
    """Every name that `key_of` knows, without dots."""
    return {leaf.key.rpartition(".")[2] for leaf in leaves(RunConfig)} | dict(sections(RunConfig)).keys() | {*_SHORT}


MODEL, TOKENIZER = PASSED
"""Names in a run directory of models and tokenizers that were objects."""
PARTS = ("advantage", "loss")
"""Keys of `algorithm` that may be functions."""


@dataclass(slots=True)
class Objects:
    """Arguments of a call, sorted by what has a name and what has none."""

    who: str
    """The call, for errors."""
    settings: dict[str, Any] = field(default_factory=dict)
    """By dotted key: what has a name."""
    passed: InMemory = field(default_factory=InMemory)
    """Objects without one."""
    to_save: dict[str, Any] = field(default_factory=dict)
    """Models and tokenizers that were objects, by the name that each will have in the run directory."""

    # Model and tokenizer ----------------------------------------------------------------------------------------------

    def take_model(self, model: Any) -> None:
        """A directory or hub name, a mapping that describes a new model, or a model of transformers."""
        if isinstance(model, str | os.PathLike):
            self.settings["model.path"] = os.fspath(model)
        elif isinstance(model, Mapping):
            section = model.keys() & {"path", "config", "lora"}
            self.settings["model" if section else "model.config"] = dict(model)
        elif hasattr(model, "save_pretrained") and hasattr(model, "config"):
            self.to_save[MODEL] = model
        else:
            advice = (
                "give a directory, a hub name, a mapping of a new model such as {'model_type': 'qwen2'}, or a model"
            )
            raise self._wrong("model", model, advice)

    def take_tokenizer(self, tokenizer: Any, model: Any) -> None:
        """A directory or hub name, `{"characters": …}`, a tokenizer; or None, which takes the model's own."""
        try:
            if tokenizer is None and MODEL in self.to_save:
                tokenizer = load_tokenizer(str(getattr(model, "name_or_path", "")))
            elif isinstance(tokenizer, Mapping):
                load_tokenizer(tokenizer)
                tokenizer = f"{CHARACTERS}{tokenizer['characters']}"
        except ValueError as error:
            advice = (
                "a model in memory does not say which is its tokenizer; pass it too" if tokenizer is None else error
            )
            raise self._wrong("tokenizer", tokenizer, str(advice)) from None
        if isinstance(tokenizer, str | os.PathLike):
            self.settings["model.tokenizer"] = os.fspath(tokenizer)
        elif hasattr(tokenizer, "save_pretrained"):
            self.to_save[TOKENIZER] = tokenizer
        elif tokenizer is not None:
            raise self._wrong("tokenizer", tokenizer, "give a directory, a hub name, or a tokenizer of transformers")

    # Data -------------------------------------------------------------------------------------------------------------

    def take_data(self, data: Any, evaluation: Any) -> None:
        """Names and objects to learn from, and to evaluate on; or mappings of keys of these sections, with the names or
        objects as `train` and as `data`."""
        data, evaluation = self._section("data", data, "train"), self._section("evaluation", evaluation, "data")
        train, held_out = self._rows("data", data), self._rows("evaluation", evaluation)
        if isinstance(train, str) and (held_out is None or isinstance(held_out, str)):
            self.settings["data.train"], train = train, None
        if isinstance(held_out, str):
            self.settings["evaluation.data"], held_out = held_out, None
        self.passed = replace(self.passed, train=train, evaluation=held_out)

    def _section(self, section: str, argument: Any, own: str) -> Any:
        """The value under the key `own` of a mapping of a section's keys, of which the others are settings; anything
        else as it is given."""
        keys = {
            leaf.key.removeprefix(f"{section}.").partition(".")[0]
            for leaf in leaves(RunConfig)
            if leaf.key.startswith(f"{section}.")
        }
        if not isinstance(argument, Mapping) or not argument or argument.keys() - keys:
            return argument
        self.settings |= {f"{section}.{key}": value for key, value in argument.items() if key != own}
        return argument.get(own)

    def _rows(self, name: str, rows: Any) -> Any:
        if isinstance(rows, os.PathLike):
            return os.fspath(rows)
        if isinstance(rows, Mapping):  # such as a `datasets.DatasetDict`
            splits = ", ".join(map(str, rows))
            raise self._wrong(name, f"{{{splits}}}", f"these are several data sets; pass one of them, as {name}[…]")
        is_source = rows is None or isinstance(rows, Iterable | AsyncIterable) or hasattr(rows, "__getitem__")
        if not is_source and not callable(rows):
            advice = f"a {type(rows).__name__} holds no rows; give a file, a list or an iterable of dicts"
            raise ConfigError([Problem(self.who, name, MISSING, advice)])
        return rows

    # Rewards ----------------------------------------------------------------------------------------------------------

    def take_rewards(self, rewards: Any) -> None:
        """One reward, a list of them, perhaps with weights, or several by name; None takes `exact`."""
        if rewards is None:
            return
        source = self._reward(rewards)
        functions = _functions_of(source)
        if all(isinstance(function, str) for function in functions):
            self.settings["reward.parts" if isinstance(source, Mapping) else "reward.function"] = source
            return
        self.passed = replace(self.passed, reward=source)
        if stay := [name for function in functions if (name := _stays_here(function)) is not None]:
            self.settings["reward.isolate"] = "never"
            sys.stdout.write(
                f"{self.who}: {', '.join(stay)} cannot be sent to another process, so rewards run in this one: what "
                "hangs there hangs the run\n"
            )

    def _reward(self, rewards: Any) -> RewardSource:
        if _is_weighted(rewards):
            rewards = [rewards]
        if isinstance(rewards, Mapping):
            return {str(name): self._part(each) for name, each in rewards.items()}
        if not isinstance(rewards, list | tuple):
            return self._sendable(rewards)
        if not rewards:
            raise self._wrong("rewards", rewards, "there is none; give a function, or a list of functions")
        if len(rewards) == 1 and not _is_weighted(rewards[0]):
            return self._sendable(rewards[0])
        parts: dict[str, Any] = {}
        for number, each in enumerate(rewards, 1):
            name = _name(each[0] if _is_weighted(each) else each, f"reward_{number}")
            parts[name if name not in parts else f"{name}_{number}"] = self._part(each)
        return parts

    def _part(self, reward: Any) -> Any:
        if _is_weighted(reward):
            return {"function": self._sendable(reward[0]), "weight": reward[1]}
        if isinstance(reward, Mapping) and "function" in reward:
            return {**reward, "function": self._sendable(reward["function"])}
        return self._sendable(reward)

    def _sendable(self, function: Any) -> Any:
        """The function as it is, or as its code if other processes could not import it."""
        if isinstance(function, str):
            return function
        if not callable(function):
            advice = "a reward is a function, its dotted path, or (function, weight)"
            raise self._wrong("rewards", function, advice)
        try:
            if name_in_main(function) is None:
                return function
        except Exception:  # whatever a pickle of it raises, it goes by value or stays here
            pass
        try:
            return ByValue.of(function)
        except Exception:
            return function

    # Agent ------------------------------------------------------------------------------------------------------------

    def take_agent(self, agent: Any) -> None:
        """A function, its dotted path, or a mapping of keys of the section `agent`; or what opens an agent once for all
        episodes."""
        function = agent
        if isinstance(agent, Mapping):
            objects = {"function", "player"} if callable(agent.get("player")) else {"function"}
            self.settings |= {f"agent.{key}": value for key, value in agent.items() if key not in objects}
            function = agent.get("function")
            self.passed = replace(self.passed, player=agent["player"] if "player" in objects else None)
        if callable(function) or hasattr(type(function), "__aenter__"):
            self.passed = replace(self.passed, agent=function)
        elif function is not None:
            self.settings["agent.function"] = function

    # Algorithm --------------------------------------------------------------------------------------------------------

    def take_algorithm(self, algorithm: Any) -> Any:
        """A recipe's name, or a mapping of keys of the section `algorithm`, in which `advantage` and `loss` may be
        functions; returns what of it a configuration can say."""
        if not isinstance(algorithm, Mapping):
            return algorithm
        own = {name: algorithm[name] for name in PARTS if callable(algorithm.get(name))}
        self.passed = replace(self.passed, parts=own)
        return {name: value for name, value in algorithm.items() if name not in own}

    # Saved aside ------------------------------------------------------------------------------------------------------

    def models_in(self, directory: Path) -> dict[str, Any]:
        """Settings that name the model and the tokenizer that were objects and lie in this directory."""
        keys = {"model.path": MODEL, "model.tokenizer": TOKENIZER}
        return {key: str(directory / name) for key, name in keys.items() if name in self.to_save}

    def sketch(self, aside: Path) -> None:
        """Write as much of models and tokenizers that were objects as checking takes: of a model, its configuration."""
        shutil.rmtree(aside, ignore_errors=True)
        for name, each in self.to_save.items():
            (each.config if name == MODEL else each).save_pretrained(aside / name)

    def save(self, aside: Path, names: Iterable[str]) -> None:
        """Write these models and tokenizers that were objects."""
        for name in names:
            self.to_save[name].save_pretrained(aside / name)

    def _wrong(self, name: str, value: Any, advice: str) -> ConfigError:
        text = value if value is None or isinstance(value, str) else f"a {type(value).__name__}"
        return ConfigError([Problem(self.who, name, text, advice)])


def _is_weighted(reward: Any) -> bool:
    return (
        isinstance(reward, tuple)
        and len(reward) == 2
        and isinstance(reward[1], int | float)
        and not isinstance(reward[1], bool)
    )


def _name(function: Any, otherwise: str) -> str:
    if isinstance(function, str):
        return function.rpartition(".")[2]
    name = name_of(function)
    return name if name.isidentifier() else otherwise


def _functions_of(source: RewardSource) -> Sequence[Any]:
    if not isinstance(source, Mapping):
        return [source]
    return [part["function"] if isinstance(part, Mapping) else part for part in source.values()]


def _stays_here(function: Any) -> str | None:
    """The name of a function that no other process can get."""
    if isinstance(function, str | ByValue):
        return None
    try:
        if name_in_main(function) is None:
            return None
    except Exception:  # whatever a pickle of it raises
        pass
    return _name(function, "a lambda")
