"""Whatever stands in a configuration, what comes of it is a configuration or one message, and that soon."""

from __future__ import annotations

import pytest

from rlinf.config.embodied import EmbodiedConfig
from rlinf.config.importing import looks_local
from rlinf.config.load import _OURS, GONE, ConfigError, InputError, ours
from rlinf.config.schema import leaves
from rlinf.config.text import RunConfig
from rlinf.runs.rules import is_embodied, load_any, load_config

BOMB = "a: &a [1, 1, 1, 1, 1, 1, 1, 1, 1, 1]\n" + "".join(
    f"{chr(98 + n)}: &{chr(98 + n)} [{', '.join(['*' + chr(97 + n)] * 10)}]\n" for n in range(9)
)


def problem(*overrides: str) -> str:
    """The one problem that overrides have."""
    with pytest.raises(ConfigError) as caught:
        load_config(None, overrides)
    (found,) = caught.value.problems
    return str(found)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("optimizer.lr", "1" + "0" * 400),
        ("optimizer.lr", "1" + "0" * 5000),
        ("steps", "1" + "0" * 400),
        ("optimizer.grad_clip", ".inf"),
        ("reward.args", "{" * 1500),
        ("reward.args", "[" * 1200 + "]" * 1200),
        ("reward.args", "{a: " + "[" * 60 + "]" * 60 + "}"),
        ("reward.args", "&a {b: *a}"),
    ],
    ids=lambda text: text[:24],
)
def test_what_no_computation_could_use_is_one_problem_that_names_its_key(key, value):
    told = problem(f"{key}={value}")
    assert told.startswith(f"command line: {key}")
    assert len(told) < 400


@pytest.mark.parametrize("text", ["{" * 1500, "[" * 1200, BOMB, "a: &a\n  b: *a\n", "x: 1" + "0" * 5000, "a: 1\0b"])
def test_a_file_that_no_memory_holds_is_no_configuration(tmp_path, text):
    (tmp_path / "wild.yaml").write_text(text)
    assert not is_embodied(tmp_path / "wild.yaml")
    with pytest.raises(InputError, match=r"wild\.yaml:.*config.*YAML") as caught:
        load_any(tmp_path / "wild.yaml")
    assert len(str(caught.value)) < 600


def test_a_whole_number_may_be_written_as_computers_do():
    config = load_config(None, ["steps=1e3", "optimizer.lr=1e1", "evaluation.k=[1e0]", "rollout.top_k=5.0"])
    assert (config.steps, config.optimizer.lr, config.evaluation.k, config.rollout.top_k) == (1000, 10.0, [1], 5)
    assert type(config.steps) is int
    assert type(config.optimizer.lr) is float
    assert problem("steps=1.5e0").startswith("command line: steps = ")


@pytest.mark.parametrize(
    ("theirs", "meant"),
    [
        ("optimizer.learning_rate", "optimizer.lr"), ("learning_rate", "optimizer.lr"), ("lr", "optimizer.lr"),
        ("rollout.n", "algorithm.group_size"), ("evaluation.n", "evaluation.samples"),
        ("batch_size", "algorithm.prompts_per_step"), ("algorithm.num_generations", "algorithm.group_size"),
        ("rollout.max_completion_length", "rollout.max_new_tokens"), ("max_grad_norm", "optimizer.grad_clip"),
        ("actor_rollout_ref.actor.optim.lr", "optimizer.lr"), ("critic.optim.lr", "critic.lr"),
        ("optimiser.lr", "optimizer.lr"), ("rollout.gpu_memory_utilization", "rollout.engine_args"),
        ("per_device_train_batch_size", "trainer.micro_batch_tokens"), ("model_name_or_path", "model.path"),
    ],
)  # fmt: skip
def test_a_key_of_another_framework_leads_to_ours(theirs, meant):
    assert problem(f"{theirs}=1") == f"command line: {theirs}: unknown key; did you mean {meant}?"


def test_a_key_that_went_is_refused_with_what_became_of_it():
    assert problem("rollout.rescale=true").endswith(GONE["rollout.rescale"])
    assert not GONE.keys() & {leaf.key for schema in (RunConfig, EmbodiedConfig) for leaf in leaves(schema)}


def test_how_many_processes_there_are_is_said_to_torchrun():
    assert "torchrun --nproc-per-node N" in problem("trainer.n_gpus_per_node=8")


def test_every_key_that_advice_names_is_there_and_no_other_name_is_one():
    known = {leaf.key for schema in (RunConfig, EmbodiedConfig) for leaf in leaves(schema)}
    assert _OURS.keys() <= known
    assert not {name for names in _OURS.values() for name in names.split()} & known
    assert ours("sft.learning_rate", ["sft.lr", "optimizer.lr"]) == "optimizer.lr"


@pytest.mark.parametrize(
    ("key", "path"),
    [
        *(("model.path", "./x"), ("model.tokenizer", "/x"), ("critic.model", "~/x"), ("data.train", "~/x")),
        *(("reference.model", "outputs/x"), ("teacher.model", "a/b/c"), ("data.train", "rlinf/x")),
    ],
)
def test_what_can_only_be_a_path_is_never_looked_for_on_a_hub(key, path):
    with pytest.raises(ConfigError) as caught:
        load_config(None, [f"{key}={path}"])
    assert key in {mistake.key for mistake in caught.value.problems}


def test_what_a_hub_may_have_is_left_to_it():
    assert not any(map(looks_local, ("gpt2", "Qwen/Qwen3-0.6B", "openai/gsm8k:main/x")))
