"""Configuration: closed, typed, documented; every mistake is told at once, with its place and what to do."""

from __future__ import annotations

import dataclasses
import math
import sys
import tempfile
from dataclasses import field
from pathlib import Path
from typing import Any, Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import Field
from pydantic.dataclasses import dataclass

from rlinf.cli.keys import as_markdown, as_text
from rlinf.config.embodied import EmbodiedConfig
from rlinf.config.importing import mistake_in, near_shipped, resolve
from rlinf.config.load import ConfigError, InputError, dump, load
from rlinf.config.schema import CLOSED, leaves, nearest
from rlinf.config.text import RunConfig
from rlinf.runs.rules import load_any, load_config

ROOT = Path(__file__).parents[2]


@dataclass(config=CLOSED)
class Inner:
    """An inner section."""

    rate: float = Field(0.5, gt=0, le=1)
    """A rate."""
    names: dict[str, Any] = field(default_factory=dict)
    """Anything."""
    text: str = ""
    """Any text."""
    maybe: str | None = None
    """Text or nothing."""
    pair: tuple[float, float] = (0.1, 0.2)
    """Two numbers."""
    hosts: list[int] = field(default_factory=list)
    """Hosts."""


@dataclass(config=CLOSED)
class Outer:
    """A schema of every kind of field."""

    count: int = Field(1, ge=0)
    """A count."""
    flag: bool = False
    """A flag."""
    inner: Inner = field(default_factory=Inner)


@pytest.fixture
def yaml_file(tmp_path: Path):
    def write(text: str) -> Path:
        path = tmp_path / "run.yaml"
        path.write_text(text, encoding="utf-8")
        return path

    return write


def problems_of(path: Path | None, *overrides: str, hosts: int | None = None) -> dict[str, str]:
    """{key: the whole line about it} of a configuration that must be wrong."""
    with pytest.raises(ConfigError) as caught:
        load_config(path, overrides, hosts)
    return {problem.key: str(problem) for problem in caught.value.problems}


def test_a_file_and_overrides_become_one_typed_configuration(yaml_file):
    path = yaml_file('steps: 7\noptimizer:\n  lr: 1e-3\n  betas: [0.8, 0.95]\nplacement: {"rollout,judge": 1-2}\n')
    config = load_config(path, ["optimizer.lr=2e-4", "name=mine", "placement.trainer=3", "optimizer.lr=3e-4"])
    assert (config.steps, config.optimizer.lr, config.optimizer.betas, config.name) == (7, 3e-4, (0.8, 0.95), "mine")
    placement = config.placement
    assert (placement.rollout, placement.judge, placement.trainer) == ("1-2", "1-2", 3)
    assert config.sft.steps == RunConfig().sft.steps, "what nobody sets keeps its default"


WORDS = [
    "no", "Yes", "off", "true", "1e3", "1e-6", "0x10", "0b11", "010", "1_000", "007", "12:30:45", "2024-01-01",
    "2024-01-01 10:00:00", ".5", "+1", ".inf", "NaN", "1.10", "a b", "3142>", "~/m",
]  # fmt: skip
"""Which YAML, or one of its versions, takes for something else than text."""


@pytest.mark.parametrize(("word", "key"), [(word, ("text", "maybe")[place % 2]) for place, word in enumerate(WORDS)])
def test_a_text_is_the_characters_that_were_written(yaml_file, word, key):
    ways = {
        "a file": load(Outer, yaml_file(f"inner:\n  {key}: {word}\n")),
        "a flow mapping": load(Outer, yaml_file(f"inner: {{{key}: {word}}}\n")),
        "quotes": load(Outer, yaml_file(f"inner:\n  {key}: '{word}'\n")),
        "the command line": load(Outer, None, [f"inner.{key}={word}"]),
        "a section on the command line": load(Outer, None, [f"inner={{{key}: {word}}}"]),
        "Python": load(Outer, None, values={f"inner.{key}": word}),
        "a reference": load(Outer, yaml_file(f"inner: {{text: {word}, maybe: '${{inner.text}}'}}")),
    }
    for way, config in ways.items():
        assert getattr(config.inner, key) == word, way
        assert load(Outer, yaml_file(dump(config))) == config, way


@pytest.mark.parametrize("word", ["null", "~", ""])
def test_only_a_null_without_quotes_is_no_text(yaml_file, word):
    assert load(Outer, yaml_file(f"inner:\n  maybe: {word}")).inner.maybe is None
    assert load(Outer, None, [f"inner.maybe={word}"]).inner.maybe is None
    for quoted in (f"'{word}'", f'"{word}"'):
        for config in (
            load(Outer, yaml_file(f"inner:\n  maybe: {quoted}")),
            load(Outer, None, [f"inner.maybe={quoted}"]),
        ):
            assert config.inner.maybe == word
            assert load(Outer, yaml_file(dump(config))) == config


@pytest.mark.parametrize(
    "text", ["???", "Question: {question}", "{question}", "a # b", "[x", "- a", " a ", "a: b: c", "@x", "%", "'a' b"]
)
def test_a_text_on_the_command_line_may_look_like_anything(yaml_file, text):
    config = load(Outer, None, [f"inner.text={text}"])
    assert config.inner.text == text
    assert load(Outer, yaml_file(dump(config))) == config


def test_the_home_directory_is_found_in_every_place_of_a_model(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "m").mkdir()
    places = [
        "model.path",
        "model.tokenizer",
        "critic.model",
        "reference.model",
        "reward_model.path",
        "teacher.adapter",
    ]
    config = load(RunConfig, None, ["model.lora.r=4", *(f"{key}=~/m" for key in places)])
    for key in places:
        found: Any = config
        for name in key.split("."):
            found = getattr(found, name)
        assert found == str(tmp_path / "m"), key
    assert load(RunConfig, None, ["data.system=~/m"]).data.system == "~/m", "a text is a text"
    teachers = load(RunConfig, None, ["teachers={math: {model: ~/m}}"]).named_teachers
    assert teachers["teacher_math"].model == str(tmp_path / "m")


def test_lists_and_choices_of_texts_are_the_characters_too(yaml_file):
    @dataclass(config=CLOSED)
    class Choosing:
        choice: Literal["on", "off", 1, True] = "on"
        """One."""
        stop: list[str] = field(default_factory=list)
        """Several."""
        names: dict[str, str] = field(default_factory=dict)
        """By name."""

    assert load(Choosing, yaml_file("choice: off\nstop: [no, 1e3, 'x']\nnames: {a: 0x10}")) == Choosing(
        "off", ["no", "1e3", "x"], {"a": "0x10"}
    )
    assert load(Choosing, None, ["choice=1", "stop=no"]) == Choosing(1, ["no"])
    assert load(Choosing, None, ["choice=true"]).choice is True


def test_all_mistakes_come_together_each_with_place_key_value_and_advice(yaml_file):
    path = yaml_file("steps: ten\nactor:\n  lr: 1\nsft: 3\nrollout:\n  temperature: -1\nflow: rlinf.nowhere.at_all\n")
    found = problems_of(path, "seed=many", "nonsense", "name=a/b")
    places = {"steps": 1, "actor": 2, "sft": 4, "rollout.temperature": 6, "flow": 7}
    assert all(found[key].startswith(f"{path}:{line}: {key}") for key, line in places.items())
    assert found["seed"] == "command line: seed = many: expected a whole number (int), at least 0"
    assert found.keys() == {*places, "seed", "nonsense", "name"}


def test_overrides_reach_into_a_free_mapping_and_leave_its_other_keys(yaml_file):
    path = yaml_file("model:\n  config: {model_type: qwen2, hidden_size: 64}\n")
    config = load_config(path, ["model.config.hidden_size=96", "model.config.rope.theta=1e4"])
    assert config.model.config == {"model_type": "qwen2", "hidden_size": 96, "rope": {"theta": 1e4}}


def test_a_key_may_take_the_value_of_another_one_but_nothing_from_outside(yaml_file, monkeypatch):
    config = load_config(yaml_file("steps: 30\nlog_every: ${steps}\nname: sort-${task.digits}\n"))
    assert (config.log_every, config.name) == (30, "sort-4")
    assert load_config(None, ["evaluation.every=${steps}", "steps=6"]).evaluation.every == 6
    monkeypatch.setenv("SECRET", "7")
    for key, value in {"seed": "${oc.env:SECRET}", "sft.lr": "${optimizer.learning}", "steps": "${name}"}.items():
        assert problems_of(None, f"{key}={value}").keys() == {key}


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("a: [", "not valid YAML"),
        ("- a\n- b\n", "key: value"),
        ("just text", "key: value"),
        ("a: 1\na: 2\n", "duplicate"),
    ],
)
def test_a_file_that_is_not_a_mapping_is_one_clear_message(yaml_file, text, said):
    with pytest.raises(InputError, match=said):
        load_config(yaml_file(text))


def test_a_missing_file_and_an_empty_one(tmp_path, yaml_file):
    with pytest.raises(InputError, match=r"absent\.yaml:.*config"):
        load_config(tmp_path / "absent.yaml")
    with pytest.raises(InputError, match="cannot be read"):
        load_config(tmp_path)
    assert load_config(yaml_file("# nothing\n")) == RunConfig()
    assert load_config(yaml_file("sft:\n#  steps: 3\n")) == RunConfig(), "a section of comments is an empty one"


def test_placements_are_checked_against_the_processes_of_the_job():
    load_config(None, ["placement.rollout=0-1", "placement.trainer=3"], hosts=1)  # one process takes every role
    load_config(None, ["placement.rollout=0-1", "placement.trainer=3"], hosts=4)
    found = problems_of(None, "placement.trainer=3", "placement.judge=null", "placement.rollout=1,1", hosts=2)
    assert found.keys() == {"placement.trainer", "placement.rollout"}
    for key, value in {"placement.critic": "7", "placement.trainer": "0:0-1"}.items():
        assert problems_of(None, f"{key}={value}", hosts=2).keys() == {key}


@pytest.mark.parametrize(
    ("overrides", "found"),
    [
        (["algorithm=dapo"], {"name": "dapo"}),
        (["algorithm=dapo", "algorithm.loss.clip_high=0.3"], {"name": "dapo", "loss": {"clip_high": 0.3}}),
        (["algorithm.loss=sapo"], {"loss": "sapo"}),
        (["algorithm.loss=sapo", "algorithm.loss.tau_neg=2"], {"loss": {"name": "sapo", "tau_neg": 2}}),
        (["algorithm={name: ppo, kl: {beta: 0.1}}", "algorithm.kl.place=reward"],
         {"name": "ppo", "kl": {"beta": 0.1, "place": "reward"}}),
        (["algorithm.kl.beta=0.1", "algorithm.kl=null"], {"kl": None}),
    ],
)  # fmt: skip
def test_a_recipe_is_named_in_a_word_and_changed_in_any_part(overrides, found):
    config = load_config(None, overrides)
    assert config.algorithm == dataclasses.replace(RunConfig().algorithm, **found)
    with tempfile.NamedTemporaryFile("w", suffix=".yaml") as file:
        file.write(dump(config))
        file.flush()
        assert load_config(file.name) == config


def test_a_word_stands_for_a_section_only_where_one_is_meant(yaml_file):
    assert problems_of(None, "optimizer=adam").keys() == {"optimizer"}
    assert problems_of(yaml_file("algorithm: 3\n")).keys() == {"algorithm"}
    assert load_config(yaml_file("algorithm: rloo\n")).algorithm.name == "rloo"


def test_a_flow_is_any_async_function_and_what_is_none_is_told_before_anything_starts(tmp_path, monkeypatch):
    (tmp_path / "mine_flow.py").write_text("async def mine_flow(): ...\nasync def other(): ...\ndef plain(): ...\n")
    monkeypatch.syspath_prepend(tmp_path)
    assert mistake_in("mine_flow") is None
    assert mistake_in("mine_flow.other") is None
    assert mistake_in("mine_flow.plain") is None
    assert resolve("mine_flow") is resolve("mine_flow.mine_flow")
    assert "async def" in (mistake_in("mine_flow.plain", must_be_async=True) or "")
    assert "mine_flow.other?" in (mistake_in("mine_flow.othr") or "")
    assert mistake_in("rlinf.envs.remote.Remote") is None  # which it has once it is asked for
    assert "Remot" in (mistake_in("rlinf.envs.remote.Remot") or "")
    assert mistake_in("not_there.at_all")
    assert mistake_in("path/to/file.py")
    sys.modules.pop("mine_flow", None)


def test_a_path_may_name_what_is_in_the_script_that_runs(monkeypatch):
    monkeypatch.setattr(sys.modules["__main__"], "own_part", print, raising=False)
    assert mistake_in("__main__.own_part") is None
    assert resolve("__main__.own_part") is print
    assert mistake_in("__main__.no_part")


def test_nearest_names_prefer_the_same_section_and_say_nothing_when_nothing_is_close():
    known = ["optimizer.lr", "sft.lr", "sft.steps", "steps"]
    assert nearest("sft.step", known) == "sft.steps"
    assert nearest("stepss", known) == "steps"
    assert nearest("zzzzzz", known) is None


@pytest.mark.parametrize("schema", [RunConfig, Outer])
def test_every_field_is_documented_and_defaulted(schema):
    for leaf in leaves(schema):
        assert leaf.doc, f"{leaf.key} has no docstring under it"
    assert schema() == schema()


def test_one_text_is_a_list_where_texts_are_asked_for():
    config = load_config(None, ["model.lora.target_modules=all-linear", "rollout.stop=[a, b]"])
    assert (config.model.lora.target_modules, config.rollout.stop) == (["all-linear"], ["a", "b"])


def test_every_key_is_in_the_help_and_the_page_is_current():
    for leaf in leaves(RunConfig):
        assert f"{leaf.key}: " in as_text(RunConfig)
    written = (ROOT / "docs" / "config.md").read_text(encoding="utf-8")
    assert written == as_markdown(RunConfig), "run: python -m rlinf config --markdown > docs/config.md"
    written = (ROOT / "docs" / "config-embodied.md").read_text(encoding="utf-8")
    command = "python -m rlinf config --embodied --markdown > docs/config-embodied.md"
    assert written == as_markdown(EmbodiedConfig), f"run: {command}"


@pytest.mark.parametrize("path", sorted((ROOT / "configs").rglob("*.yaml")), ids=lambda path: path.stem)
def test_the_configs_of_the_repository_load(path, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / ".cache/rlinf/SmolLM2-135M-Instruct").mkdir(parents=True)  # what `make smollm2` brings
    assert load_any(path, hosts=8 if path.parent.name == "embodied" else None).name


finite = st.floats(allow_nan=False, allow_infinity=False)
scalars = st.none() | st.booleans() | st.integers() | finite | st.text()
mappings = st.recursive(
    st.dictionaries(st.from_regex(r"[a-z_]{1,8}", fullmatch=True), scalars, max_size=3),
    lambda inner: st.dictionaries(st.from_regex(r"[a-z_]{1,8}", fullmatch=True), scalars | inner | st.lists(scalars)),
    max_leaves=5,
)
configs = st.builds(
    Outer,
    count=st.integers(min_value=0),
    flag=st.booleans(),
    inner=st.builds(
        Inner,
        rate=st.floats(min_value=0, max_value=1, exclude_min=True),
        names=mappings,
        text=st.text() | st.sampled_from(["${x}", r"\${x}", "${oc.env:HOME}", r"a\\${x}b", "null", "1e5", "~", "off"]),
        maybe=st.none() | st.text(),
        pair=st.tuples(finite, finite),
        hosts=st.lists(st.integers()),
    ),
)


@given(config=configs)
def test_a_configuration_written_and_read_again_is_the_same(tmp_path_factory, config):
    path = tmp_path_factory.getbasetemp() / "written.yaml"
    path.write_text(dump(config), encoding="utf-8", newline="")
    assert load(Outer, path) == config


@given(value=st.integers(min_value=0) | finite.filter(lambda value: 0 < value <= 1) | st.booleans())
def test_an_override_reads_what_python_prints(value):
    key = {int: "count", float: "inner.rate", bool: "flag"}[type(value)]
    config: Any = load(Outer, None, [f"{key}={value}"])
    for name in key.split("."):
        config = getattr(config, name)
    assert config == value
    assert type(config) is type(value)


def test_limits_hold_for_every_element_and_are_documented():
    limits = {leaf.key: leaf.limits for leaf in leaves(RunConfig)}
    assert limits["optimizer.betas"] == ("at least 0", "less than 1")
    assert limits["evaluation.k"] == ("at least 1",)
    assert limits["optimizer.lr"] == ("more than 0",)
    assert problems_of(None, "evaluation.k=[1, 0]").keys() == {"evaluation.k"}
    with pytest.raises(ConfigError):
        load(Outer, None, [f"inner.rate={math.inf}"])


def test_the_best_evaluation_needs_evaluations_between_the_steps():
    wrong = problems_of(None, "checkpoint.best=accuracy", "evaluation.patience=3", "callbacks=[no.such.module]")
    assert wrong.keys() == {"checkpoint.best", "evaluation.patience", "callbacks"}
    chosen = ["checkpoint.best=evaluation/accuracy", "evaluation.every=2", "evaluation.patience=3"]
    assert load_config(None, chosen).checkpoint.best == "evaluation/accuracy"


def test_muon_is_for_whole_weights_and_what_it_does_not_read_is_refused():
    for more in (
        "model.lora.r=4",
        "trainer.backend=megatron",
        "trainer.parallel.tensor=2",
        "trainer.parallel.expert=2",
    ):
        assert "optimizer.kind" in problems_of(None, "optimizer.kind=muon", more)
    assert problems_of(None, "optimizer.muon.momentum=0.9").keys() == {"optimizer.muon"}
    assert load_config(None, ["optimizer.kind=muon", "optimizer.muon.momentum=0.9"]).optimizer.muon.momentum == 0.9


@pytest.mark.parametrize("asked", ["trainer.router_replay=true", "algorithm.router_aux_loss=0.1"])
def test_experts_are_asked_for_only_where_there_are_some(asked):
    with pytest.raises(ConfigError, match=r"model.*experts:"):
        load_config("configs/quickstart.yaml", [asked])
    with pytest.raises(ConfigError, match=r"engine.*experts"):
        load_config("configs/moe/qwen3-moe-tiny.yaml", [asked, "rollout.engine=vllm"])
    load_config("configs/moe/qwen3-moe-tiny.yaml", [asked])


@pytest.mark.parametrize(
    ("named", "meant"),
    [
        ("quickstar", "quickstart"),
        ("configs/quickstat.yaml", "quickstart"),
        ("qwen2.5-1.5-grpo", "math/qwen2.5-1.5b-grpo"),
    ],
)
def test_a_name_close_to_that_of_a_configuration_of_ours_leads_to_it(named, meant):
    assert near_shipped(named) == meant
    assert near_shipped("absent.yaml") is None


@pytest.mark.parametrize(
    ("older_names", "today"),
    [
        ("rlinf.envs.gymnasium.vector.GymnasiumVector", "rlinf.envs.gymnasium.GymnasiumVector"),
        ("rlinf.envs.benchmarks.simpler.Simpler", "rlinf.envs.adapters.simpler.Simpler"),
        ("rlinf.flows.supervised.sft", "rlinf.flows.sft"),
        ("rlinf.agents.search.search_r1", "rlinf.agents.search.search_r1"),
        ("rlinf.agents.tools.arithmetic.calculator", "rlinf.agents.tools.arithmetic.calculator"),
        ("rlinf.algos.losses.value", "rlinf.algos.losses.value"),
        ("rlinf.models.mlp.MlpPolicy", "rlinf.models.policy.actor_critic.MlpPolicy"),
        ("rlinf.models.soft.SoftPolicy", "rlinf.models.policy.sac.SoftPolicy"),
        ("rlinf.envs.maniskill_batched.ManiSkillBatched", "rlinf.envs.maniskill.ManiSkillBatched"),
    ],
)
def test_a_path_of_an_older_release_leads_to_the_same_thing(older_names, today):
    assert mistake_in(older_names) is None
    assert resolve(older_names) is resolve(today)
