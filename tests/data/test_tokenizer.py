"""Tokenizers, and the one way in which files of models are read."""

import ast
import json
import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils import HF_MODULES_CACHE

from rlinf.config.learning import RewardModelConfig
from rlinf.config.text import ModelConfig, RunConfig
from rlinf.data.tokenizer import character_tokenizer, load_tokenizer, pretrained
from rlinf.models.language.build import build_model, empty_model, own_dtype, pictures_of
from rlinf.models.scoring import load_classifier, mistakes_in_saved
from rlinf.runs.dry_run.models import policy_model
from rlinf.runs.dry_run.transformer import saved_shape
from tests.launching import ROOT

ALPHABET = "0123456789> +="
tokenizer = character_tokenizer(ALPHABET)


@given(st.text(ALPHABET, min_size=1))
def test_a_character_is_a_token_and_back(text):
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    assert len(ids) == len(text)
    assert tokenizer.decode(ids) == text


def test_special_tokens_come_first():
    assert (tokenizer.pad_token_id, tokenizer.eos_token_id, tokenizer.unk_token_id) == (0, 1, 2)
    assert tokenizer("0")["input_ids"] == [3]
    assert tokenizer("?")["input_ids"] == [2]
    assert len(tokenizer) == 3 + len(ALPHABET)


def test_it_saves_and_loads_like_any_other(tmp_path):
    tokenizer.save_pretrained(tmp_path)
    for again in (AutoTokenizer.from_pretrained(tmp_path), load_tokenizer(str(tmp_path))):
        ids = again("31 42>", add_special_tokens=False)["input_ids"]
        assert ids == tokenizer("31 42>")["input_ids"]
        assert again.decode(ids) == "31 42>"
        assert (again.pad_token_id, again.eos_token_id) == (0, 1)


@pytest.mark.parametrize("kind", ["qwen2", "llama"])
def test_beside_a_model_it_is_the_tokenizer_that_was_saved(tmp_path, kind):
    tokenizer.save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": kind}))
    assert load_tokenizer(str(tmp_path))("31 42>")["input_ids"] == tokenizer("31 42>")["input_ids"]


@pytest.mark.parametrize(("alphabet", "why"), [("", "there is none"), ("0120", "'0' stands twice")])
def test_an_alphabet_has_each_character_once(alphabet, why):
    with pytest.raises(ValueError, match=why):
        character_tokenizer(alphabet)


def test_a_source_is_a_directory_or_an_alphabet():
    assert len(load_tokenizer({"characters": "ab"})) == 5
    with pytest.raises(ValueError, match="characters"):
        load_tokenizer({"letters": "ab"})


def test_a_directory_without_a_tokenizer_is_named(tmp_path):
    with pytest.raises(ValueError, match=f"tokenizer: {tmp_path}.*none"):
        load_tokenizer(str(tmp_path))


# Code that comes with a model -----------------------------------------------------------------------------------------

MARK = "the model's own code ran"


@pytest.fixture
def intruder(tmp_path, monkeypatch):
    """A model's directory whose files name Python code of its own, which leaves a mark; standard input answers yes."""
    (tmp_path / "evil.py").write_text(
        "from pathlib import Path\n"
        "Path(__file__).with_name('mark').touch()\n"
        "from transformers import PretrainedConfig, PreTrainedTokenizerFast\n"
        "class Config(PretrainedConfig): model_type = 'evil'\n"
        "class Tokenizer(PreTrainedTokenizerFast): pass\n"
    )
    ours = dict.fromkeys(("AutoConfig", "AutoModelForCausalLM", "AutoModel"), "evil.Config")
    (tmp_path / "model.safetensors").write_bytes((2).to_bytes(8, "little") + b"{}")
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "evil", "auto_map": ours}))
    (tmp_path / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "Evil", "auto_map": {"AutoTokenizer": ["evil.Tokenizer", "evil.Tokenizer"]}})
    )
    monkeypatch.setattr("builtins.input", lambda *_: pytest.fail("a question in the middle of a command"))
    yield str(tmp_path)
    assert not (tmp_path / "mark").exists(), MARK
    modules = Path(HF_MODULES_CACHE) / "transformers_modules" / tmp_path.name
    assert not list(modules.rglob("mark")), MARK


def _policy(path):
    _, problems = policy_model(RunConfig(model=ModelConfig(path=path)))
    raise ValueError(str(problems[0]))


def _reward_model(path):
    raise ValueError(" ".join(reason for _, reason in mistakes_in_saved(RewardModelConfig(path=path))))


LOADERS = {
    "tokenizer": load_tokenizer,
    "policy of a configuration": _policy,
    "model": lambda path: build_model(path, tokenizer, seed=0),
    "empty model": lambda path: empty_model(path, {}),
    "precision": own_dtype,
    "pictures": lambda path: pictures_of(path, tokenizer),
    "shape": lambda path: saved_shape(path, AutoModelForCausalLM),
    "classifier": lambda path: load_classifier(path, tokenizer),
    "reward model": _reward_model,
    "adapted class": lambda path: pretrained(AutoModelForCausalLM, path),
}


@pytest.mark.parametrize("name", LOADERS)
def test_code_that_comes_with_a_model_neither_runs_nor_asks(name, intruder):
    with pytest.raises(ValueError, match=r"evil\.py"):
        LOADERS[name](intruder)


def test_no_loader_is_called_but_through_the_one_that_runs_no_code():
    """Left to their defaults, loaders of transformers ask whether to run a model's own code."""
    harmless = {"GenerationConfig", "PeftConfig", "LlamaForCausalLM"}  # JSON alone; a class of transformers
    calls = [
        f"{path.name}:{node.lineno}"
        for path in (ROOT / "rlinf").rglob("*.py")
        if path.name not in ("tokenizer.py", "gguf.py")  # a GGUF file holds no code, and its reader says so
        and re.search("from_(pretrained|config)", text := path.read_text(encoding="utf-8"))
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.Attribute) and node.attr in {"from_pretrained", "from_config", "_from_config"}
        if not (isinstance(node.value, ast.Name) and node.value.id in harmless)
    ]
    assert calls == []
