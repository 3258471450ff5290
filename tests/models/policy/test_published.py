"""Directories of authors: read by their own names, saved back in the same form, and what is wrong with one is said."""

import json

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from rlinf.models.policy.build import build_policy_model, configured, fitted, load_policy, make_policy, save_policy
from rlinf.models.policy.published import fill, read_tensors, tensor_files, to_be_read, without_memory, write_sharded
from tests.models.policy.authored import AUTHORED, publish_as_authors
from tests.models.policy.cases import MLP, observed, rough

CPU = torch.device("cpu")
GIVEN = {key: value for key, value in AUTHORED.items() if key != "width"}  # that is said by the authors


@pytest.fixture
def authors(tmp_path):
    publish_as_authors(tmp_path / "authors")
    return tmp_path / "authors"


def test_a_published_directory_is_read_by_the_authors_names_and_saved_back_byte_for_byte(authors, tmp_path):
    policy = make_policy(GIVEN, str(authors), CPU)
    theirs = load_file(authors / "model.safetensors")
    assert torch.equal(policy.body[1].up.weight, theirs["model.layers.1.up.weight"])
    assert policy.config.width == 16
    assert policy.words == "grasp\n"
    save_policy(policy, tmp_path / "again")
    back = load_file(tmp_path / "again" / "model.safetensors")
    assert back.keys() == theirs.keys()
    assert all(torch.equal(back[name], theirs[name]) for name in theirs)
    assert (tmp_path / "again" / "words.txt").read_text() == "grasp\n"
    assert json.loads((tmp_path / "again" / "config.json").read_text()) == {"hidden_size": 16}


def test_a_checkpoint_in_the_published_form_is_the_same_policy_with_what_is_our_own(authors, tmp_path):
    policy = rough(make_policy(GIVEN, str(authors), CPU))
    save_policy(policy, tmp_path / "kept")
    again = make_policy({}, str(tmp_path / "kept"), CPU)
    assert again.config == policy.config
    state = again.state_dict()
    assert all(torch.equal(each, state[name]) for name, each in policy.state_dict().items())
    assert {*load_file(tmp_path / "kept" / "extra.safetensors")} == {
        name for name in state if name.startswith(("critic.", "log_std"))
    }
    one, two = (each.act(observed(MLP), generator=torch.arange(6)) for each in (policy, again))
    assert torch.equal(one.actions, two.actions)


def test_first_values_of_what_is_our_own_are_alike_in_every_process(authors):
    one, two = (make_policy(GIVEN, str(authors), CPU) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(one.parameters(), two.parameters(), strict=True))
    assert bool(one.critic[0].weight.any())


def test_what_will_be_read_has_no_memory_until_it_is():
    with without_memory():
        policy = build_policy_model(AUTHORED)
    assert policy.body[0].up.weight.is_meta
    assert not policy.critic[0].weight.is_meta
    assert not build_policy_model(AUTHORED).body[0].up.weight.is_meta


def test_tied_weights_that_are_read_stay_tied():
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            with to_be_read():
                self.words, self.head = nn.Embedding(4, 3), nn.Linear(3, 4, bias=False)
                self.head.weight = self.words.weight

    with without_memory():
        tied = Tied()
    fill(tied, [("words.weight", torch.ones(4, 3))], where="here")
    assert tied.head.weight is tied.words.weight
    assert torch.equal(tied.head.weight, torch.ones(4, 3))


def test_in_bfloat16_what_must_stay_in_float32_does(authors):
    policy = make_policy(GIVEN, str(authors), CPU, torch.bfloat16)
    kinds = {name: each.dtype for name, each in policy.named_parameters()}
    assert kinds["body.0.up.weight"] == torch.bfloat16
    assert {kinds["body.0.norm.weight"], kinds["critic.0.weight"], kinds["log_std"]} == {torch.float32}
    close = policy.act(observed(MLP), generator=torch.arange(6)).actions
    exact = make_policy(GIVEN, str(authors), CPU).act(observed(MLP), generator=torch.arange(6)).actions
    torch.testing.assert_close(close, exact, rtol=0.0, atol=0.05)  # three layers of 8 bits each


def damage(directory, how):
    path = directory / "model.safetensors"
    named = {name: tensor.clone() for name, tensor in load_file(path).items()}  # the file is written anew below
    if how == "missing":
        del named["model.exit.bias"]
    elif how == "shape":
        named["model.exit.bias"] = torch.zeros(4)
    elif how == "index":
        (directory / "model.safetensors.index.json").write_text(
            '{"weight_map": {"model.exit.bias": "other.safetensors"}}'
        )
    if how in ("missing", "shape"):
        write_sharded(directory, named)
    elif how == "cut":
        path.write_bytes(path.read_bytes()[:-40])
    elif how == "config":
        (directory / "config.json").unlink()


@pytest.mark.parametrize(("how", "kind", "says"), [
    ("missing", ValueError, r"authors.*exit.bias.*policy"),
    ("shape", ValueError, r"exit.bias.*\[4\].*\[3\].*policy"),
    ("index", FileNotFoundError, r"lacks other.safetensors"),
    ("cut", ValueError, r"model.safetensors.*safetensors file"),
    ("config", FileNotFoundError, "neither policy.json nor config.json"),
])  # fmt: skip
def test_what_is_wrong_with_a_published_directory_is_said(how, kind, says, authors):
    damage(authors, how)
    with pytest.raises(kind, match=says):
        make_policy(GIVEN, str(authors), CPU)


def test_an_authors_directory_needs_a_type_that_has_a_published_form(authors):
    with pytest.raises(FileNotFoundError, match=r"published form"):
        make_policy(MLP, str(authors), CPU)
    with pytest.raises(FileNotFoundError, match=r"holds.*policy\.json"):
        load_policy(authors)


def test_what_a_run_says_goes_before_what_the_directory_says(authors):
    assert configured({**GIVEN, "chunk": 2}, authors)["chunk"] == 2
    assert configured({**GIVEN, "width": 8}, authors)["width"] == 8


def test_large_weights_are_split_over_files_that_an_index_names(tmp_path):
    named = {f"layer.{number}": torch.full((10,), float(number)) for number in range(5)}
    write_sharded(tmp_path, named, shard_bytes=90)
    assert len(list(tmp_path.glob("model-*-of-00003.safetensors"))) == 3
    back = dict(read_tensors(tensor_files(tmp_path)))
    assert back.keys() == named.keys()
    assert all(torch.equal(back[name], named[name]) for name in named)


def test_bounds_of_actions_reach_the_policies_that_know_the_robots_units():
    bounds = ([-1.0, -0.5, float("-inf")], [1.0, 2.0, float("inf")])
    found = fitted(GIVEN, {"state": (5,)}, 3, bounds=bounds)
    assert build_policy_model(found).config.action_high == (1.0, 2.0, float("inf"))
    assert "action_low" not in fitted({"type": "mlp"}, {"state": (5,)}, 3, bounds=bounds)
