"""YAML and `key=value` in; a checked dataclass, or every mistake at once, out.

The file and the overrides are walked key by key against the schema, which finds the keys that there are not, and the
line of each. OmegaConf reads YAML and resolves `${key}`; pydantic checks the values, all at once. Every mistake becomes
a `Problem` with the place in the file that made it. A key that there is not is answered by the one that was most likely
meant: by other frameworks' names for ours (`learning_rate`, `num_generations`), then by spelling.
"""

from __future__ import annotations

import copy
import dataclasses
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import MISSING, dataclass
from operator import attrgetter
from pathlib import Path
from typing import Any, TypeVar

import yaml
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from pydantic import ValidationError

from rlinf.config.importing import near_shipped
from rlinf.config.reading import measure, read_bytes
from rlinf.config.schema import Leaf, advice, leaf_at, leaves, nearest, sections

GONE = {
    "rollout.rescale": "answers move between ranks no more, which gained nothing: delete the line",
}
"""Keys that there were once, with the advice for those who still have them."""

_OURS = {
    "steps": "max_steps total_steps num_steps total_training_steps training_steps num_train_steps total_epochs",
    "log_every": "logging_steps log_interval log_freq",
    "name": "run_name experiment_name exp_name",
    "seed": "random_seed",
    "model.path": "model_name model_name_or_path model_path model_id pretrained base_model",
    "model.tokenizer": "tokenizer_path tokenizer_name tokenizer_name_or_path",
    "model.lora.r": "lora_r lora_rank rank",
    "model.lora.alpha": "lora_alpha",
    "model.lora.target_modules": "lora_target_modules lora_target",
    "data.train": "dataset dataset_name train_dataset train_files train_data prompt_data",
    "data.split": "dataset_split train_split",
    "data.max_prompt_tokens": "max_prompt_length max_prompt_len prompt_max_len max_input_length",
    "evaluation.data": "eval_dataset val_files eval_data test_data",
    "evaluation.every": "eval_steps eval_interval test_freq eval_every",
    "reward.function": "reward_funcs reward_fn reward_function rm_type",
    "algorithm.name": "advantage_estimator adv_estimator loss_type",
    "algorithm.prompts_per_step": "batch_size train_batch_size rollout_batch_size prompts_per_batch",
    "algorithm.group_size": (
        "num_generations n_samples_per_prompt rollout_n num_samples_per_prompt n_samples num_return_sequences n"
    ),
    "evaluation.samples": "n",
    "algorithm.epochs": "num_iterations ppo_epochs num_ppo_epochs update_epochs",
    "algorithm.minibatches": "num_mini_batches num_minibatches ppo_mini_batch_size",
    "algorithm.kl": "kl_coef kl_beta beta init_kl_coef use_kl_loss kl_loss_coef kl_loss_type",
    "algorithm.entropy_bonus": "entropy_coef entropy_coeff ent_coef",
    "algorithm.loss": "epsilon epsilon_high clip_ratio clip_range clip_eps eps_clip",
    "optimizer.lr": "learning_rate actor_learning_rate",
    "optimizer.grad_clip": "max_grad_norm gradient_clipping clip_grad grad_norm",
    "optimizer.schedule": "lr_scheduler_type lr_scheduler scheduler lr_decay_style",
    "optimizer.betas": "adam_beta1 adam_beta2",
    "optimizer.warmup_steps": "lr_warmup_steps num_warmup_steps warmup_ratio",
    "rollout.max_new_tokens": (
        "max_tokens_per_answer max_completion_length max_response_length response_length max_response_len "
        "generate_max_len max_gen_len max_length max_tokens"
    ),
    "rollout.engine_args": (
        "tensor_model_parallel_size vllm_tensor_parallel_size gpu_memory_utilization vllm_gpu_memory_utilization"
    ),
    "rollout.stop": "stop_strings stop_sequences",
    "trainer.micro_batch_tokens": (
        "per_device_train_batch_size micro_batch_size ppo_micro_batch_size_per_gpu max_tokens_per_gpu "
        "gradient_accumulation_steps micro_train_batch_size"
    ),
    "trainer.dtype": "bf16 fp16 precision torch_dtype",
    "checkpoint.every": "save_steps save_interval save_freq save_every",
    "checkpoint.keep": "save_total_limit max_ckpts_to_keep",
    "output_dir": "save_path default_local_dir out_dir",
    "metrics.wandb": "wandb_project report_to use_wandb",
    "placement.device_memory_gb": "gpu_memory",
    "algorithm.minibatch": "minibatch_size mini_batch_size",
    "env.num_envs": "n_envs num_environments",
    "off_policy.capacity": "buffer_size replay_buffer_size",
    "off_policy.gamma": "discount",
}
"""By key of ours: names by which TRL, verl, slime, OpenRLHF and stable-baselines3 have something of the kind."""

OF_TORCHRUN = {
    **dict.fromkeys(("n_gpus_per_node", "gpus_per_node", "num_gpus_per_node", "nproc_per_node"), "--nproc-per-node N"),
    **dict.fromkeys(("nnodes", "num_nodes", "n_nodes"), "--nnodes N"),
}
"""By the last part of a key of others: what says it here."""


def ours(key: str, keys: Iterable[str]) -> str | None:
    """The key of ours that another framework calls like the last part of `key`; None if there is none.

    Args:
        key: that there is not.
        keys: keys that there are; of several that fit, that of the same section is meant.
    """
    section, _, name = key.rpartition(".")
    there = {*keys}
    outer, _, inner = section.partition(".")
    if name == "lr" and bool(outer) == bool(inner):  # as in `optimiser.lr`, a section is one of ours, misspelt
        return next((key for key in (f"{outer}.lr", "optimizer.lr") if key in there), None)
    candidates = [key for key, names in _OURS.items() if name.lower() in names.split() and key in there]
    return next((key for key in candidates if key.rpartition(".")[0] == section), next(iter(candidates), None))


T = TypeVar("T")

COMMAND_LINE = "command line"
DEFAULT = "default"
_REFERENCE = re.compile(r"(\\*)\$\{([\w.]+\})?")
"""`${`, the backslashes before it (an odd number makes it plain text), and `key}` if that is what follows."""
_UNREADABLE = (
    *(yaml.YAMLError, OmegaConfBaseException, RecursionError, AssertionError),
    *(ValueError, OverflowError, TypeError, KeyError),
)
"""Errors of reading YAML besides its own: a number of 5,000 digits, a 13th month, 5,000 opening brackets."""


class InputError(Exception):
    """A mistake in what the user gave: shown as it is, without a traceback, and the process exits with code 2."""


class RunFailure(Exception):
    """A run cannot go on, for a reason outside the code, such as a full disk or a loss that is no number: shown as it
    is, without a traceback, and the process exits with code 1."""


@dataclass(frozen=True, slots=True)
class Problem:
    """One mistake in a configuration, as its reader needs it."""

    place: str
    """`file:line`, `command line` or `default`."""
    key: str
    """Dotted key, such as `optimizer.lr`."""
    value: Any
    """The value that was given; `dataclasses.MISSING` where there is no value to show."""
    advice: str
    """The mistake, and what to write instead."""

    def __str__(self) -> str:
        value = "" if self.value is MISSING else f" = {_short(self.value)}"
        return f"{self.place}: {self.key}{value}: {self.advice}"


class ConfigError(InputError):
    """Everything that is wrong with a configuration, reported together."""

    def __init__(self, problems: Sequence[Problem]) -> None:
        self.problems = tuple(problems)
        count = "1 problem" if len(problems) == 1 else f"{len(problems)} problems"
        super().__init__(
            "\n".join([f"{count} in the configuration; nothing was started.", *(f"  {each}" for each in problems)])
        )


def load(
    schema: type[T],
    path: str | Path | None,
    overrides: Sequence[str] = (),
    check: Callable[[T], Iterator[tuple[str, str]]] = lambda config: iter(()),
    values: Mapping[str, Any] | None = None,
    who: str = COMMAND_LINE,
) -> T:
    """Read a file and overrides into `schema`.

    Args:
        schema: the dataclass that says which keys there are.
        path: YAML file; None takes the defaults alone.
        overrides: `a.b=value`, later ones win; values are read as YAML.
        values: by dotted key, as Python objects; they win over the file.
        who: gave them, for errors.
        check: yields (key, advice) for what types, limits and the sections' own `mistakes` cannot say; a value that is
            wrong by itself has its default then.

    Raises:
        ConfigError: with all problems of the file and of the overrides.
        InputError: if the file cannot be read as YAML at all.
    """
    loader = _Loader(schema)
    if path is not None:
        loader.read_file(Path(path))
    for key, value in (values or {}).items():
        loader.take(key, value, who)
    for override in overrides:
        loader.read_override(override)
    return loader.finish(check)


def dump(config: Any) -> str:
    """A configuration as YAML that `load` reads back to an equal one."""
    return OmegaConf.to_yaml(OmegaConf.create(_writable(dataclasses.asdict(config))))


class _Loader:
    """One reading of one configuration: values so far, where each came from, and what was wrong."""

    def __init__(self, schema: type) -> None:
        self.schema = schema
        self.leaves = {leaf.key: leaf for leaf in leaves(schema)}
        self.sections = dict(sections(schema))
        self.values: dict[str, Any] = {}
        """By key of a leaf, with `${key}` as it was written."""
        self.places: dict[str, str] = {}
        self.problems: list[Problem] = []

    def read_file(self, path: Path) -> None:
        """Take every key of a YAML file, or note what is wrong with it."""
        try:
            text = read_bytes(path).decode("utf-8")
        except OSError as error:
            near = near_shipped(str(path)) if isinstance(error, FileNotFoundError) else None
            hint = f"; did you mean {near}?" if near else ""
            raise InputError(f"{path}: the config file cannot be read: {error.strerror or error}{hint}") from None
        except UnicodeDecodeError:
            raise InputError(f"{path}: the config file is not UTF-8 text") from None
        except ValueError as error:  # a null character in its name
            raise InputError(f"{path!r}: the config file cannot be read: {error}") from None
        try:
            tree, content = _parsed(text)
        except _UNREADABLE as error:
            raise InputError(f"{path}: the config file is not valid YAML: {_one_line(error)}") from None
        if tree is None:  # nothing but comments
            return
        if not isinstance(content, dict) or not isinstance(tree, yaml.MappingNode):
            raise InputError(f"{path}: the config file must consist of `key: value` lines")
        lines, written = {key: f"{path}:{line}" for key, line in _lines(tree)}, _written(tree)
        for key, value in content.items():
            self._take(str(key), value, lambda key: lines.get(key, str(path)), written.get(str(key), value))

    def read_override(self, text: str) -> None:
        """Take one `a.b=value` of the command line, or note what is wrong with it."""
        key, equals, value = text.partition("=")
        key = key.strip()
        if not equals or not key:
            self._note(COMMAND_LINE, text, MISSING, "write overrides as key=value, such as steps=10")
            return
        is_text = key in self.leaves and self.leaves[key].is_text
        try:
            tree, content = _parsed(f"value: {value}")
        except _UNREADABLE as error:
            if is_text:  # a text may look like anything: `data.template=Question: {question}`
                self._take(key, value, lambda key: COMMAND_LINE, value)
            else:
                self._note(COMMAND_LINE, key, value, f"the value is not valid YAML: {_one_line(error)}")
            return
        assert isinstance(tree, yaml.MappingNode)  # of the one key that was just written
        ((_, node),) = tree.value
        plain = not isinstance(node, yaml.ScalarNode) or node.style is None
        written = value if plain and is_text and _written(node) is not None else _written(node)
        self._take(key, content["value"], lambda key: COMMAND_LINE, written)

    def take(self, key: str, value: Any, place: str) -> None:
        """Take one value of Python by its dotted key, or note what is wrong with it."""
        try:
            plain: Any = OmegaConf.to_container(OmegaConf.create({"value": value}), resolve=False)
        except _UNREADABLE as error:
            self._note(place, key, value, f"this is no value of YAML: {_one_line(error)}")
        else:
            self._take(key, plain["value"], lambda _: place, plain["value"])

    def finish(self, check: Callable[[Any], Iterator[tuple[str, str]]]) -> Any:
        """Resolve `${key}`, apply types, limits and `check`, and return the section; raise if anything was wrong."""
        self._resolve()
        config = self._checked()
        wrong = {problem.key for problem in self.problems}
        for key, complaint in (*self._rules(config), *check(config)):
            if key not in wrong:
                leaf = self._leaf_of(key)  # which a key below a mapping is not itself
                place = self.places.get(key if leaf is None else leaf.key, DEFAULT)
                self._note(place, key, attrgetter(key)(config) if key in self.leaves else MISSING, complaint)
        if self.problems:
            raise ConfigError(self.problems)
        return config

    def _rules(self, config: Any) -> Iterator[tuple[str, str]]:
        """(key, advice) for what the sections themselves find wrong, the whole first."""
        for section, schema in (("", self.schema), *self.sections.items()):
            if hasattr(schema, "mistakes"):
                inner, dot = (attrgetter(section)(config), ".") if section else (config, "")
                yield from ((f"{section}{dot}{key}", advice) for key, advice in inner.mistakes())

    def _take(self, key: str, value: Any, place_of: Callable[[str], str], written: Any) -> None:
        """Take a value, which stands in YAML as `written` says, with every scalar as the text that it is there."""
        section, _, names = key.rpartition(".")
        if key in self.sections:
            shorthand = getattr(self.sections[key], "__shorthand__", None)
            if isinstance(value, dict):
                texts = written if isinstance(written, dict) else {}
                for name, inner in value.items():
                    self._take(f"{key}.{name}", inner, place_of, texts.get(str(name), inner))
            elif isinstance(value, str) and shorthand:
                self._take(f"{key}.{shorthand}", value, lambda _: place_of(key), written)
            elif value is not None:  # None: a section whose lines are all commented out
                names = ", ".join(field.name for field in dataclasses.fields(self.sections[key]))
                self._note(place_of(key), key, value, f"this is a section; its keys are {names}")
        elif "," in names and getattr(self.sections.get(section), "__together__", False):
            for name in names.split(","):
                self._take(f"{section}.{name.strip()}", value, lambda _: place_of(key), written)
        elif (leaf := self._leaf_of(key)) is not None:
            self._set(leaf, key, leaf.chosen(value, written) if key == leaf.key else value, place_of(key))
        else:
            self._note(place_of(key), key, MISSING, self._instead(key, isinstance(value, dict)))

    def _instead(self, key: str, is_section: bool) -> str:
        """Advice on a key that there is not."""
        if is_section:
            near = nearest(key, self.sections)
            return "unknown section; " + (f"did you mean {near}?" if near else f"there are {', '.join(self.sections)}")
        if key in GONE:
            return f"unknown key; {GONE[key]}"
        if elsewhere := OF_TORCHRUN.get(key.rpartition(".")[2]):
            return f"unknown key; torchrun {elsewhere} starts as many processes"
        near = ours(key, self.leaves) or nearest(key, self.leaves)
        return "unknown key; " + (f"did you mean {near}?" if near else "--help lists every key")

    def _set(self, leaf: Leaf, key: str, value: Any, place: str) -> None:
        """Give a leaf its value, or a key within its mapping one."""
        self.places[leaf.key] = place
        references = (match for text in _texts(value) for match in _REFERENCE.finditer(text))
        if any(match[2] is None and len(match[1]) % 2 == 0 for match in references):
            advice = "only ${key} is followed: the file alone says what runs; write the value (\\${ is plain text)"
            self._note(place, key, value, advice)
            return
        *above, name = key.removeprefix(leaf.key).split(".")
        if not above:
            self.values[key] = value
            return
        whole = inside = copy.deepcopy(self.values.get(leaf.key, leaf.default))
        if isinstance(whole, str) and leaf.type is Any:
            whole = inside = {"name": whole}  # what the text is short for
        for outer in above[1:]:
            inside = inside.setdefault(outer, {}) if isinstance(inside, dict) else None
        if not isinstance(inside, dict):
            self._note(place, key, value, f"{key.rpartition('.')[0]} is no mapping, which has no keys: make it one")
            return
        inside[name] = value
        self.values[leaf.key] = whole

    def _resolve(self) -> None:
        """Replace `${key}` by that key's value; note a reference to nothing."""
        referring = [key for key, value in self.values.items() if any("${" in text for text in _texts(value))]
        usual = {key: _writable(leaf.default) for key, leaf in self.leaves.items()} if referring else {}
        whole = OmegaConf.create(_nested(usual | self.values) if referring else {})
        for key in referring:
            try:
                value = OmegaConf.select(whole, key)
                self.values[key] = OmegaConf.to_container(value, resolve=True) if OmegaConf.is_config(value) else value
            except (OmegaConfBaseException, RecursionError) as error:  # the latter of keys that refer to each other
                advice = f"{_one_line(error)}; expected {self.leaves[key].expectation}"
                self._note(self.places[key], key, self.values.pop(key), advice)

    def _checked(self) -> Any:
        """The section with these values; a wrong one is noted and has its default, so that rules are asked, too."""
        values = {key: self.leaves[key].read(value) for key, value in self.values.items()}
        for key, value in [*values.items()]:
            numbers = value if isinstance(value, list) else [value]
            if not all(math.isfinite(each) for each in numbers if isinstance(each, float)):
                complaint = f"this is not a finite number; expected {self.leaves[key].expectation}"
                self._note(self.places[key], key, values.pop(key), complaint)
        try:
            return self.schema(**_nested(values))
        except ValidationError as error:
            errors = error.errors(include_url=False)
        for each in errors:
            leaf = leaf_at(each, self.leaves)
            inner = [
                str(part) for part in each["loc"][leaf.key.count(".") + 1 :] if leaf.is_mapping and part != "[key]"
            ]
            key, value = ".".join([leaf.key, *inner]), each["input"] if inner else self.values[leaf.key]
            if all(problem.key != key for problem in self.problems):
                self._note(self.places[leaf.key], key, value, advice(each, leaf))
            values.pop(leaf.key, None)
        return self.schema(**_nested(values))

    def _leaf_of(self, key: str) -> Leaf | None:
        """The leaf with this key, or the free mapping that it reaches into."""
        parts = key.split(".")
        for length in range(len(parts), 0, -1):
            leaf = self.leaves.get(".".join(parts[:length]))
            if leaf is not None and (length == len(parts) or leaf.is_mapping):
                return leaf
        return None

    def _note(self, place: str, key: str, value: Any, advice: str) -> None:
        self.problems.append(Problem(place, key, value, advice))


def _nested(values: Mapping[str, Any]) -> dict[str, Any]:
    """Values by dotted key as mappings within mappings."""
    whole: dict[str, Any] = {}
    for key, value in values.items():
        *above, name = key.split(".")
        inside = whole
        for outer in above:
            inside = inside.setdefault(outer, {})
        inside[name] = value
    return whole


def _parsed(text: str) -> tuple[yaml.Node | None, Any]:
    """A YAML text as the tree that knows its lines, and as plain values with references unresolved.

    Raises:
        ValueError: it is nested too deeply, or large once its aliases are written out. Much else: see `_UNREADABLE`.
    """
    tree = yaml.compose(text)
    if tree is not None:
        measure(tree)
    return tree, OmegaConf.to_container(OmegaConf.create(text or "{}"), resolve=False)


def _lines(node: yaml.Node, prefix: str = "") -> Iterator[tuple[str, int]]:
    """(dotted key, line number from 1) of every key of a YAML tree."""
    if isinstance(node, yaml.MappingNode):
        for name, value in node.value:
            yield f"{prefix}{name.value}", name.start_mark.line + 1
            yield from _lines(value, f"{prefix}{name.value}.")


def _written(node: yaml.Node) -> Any:
    """A YAML tree with every scalar as the text that stands there: `no`, `1e3`, `0x10`, `12:30:45`; None for null."""
    if isinstance(node, yaml.MappingNode):
        return {str(name.value): _written(value) for name, value in node.value}
    if isinstance(node, yaml.SequenceNode):
        return [_written(value) for value in node.value]
    return None if node.tag == "tag:yaml.org,2002:null" else node.value


def _texts(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for inner in value.values():
            yield from _texts(inner)
    elif isinstance(value, list | tuple):
        for inner in value:
            yield from _texts(inner)


def _writable(value: Any) -> Any:
    """Plain YAML types, with a literal `${` escaped so that reading it back does not look for a key."""
    if isinstance(value, str):
        return re.sub(r"(\\*)\$\{", lambda match: match[1] * 2 + r"\${", value)
    if isinstance(value, Mapping):
        return {key: _writable(inner) for key, inner in value.items()}
    return [_writable(inner) for inner in value] if isinstance(value, list | tuple) else value


def _short(value: Any) -> str:
    try:
        text = value if isinstance(value, str) else repr(_writable(value))
    except ValueError:  # Python writes no whole number of 5,000 digits
        text = "a number of thousands of digits"
    return text if len(text) <= 60 else f"{text[:57]}..."


def _one_line(error: Exception) -> str:
    if isinstance(error, RecursionError):
        return "nested too deeply, or in a circle"
    if isinstance(error, OmegaConfBaseException):
        return next(iter(str(error).splitlines()), type(error).__name__)
    return " ".join(str(error).split())
