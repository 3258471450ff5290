"""What `--dry-run` promises: whatever a configuration names is tried out, and what does not work names its key."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

from rlinf.agents.tools.tool import offers_tools
from rlinf.cli.main import describe
from rlinf.config.load import ConfigError, InputError
from rlinf.runs.data import load_data_of
from rlinf.runs.roles import naming, reason
from rlinf.runs.rules import load_config
from rlinf.runs.start import prepare
from tests.launching import QUICKSTART, ROOT, TINY
from tests.stand_in import save_model, save_problems


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return save_model(tmp_path_factory.mktemp("model"))


def described(*keys: str) -> str:
    return describe(load_config(ROOT / QUICKSTART, [*TINY, *keys]), 1)


def refused(*keys: str) -> str:
    """The message about keys that cannot be."""
    with pytest.raises(InputError) as caught:
        described(*keys)
    return str(caught.value)


# Models --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("hidden_size", "0"), ("hidden_size", "-64"), ("hidden_size", "1000000000.0"), ("hidden_size", "63"),
        ("num_attention_heads", "0"), ("hidden_act", "nosuch"), ("num_key_value_heads", "-0.5"),
        ("num_key_value_heads", "True"), ("num_key_value_heads", "3"), ("num_hidden_layers", "1000000"),
        ("intermediate_size", "-1"), ("rope_parameters", "{'rope_type': 'spiral'}"), ("model_type", "['a']"),
        ("rms_norm_eps", "tiny"), ("vocab_size", "0.5"),
    ],
)  # fmt: skip
def test_a_new_model_that_cannot_be_names_the_key_that_is_to_blame(key, value):
    told = refused(f"model.config.{key}={value}")
    assert told.startswith("1 problem in the configuration; nothing was started.\n")
    assert f"configuration: model.config.{key} = {value}: " in told
    assert len(told.splitlines()) == 2


def test_keys_that_only_together_are_wrong_name_the_section():
    told = refused("model.config={model_type: qwen2, hidden_size: 0, num_attention_heads: 0}")
    assert "configuration: model.config = {'model_type': 'qwen2'" in told


@pytest.mark.parametrize("kind", ["qwen2", "llama", "gpt2", "opt", "mixtral", "qwen2_moe", "phi3", "olmo2", "gpt_neox"])
def test_models_that_work_are_not_refused(kind):
    shape = dict.fromkeys(("hidden_size", "intermediate_size", "n_embd", "ffn_dim", "word_embed_proj_dim"), 16)
    shape |= dict.fromkeys(("num_hidden_layers", "num_attention_heads", "n_layer", "n_head", "num_key_value_heads"), 2)
    made = CONFIG_MAPPING[kind]()
    known = {*made.to_dict(), *made.attribute_map}
    keys = ", ".join(f"{name}: {value}" for name, value in shape.items() if name in known)
    pad = ", pad_token_id: 0" if kind == "phi3" else ""
    config = load_config(ROOT / QUICKSTART, [f"model.config={{model_type: {kind}, {keys}{pad}}}"])
    assert prepare(config).model_config.model_type == kind


def test_a_model_that_the_engine_cannot_decode_is_refused_where_something_is_generated():
    bart = "model.config={model_type: bart, d_model: 16, encoder_layers: 1, decoder_layers: 1}"
    assert "model.config.model_type = bart: " in refused(bart)


def test_a_tokenizer_with_more_tokens_than_the_model_is_refused(tmp_path):
    told = refused("model.config={model_type: qwen2, hidden_size: 8, vocab_size: 5}")
    assert "configuration: model.tokenizer" in told or "configuration: model.config" in told
    assert "embedding of 5" in told


def test_a_model_of_pictures_becomes_no_reward_model():
    model = load_config(ROOT / "configs/pictures/shapes.yaml").model
    config = load_config(ROOT / "configs/reward-model.yaml")
    with pytest.raises(ConfigError, match=r"model.config.model_type = qwen2_5_vl: .*scoring head"):
        prepare(replace(config, model=model))


def test_a_reference_that_the_data_holds_is_for_runs_on_given_texts():
    assert "reference.kind = precomputed: answers that are yet to be gen" in refused("reference.kind=precomputed")


LEAVING = "tests.runs.leaving.nothing"
"""In a module that ends the program when it is imported."""


@pytest.mark.parametrize("key", ["reward.function", "callbacks", "roles.mine.class"])
def test_code_that_would_end_the_program_is_a_mistake_of_its_key(key):
    value = f"[{LEAVING}]" if key == "callbacks" else LEAVING
    told = refused(f"{key}={value}", *(["flow=rlinf.flows.grpo"] if key.startswith("roles") else []))
    assert key in told
    assert "SystemExit" in told


@pytest.mark.parametrize("key", ["model.path", "critic.model"])
@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"hidden_size": 0}, "ZeroDivisionError"), ({"num_key_value_heads": 3}, ""),
        ({"model_type": "spiral"}, "spiral"), (None, "config.json"),
    ],
)  # fmt: skip
def test_a_saved_model_is_tried_by_its_configuration(model, tmp_path, key, change, said):
    written = json.loads((model / "config.json").read_text())
    text = "{" if change is None else json.dumps({**written, **change})
    (tmp_path / "config.json").write_text(text)
    told = refused("algorithm=ppo", f"{key}={tmp_path}")
    assert f"configuration: {key} = " in told
    assert said in told


def test_trying_a_model_leaves_no_trace_of_itself(model):
    before = torch.random.get_rng_state()
    config = prepare(load_config(None, [f"model.path={model}"])).model_config
    assert torch.equal(before, torch.random.get_rng_state())
    made = AutoModelForCausalLM.from_config(config)
    assert {parameter.device.type for parameter in made.parameters()} == {"cpu"}
    assert made.config._attn_implementation == "sdpa"


@pytest.mark.parametrize("wanted", ["nope", "input_layernorm"])
def test_adapters_of_layers_that_cannot_have_them_name_those_that_can(wanted):
    told = refused("model.lora.r=4", f"model.lora.target_modules=[{wanted}]")
    assert f"configuration: model.lora.target_modules = ['{wanted}']: " in told
    assert "gate_proj, k_proj" in told


# Sizes ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("setting", "said"),
    [
        ("rollout.max_new_tokens=1e11", "positions for 32,768 tokens"),
        ("rollout.max_new_tokens=1e9 model.config.max_position_embeddings=2000000000", "GB on each device"),
        ("rollout.max_rows=1e11", "decoded together would take"),
        ("rollout.max_tokens=1e15", "decoded together would take"),
        ("model.config.hidden_size=1000000000", "weights of the trainer"),
        ("evaluation.max_new_tokens=40000", "positions for 32,768 tokens"),
    ],
)  # fmt: skip
def test_what_no_machine_has_room_for_is_refused(setting, said):
    told = refused(*setting.split())
    assert said in told
    assert setting.partition("=")[0].removesuffix(".hidden_size") in told


def test_what_this_machine_has_no_memory_for_is_said():
    assert "of this machine" in described("model.config.hidden_size=200000", "model.config.num_attention_heads=500")
    assert "of this machine" not in described()


# Data ----------------------------------------------------------------------------------------------------------------


def own(model: Path, tmp_path: Path, *more: str, **columns: str) -> list[str]:
    """Keys of a run on problems of one's own."""
    train = save_problems(tmp_path / "train.jsonl", **columns)
    held_out = save_problems(tmp_path / "held_out.jsonl", 5, **columns)
    return ["sft.steps=0", f"model.path={model}", f"data.train={train}", f"evaluation.data={held_out}", *more]


def test_data_is_opened_and_its_first_prompts_are_made(model, tmp_path):
    told = described(*own(model, tmp_path, "data.chat=true"))
    assert "Data: " in told
    assert "12 rows" in told
    assert "'[user]What is " in told
    assert "evaluated on 5 problems" in told
    assert "rlinf.rewards.exact judges" in told
    assert "; right answers: '" in told
    generated = described()
    assert "first prompts: 5 to 5 tokens, such as '" in generated
    assert "no reward was chosen" not in generated, "their rule is exact's"


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ("data.columns.prompt=question", "question"),
        ("data.template={nope}", "nope"),
        ("data.chat=true data.chat_template='{%if'", "data.chat_template: "),
        ("data.chat=true data.chat_template='{{messages.a.b}}'", "data.chat_template: "),
        ("data.max_prompt_tokens=2", "max_prompt_tokens=2"),
        ("model.path=null model.tokenizer=README.md", "model.tokenizer = README.md"),
        ("reward.function=tests.own_parts.nothing", "reward.function"),
        ("rollout.max_new_tokens=32760", "rollout.max_new_tokens"),
    ],
)  # fmt: skip
def test_data_that_cannot_be_used_is_one_message(model, tmp_path, monkeypatch, keys, said):
    monkeypatch.chdir(ROOT)
    told = refused(*own(model, tmp_path), *keys.split())
    assert said in told


@offers_tools
async def working(task, llm):
    """Offers its tools by way of somebody else's code."""


class Worker:
    """Says so by an attribute."""

    offers_tools = True

    async def __call__(self, task, llm): ...


_DESCRIBED = "{% if tools %}{% for tool in tools %}{{ tool.function.name }}{% endfor %}{% endif %}"
_ALL = "{% for m in messages %}{{ m.content }}{% endfor %}"
_USERS = "{% for m in messages %}{% if m.role == 'user' %}{{ m.content }}{% endif %}{% endfor %}"


@pytest.mark.parametrize(
    ("agent", "template", "said"),
    [
        ("rlinf.agents.tools.tool.use_tools", _DESCRIBED + _USERS, "role tool"),
        ("rlinf.agents.search.search_by_tool", _DESCRIBED + _USERS, "role tool"),
        ("rlinf.agents.tools.tool.use_tools", _ALL, "such as look_up"),
        ("rlinf.agents.tools.tool.use_tools", _DESCRIBED + _ALL, None),
        ("tests.runs.library.test_agents.guess", _USERS, None),  # which offers no tools
        (f"{__name__}.working", _DESCRIBED + _USERS, "role tool"),
        (f"{__name__}.Worker", _ALL, "such as look_up"),
    ],
)  # fmt: skip
def test_a_template_that_hides_tools_from_the_model_is_refused_before_the_start(agent, template, said):
    args = {"use_tools": "tools: []", "search_by_tool": "retriever: x"}.get(agent.rpartition(".")[2], "")
    keys = ["model.tokenizer=characters:0123456789+=", f"agent.function={agent}", f"agent.args={{{args}}}"]
    config = load_config(ROOT / QUICKSTART, [*TINY, "sft.steps=0", *keys])
    config.data.chat_template = template
    if said is None:
        assert "Data: " in describe(config, 1)
        return
    for checked in (lambda: describe(config, 1), lambda: load_data_of(config, prepare(config).objects)):
        with pytest.raises(ConfigError, match=said) as caught:
            checked()
        assert "data.chat_template" in str(caught.value)


def test_a_reward_that_takes_a_column_that_there_is_not(model, tmp_path, monkeypatch):
    (tmp_path / "picky_reward.py").write_text("def picky(response, colour):\n    return 1.0\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert "colour" in refused(*own(model, tmp_path, "reward.function=picky_reward.picky"))


def test_rewards_of_benchmarks_are_tried_on_their_own_answers(tmp_path, monkeypatch):
    fails, half = "def fails(response, answer): raise OSError('no judge')", "def half(response, at): return at / 2"
    (tmp_path / "named_reward.py").write_text(f"{fails}\n{half}\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    rows = save_problems(tmp_path / "rows.jsonl")

    def entry(reward: str, more: str = "") -> str:
        return f"evaluation.named.mine={{data: {rows}, reward: {reward}, template: null{more}}}"

    keys = ["sft.steps=0", f"model.path={save_model(tmp_path / 'model')}", f"data.train={rows}"]
    told = described(*keys, entry("named_reward.half", ", args: {at: 3}"))
    assert "evaluation.named.mine: 1.5 " in told
    said = refused(*keys, entry("named_reward.fails"))
    assert "evaluation.named.mine.reward = named_reward.fails" in said
    assert "no judge" in said


def test_worked_problems_for_a_warm_up_must_have_responses(model, tmp_path):
    keys = own(model, tmp_path, "data.columns.answer=prompt", "sft.steps=1", "data.columns.response=nope")
    assert "nope" in refused(*keys)


# Code of the user's own ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("key", "path"), [("flow", "broken_on_import.step"), ("reward.function", "broken_on_import.reward")]
)
def test_code_that_cannot_be_imported_names_the_key_and_its_own_line(tmp_path, monkeypatch, key, path):
    code = "async def step(step, rollout):\n    return {}\n\ndef reward(response):\n    return 1.0\n\n1 / 0\n"
    (tmp_path / "broken_on_import.py").write_text(code)
    monkeypatch.syspath_prepend(str(tmp_path))
    told = refused(f"{key}={path}")
    assert f"configuration: {key} = {path}: " in told
    assert "ZeroDivisionError: division by zero" in told
    assert "broken_on_import.py:7" in told


def test_whatever_is_raised_becomes_one_short_line():
    with (
        pytest.raises(ConfigError, match=r"a\.b = 3:.*KeyError: 'x'"),
        naming("a.b", 3, "trying it"),
    ):
        {}["x"]
    with pytest.raises(InputError, match="mine"), naming("a.b", 3):
        raise InputError("mine")
    assert reason(ValueError("two\n  lines")) == "two lines"
    assert len(reason(RuntimeError("long " * 1000))) < 400
    assert reason(ValueError()) == "ValueError"
