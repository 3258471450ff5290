"""Making models: saved ones, and new ones from a configuration."""

import json

import pytest
import torch

from rlinf.config.learning import RewardModelConfig
from rlinf.config.load import InputError
from rlinf.config.text import ModelConfig, RunConfig
from rlinf.data.tokenizer import load_tokenizer
from rlinf.models.language.build import build_model
from rlinf.models.language.sources import unreadable_weights
from rlinf.models.scoring import mistakes_in_saved
from rlinf.runs.dry_run.models import policy_model
from tests.actors import toys

MODEL = toys.configuration()
TOKENIZER = load_tokenizer(toys.ALPHABET)


def test_the_same_seed_makes_the_same_model_and_leaves_randomness_alone():
    torch.manual_seed(5)
    expected = torch.rand(1)
    torch.manual_seed(5)
    one, two, other = (build_model(MODEL, TOKENIZER, seed=seed) for seed in (1, 1, 2))
    assert torch.equal(torch.rand(1), expected)
    assert all(torch.equal(a, b) for a, b in zip(one.parameters(), two.parameters(), strict=True))
    assert not all(torch.equal(a, b) for a, b in zip(one.parameters(), other.parameters(), strict=True))
    assert one.config.vocab_size == len(TOKENIZER)
    assert one.config.eos_token_id == TOKENIZER.eos_token_id


@pytest.mark.parametrize("source", [{"hidden_size": 32}, {"model_type": "no_such_model"}])
def test_a_configuration_that_makes_no_model_is_refused(source):
    with pytest.raises(ValueError, match=r"model_type|no_such_model"):
        build_model(source, TOKENIZER)


def test_in_half_precision_the_rotary_angles_stay_precise():
    net = build_model(MODEL, TOKENIZER, dtype=torch.bfloat16)
    assert {parameter.dtype for parameter in net.parameters()} == {torch.bfloat16}
    assert {buffer.dtype for buffer in net.buffers()} == {torch.float32}


def test_a_saved_model_is_loaded_without_bars(tmp_path, capfd):
    build_model(MODEL, TOKENIZER).save_pretrained(tmp_path)
    build_model(str(tmp_path), TOKENIZER)
    assert capfd.readouterr().err == ""


# Weights that are damaged ---------------------------------------------------------------------------------------------


class _Runs:
    """Unpickled, it runs a function."""

    def __reduce__(self):
        return pytest.fail, ("a pickle of somebody else ran",)


def _cut(directory):
    file = directory / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])


def _removed(directory):
    (directory / "model.safetensors").unlink()


def _pickled(content):
    def write(directory):
        _removed(directory)
        torch.save(content, directory / "pytorch_model.bin")

    return write


def _cut_pickle(directory):
    _pickled({"weight": torch.ones(100)})(directory)
    file = directory / "pytorch_model.bin"
    file.write_bytes(file.read_bytes()[:-200])


@pytest.fixture
def saved(tmp_path):
    build_model(MODEL, TOKENIZER).save_pretrained(tmp_path)
    TOKENIZER.save_pretrained(tmp_path)
    return tmp_path


@pytest.mark.parametrize("damage", [_cut, _pickled({"a": torch.ones(3), "b": _Runs()}), _cut_pickle])
def test_damaged_weights_are_refused_before_the_start_and_nothing_in_them_runs(saved, damage):
    damage(saved)
    assert unreadable_weights(str(saved))
    _, (problem,) = policy_model(RunConfig(model=ModelConfig(path=str(saved))))
    assert problem.key == "model.path"
    assert [key for key, _ in mistakes_in_saved(RewardModelConfig(path=str(saved)))] == ["path"]


@pytest.mark.parametrize("change", [lambda _: None, _pickled({"a": torch.ones(3)})])
def test_whole_weights_are_taken(saved, change):
    change(saved)
    assert unreadable_weights(str(saved)) is None


def test_a_model_without_weights_may_be_planned_for_and_not_loaded(saved):
    _removed(saved)
    assert policy_model(RunConfig(model=ModelConfig(path=str(saved))))[1] == []
    with pytest.raises(InputError, match="no weights"):
        build_model(str(saved), TOKENIZER)


def test_a_model_whose_files_lack_a_layer_is_not_completed_by_random_weights(saved):
    config = json.loads((saved / "config.json").read_text())
    layers = config["num_hidden_layers"]
    config |= {"num_hidden_layers": layers + 1, "layer_types": ["full_attention"] * (layers + 1)}
    (saved / "config.json").write_text(json.dumps(config))
    with pytest.raises(InputError, match=rf"layers\.{layers}\."):
        build_model(str(saved), TOKENIZER)
