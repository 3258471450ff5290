"""Recipes as data: names, changes, and errors that name the nearest."""

import dataclasses
from dataclasses import dataclass

import pytest

from rlinf.algos import algorithms, recipes
from rlinf.algos.algorithms import ADVANTAGES, LOSSES, Cispo, Clipped, Kl, Overlong, Sapo
from rlinf.algos.recipes import NAMES

PARTS = {"advantage": ADVANTAGES, "loss": LOSSES}


def settings(recipe):
    """Every field of a spec by its dotted key, as `override` takes them."""
    found = {}
    for field in dataclasses.fields(recipe):
        value = getattr(recipe, field.name)
        if not dataclasses.is_dataclass(value):
            found[field.name] = value
            continue
        if field.name in PARTS:
            names = {kind: name for name, kind in PARTS[field.name].items()}
            found[f"{field.name}.name"] = names.get(type(value))
        found |= {f"{field.name}.{inner.name}": getattr(value, inner.name) for inner in dataclasses.fields(value)}
    return found


@pytest.mark.parametrize("name", NAMES)
def test_every_recipe_comes_by_its_name_and_back_from_its_settings(name):
    recipe = recipes.get(name)
    assert recipe.name == name
    keys = {key: value for key, value in settings(recipe).items() if key != "name"}
    assert recipes.get(name, keys) == recipe
    assert algorithms.override(recipes.get("gspo"), _whole(recipe)) == recipes.get("gspo", _whole(recipe))


def _whole(recipe):
    return {key: value for key, value in settings(recipe).items() if key.startswith("loss.")}


def test_what_makes_dapo():
    dapo = recipes.get("dapo")
    assert dapo.loss == Clipped(clip_low=0.2, clip_high=0.28)
    assert dapo.shaping == Overlong(longest=20480, cache=4096)
    assert dapo.sampling is not None
    assert dapo.aggregation.how == "token-mean"
    assert dapo.kl is None


def test_a_key_of_a_part_is_changed_nested_or_dotted():
    nested = recipes.get("dapo", {"loss": {"clip_high": 0.3}, "shaping": {"longest": 6, "cache": 2}})
    assert nested.loss == Clipped(clip_low=0.2, clip_high=0.3)
    assert nested == recipes.get("dapo", {"loss.clip_high": 0.3, "shaping.longest": 6, "shaping.cache": 2})
    assert recipes.get("dapo").loss.clip_high == 0.28  # recipes themselves never change


def test_another_part_is_taken_by_name_with_or_without_keys():
    assert recipes.get("grpo", {"loss": "sapo"}).loss == Sapo()
    assert recipes.get("grpo", {"loss": {"name": "sapo", "tau_neg": 2}}).loss == Sapo(tau_neg=2.0)
    assert recipes.get("grpo", {"loss.name": "cispo", "loss.clip_high": 3.0}).loss == Cispo(clip_high=3.0)
    assert recipes.get("grpo", {"loss": Cispo(clip_high=3.0)}).loss == Cispo(clip_high=3.0)


def test_an_optional_part_is_added_and_left_out():
    added = recipes.get("grpo", {"kl": {"beta": 0.04}})
    assert added.kl == Kl("loss", "k3", 0.04)
    assert recipes.get("grpo", {"kl.beta": 0.04}) == added
    assert algorithms.override(added, {"kl": None}).kl is None
    assert recipes.get("grpo", {"correction": {}}).correction is not None


def my_loss(batch, aggregation, weights):
    raise NotImplementedError


@dataclass(frozen=True)
class MyAdvantage:
    slope: float = 1.0

    def __call__(self, answers, penalty, reduce):
        raise NotImplementedError


def test_a_users_own_function_or_class_stands_in_by_itself_or_by_its_path():
    mine = {"my.loss": my_loss, "my.Advantage": MyAdvantage}
    found = recipes.get("grpo", {"loss": "my.loss", "advantage": "my.Advantage"}, resolve=mine.__getitem__)
    assert found.loss is my_loss
    assert found.advantage == MyAdvantage()
    assert recipes.get("grpo", {"loss": my_loss, "advantage": MyAdvantage()}) == found
    tuned = recipes.get("grpo", {"advantage": {"name": "my.Advantage", "slope": 2}}, resolve=mine.__getitem__)
    assert tuned.advantage == MyAdvantage(2.0)
    assert settings(tuned)["advantage.slope"] == 2.0
    assert settings(found)["loss"] is my_loss


def test_what_a_trainer_has_to_provide_is_told():
    assert not recipes.get("grpo").needs_whole_batch
    assert recipes.get("reinforce_pp").needs_whole_batch
    assert recipes.get("reinforce_pp").needs_reference
    assert recipes.get("ppo").needs_whole_batch
    assert not recipes.get("ppo", {"advantage.whiten": False}).needs_whole_batch
    assert recipes.get("opd").needs_teacher
    assert recipes.get("async_grpo").needs_recomputed_logprobs
    assert not recipes.get("async_grpo_interpolated").needs_recomputed_logprobs
    assert recipes.get("grpo_tis").needs_recomputed_logprobs


@pytest.mark.parametrize(
    ("name", "changes", "text"),
    [
        ("drgrpo", {}, r"name='drgrpo'.*; meant 'dr_grpo'"),
        ("grpo", {"los": {}}, r"key='los'.*'loss'"),
        ("grpo", {"loss.clip_hihg": 0.3}, r"\(Clipped\): key='clip_hihg'.*; meant 'clip_high'"),
        ("sapo", {"loss.clip_high": 0.3}, r"\(Sapo\): key='clip_high'.*'tau_pos'"),
        ("grpo", {"loss": "clip"}, r"name='clip'.*'clipped'"),
        ("grpo", {"aggregation.how": "token_mean"}, "meant 'token-mean'"),
        ("grpo", {"advantage.scale": "stdev"}, "meant 'std'"),
        ("grpo", {"loss.clip_low": "0.2"}, r"clip_low='0.2'.*float"),
        ("grpo", {"loss.clip_low": True}, r"clip_low=True.*float"),
        ("grpo", {"loss.dual_clip": []}, r"dual_clip=\[\].*float.*null"),
        ("grpo", {"loss.clip_low": 1.5}, r"clip_low=1.5.*between 0.*1"),
        ("grpo", {"kl.beta": 0.0}, r"beta=0.0.*more.*0"),
        ("grpo", {"kl": {"kind": "k1"}}, "mean zero"),
        ("grpo", {"kl": {"place": "reward", "kind": "k1", "corrected": True}}, "corrected=true belongs"),
        ("grpo", {"kl": 0.1}, r"mapping.*'beta'.*0.1"),
        ("grpo", {"aggregation": None}, r"aggregation.*mapping"),
        ("grpo", {"aggregation.how": "seq-mean-token-sum-norm"}, r"norm_length.*set"),
        ("grpo", {"aggregation.norm_length": 5}, r"norm_length=5.0.*used"),
        ("grpo", {"critic": {}}, r"need.*other"),
        ("grpo", {"advantage": "gae"}, r"need.*other"),
        ("async_grpo", {"correction": {}}, r"corrects.*itself"),
        ("grpo", {"entropy_bonus": -1}, r"entropy_bonus=-1.0.*least 0"),
        ("grpo", {"loss": 3}, r"loss=3.*function"),
        ("grpo", {"loss": lambda batch, how: 0}, r"aggregation, weights\)"),
        ("grpo", {"advantage": lambda a, b, c, more: 0}, r"advantage: .*\(answers"),
        ("grpo", {"advantage": lambda *, answers: 0}, r"advantage: .*\(answers"),
        ("grpo", {"loss": {"name": my_loss, "x": 1}}, r"without fields"),
        ("grpo", {"loss": "sapo", "loss.tau_pos": 2.0}, "both given"),
        ("grpo", {"loss.clip_low": 0.1, "loss": "sapo"}, "given twice"),
        ("dapo", {"shaping.cache": 30000}, r"cache=30000.*between"),
        ("dapo", {"sampling.max_rounds": 0}, "max_rounds=0"),
        ("dapo", {"sampling.max_rounds": 1.5}, r"max_rounds=1.5.*int"),
        ("grpo_tis", {"correction.floor": 3.0}, "floor=3.0"),
    ],
)
def test_mistakes_are_told_before_anything_runs(name, changes, text):
    with pytest.raises(ValueError, match=text):
        recipes.get(name, changes)
