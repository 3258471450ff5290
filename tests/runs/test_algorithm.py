"""From the keys of a configuration to the algorithm that runs, and what it needs."""

from pathlib import Path

import pytest

from rlinf.algos import recipes
from rlinf.algos.recipes import NAMES
from rlinf.config.embodied import EmbodiedConfig
from rlinf.config.load import ConfigError
from rlinf.runs.embodied_roles import control_algorithm_of
from rlinf.runs.prepare import (
    CORRECTION,
    REJECTION,
    ROUNDED,
    algorithm_of,
    default_correction,
    filled_in_limit,
    flow_of,
    for_older_answers,
    for_rounded_answers,
    roles_of,
)
from rlinf.runs.rules import load_config, load_embodied, recipe_names
from rlinf.runs.start import prepare


def chosen(*overrides):
    return algorithm_of(load_config(None, overrides))


def refused(*overrides):
    """What a user reads, by key."""
    with pytest.raises(ConfigError) as caught:
        prepare(load_config(None, overrides))
    return {problem.key: problem.advice for problem in caught.value.problems}


def own_advantage(answers, penalty, reduce):
    return answers.rewards


@pytest.mark.parametrize("name", sorted(set(NAMES) - {"dr_grpo", "dapo"}))
def test_a_recipe_by_its_name_is_that_recipe(name):
    assert chosen(f"algorithm={name}") == recipes.get(name)


def test_limits_of_the_run_are_filled_in_unless_they_are_set():
    dapo = chosen("algorithm=dapo", "rollout.max_new_tokens=100")
    assert (dapo.shaping.longest, dapo.shaping.cache) == (100, 20), "a fifth, as 4,096 of 20,480"
    dapo = chosen("algorithm=dapo", "rollout.max_new_tokens=100", "algorithm.shaping.cache=7")
    assert (dapo.shaping.longest, dapo.shaping.cache) == (100, 7)
    dapo = chosen("algorithm=dapo", "algorithm.shaping.longest=50", "algorithm.shaping.cache=5")
    assert (dapo.shaping.longest, dapo.shaping.cache) == (50, 5)
    assert chosen("algorithm=dapo", "algorithm.shaping=null").shaping is None
    assert chosen("algorithm=dr_grpo", "rollout.max_new_tokens=9").aggregation.norm_length == 9
    assert chosen("algorithm=dr_grpo", "algorithm.aggregation.norm_length=5").aggregation.norm_length == 5
    assert chosen("algorithm=dr_grpo", "algorithm.aggregation.how=token-mean").aggregation.norm_length is None
    changed = chosen("algorithm.aggregation.how=seq-mean-token-sum-norm", "rollout.max_new_tokens=9").aggregation
    assert changed.norm_length == 9


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["algorithm=dapo", "rollout.max_new_tokens=6"], ["more than 5 tokens", "up to 0.5 at 6", "shaping.longest"]),
        (["algorithm=dapo", "algorithm.shaping={longest: 9, cache: 2}"], None),
        (["algorithm=dapo", "algorithm.shaping=null"], None),
        (["algorithm=grpo"], None),
    ],
)
def test_a_limit_that_nobody_has_set_is_told_with_where_it_bites(overrides, words):
    config = load_config(None, overrides)
    told = filled_in_limit(config, algorithm_of(config))
    assert told is None if words is None else all(word in told for word in words)


def test_any_part_can_be_changed_left_out_or_ones_own():
    assert chosen("algorithm=sapo", "algorithm.loss.tau_neg=2").loss.tau_neg == 2.0
    assert chosen("algorithm.loss=sapo", "algorithm.loss.tau_neg=2").loss.tau_neg == 2.0
    assert chosen("algorithm=deepseek_grpo", "algorithm.kl=null").kl is None
    assert chosen("algorithm.sampling={}").sampling is None, "an empty mapping changes nothing"
    assert chosen("algorithm.sampling.max_rounds=3").sampling.max_rounds == 3
    assert chosen("algorithm.entropy_bonus=0.01").entropy_bonus == 0.01
    assert chosen(f"algorithm.advantage={__name__}.own_advantage").advantage.__name__ == "own_advantage"


@pytest.mark.parametrize(
    ("overrides", "corrected"),
    [
        (("algorithm=grpo",), True),
        (("staleness.max=1",), False),
        (("algorithm=ppo",), True),
        (("algorithm.rejection.cap=1.5",), False),
        (("algorithm.rejection=null",), False),
        (("staleness.max=0",), False),
        (("algorithm.correction=null",), False),
        (("algorithm.correction.cap=3",), False),
        (("algorithm=grpo_icepop",), False),
        (("algorithm=async_grpo",), False),
        (("algorithm=sapo",), False),
    ],
)
def test_asynchronous_flows_correct_for_older_answers_unless_told_otherwise(overrides, corrected):
    config = load_config(None, ["staleness.max=2", *overrides])
    plain = algorithm_of(config)
    found = for_older_answers(plain, config)
    assert (found.correction is CORRECTION) == corrected == (found != plain)
    assert (found.rejection is REJECTION) == corrected
    words = default_correction(config, found)
    assert (words is not None) == corrected
    assert not corrected or "algorithm.correction={cap: " in words


@pytest.mark.parametrize(
    ("overrides", "corrected"),
    [
        (("rollout.weights=int8",), True),
        (("rollout.weights=float8",), True),
        (("rollout.engine=vllm", "rollout.engine_args={args: {quantization: fp8}}"), True),
        (("rollout.engine=sglang", "rollout.engine_args={args: [--quantization, fp8]}"), True),
        (("rollout.engine=sglang", "rollout.engine_args={args: [--mem-fraction-static, 0.5]}"), False),
        (("rollout.weights=int8", "algorithm=sapo"), True),
        ((), False),
        (("rollout.weights=int8", "algorithm.correction=null"), False),
        (("rollout.weights=int8", "algorithm.correction.cap=3"), False),
        (("rollout.weights=int8", "algorithm=grpo_icepop"), False),
        (("rollout.weights=int8", "algorithm=async_grpo"), False),
    ],
)
def test_answers_of_rounded_weights_are_corrected_for_unless_told_otherwise(overrides, corrected):
    config = load_config(None, overrides)
    plain = algorithm_of(config)
    found = for_rounded_answers(plain, config)
    assert (found.correction is ROUNDED) == corrected == (found != plain)
    assert ("algorithm.correction={cap: " in (default_correction(config, found) or "")) == corrected


@pytest.mark.parametrize(
    "overrides", [("rollout.engine=sglang",), ("rollout.engine=vllm",), ("placement.device_kind=cuda",)]
)
def test_who_has_no_rounded_weights_is_refused_by_the_key(overrides):
    told = refused("rollout.weights=int8", *overrides)
    assert "full" in told["rollout.weights"]


@pytest.mark.parametrize(
    ("keys", "corrected"),
    [(["flow=rlinf.flows.grpo"], False), (["flow=rlinf.flows.grpo_async", "staleness.max=2"], True)],
)
def test_only_flows_that_work_ahead_have_the_default_correction(keys, corrected):
    path = Path(__file__).parents[2] / "configs" / "quickstart.yaml"
    found = prepare(load_config(path, keys), 2).algorithm
    assert (found.correction is CORRECTION) == corrected


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("algorithm.loss.clip_hih=1", "meant 'clip_high'"),
        ("algorithm.loss=sappo", "meant 'sapo'"),
        ("algorithm.kl.beta=-1", "must be more than 0"),
        ("algorithm.advantage=rlinf.nothing.here", "rlinf.nothing.here"),
        ("algorithm.advantage=gae", "critic"),
    ],
)
def test_a_part_that_there_is_not_is_one_message(override, said):
    assert said in refused(override)["algorithm"]


def test_a_recipe_that_there_is_not_is_told_with_all_other_mistakes():
    assert recipe_names() == NAMES
    with pytest.raises(ConfigError, match=r"(?s)steps.*algorithm.*did you mean dapo"):
        load_config(None, ["steps=x", "algorithm=dapp"])


def test_an_algorithm_says_which_roles_and_flow_it_needs():
    def needs(*overrides):
        config = load_config(None, overrides)
        return roles_of(config, algorithm_of(config))

    assert needs() == []
    assert needs("algorithm=ppo") == ["critic"]
    assert needs("algorithm=ppo", "algorithm.kl={place: reward, kind: k1}") == ["critic", "reference"]
    assert needs("algorithm=opd", "teacher.model=some/model") == ["teacher"]
    assert needs("algorithm=deepseek_grpo") == ["reference"]
    assert needs("algorithm=deepseek_grpo", "reference.kind=adapters_off", "model.lora.r=4") == []
    assert flow_of(recipes.get("ppo"), with_agent=False) == "rlinf.flows.ppo"
    assert flow_of(recipes.get("dapo"), with_agent=False) == "rlinf.flows.grpo"
    assert flow_of(recipes.get("dapo"), with_agent=True) == "rlinf.flows.agentic"


def test_what_does_not_go_together_is_told_before_anything_starts(monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)  # no such model is asked for again and again
    for algorithm in ("grpo", "rloo", "dapo", "reinforce_pp_baseline"):
        told = refused(f"algorithm={algorithm}", "algorithm.group_size=1", "reference.model=some/model")
        assert "at least 2" in told["algorithm.group_size"], algorithm
    assert "algorithm.group_size" in refused(
        "algorithm=ppo", "algorithm.group_size=1", "algorithm.sampling={max_rounds: 3}"
    )
    assert "algorithm.group_size" not in refused("algorithm=ppo", "algorithm.group_size=1", "flow=rlinf.flows.grpo")
    assert "name a saved model" in refused("algorithm=opd")["teacher.model"]
    assert "grpo has no critic" in refused("critic.model=some/model")["critic.model"]
    assert "needs a critic" in refused("algorithm=ppo", "flow=rlinf.flows.grpo")["flow"]
    assert "critic, which this run has not" in refused("flow=rlinf.flows.ppo")["flow"]


@pytest.mark.parametrize(
    ("settings", "key"),
    [
        (("staleness.max=3",), "staleness.max"),
        (("rollout.carry=2",), "rollout.carry"),
        (("rollout.groups=partial",), "rollout.groups"),
        (("flow=rlinf.flows.grpo_async", "rollout.extra=65"), "rollout.extra"),
    ],
)
def test_a_key_of_working_ahead_that_the_flow_makes_nothing_of_is_a_mistake(settings, key):
    with pytest.raises(ConfigError, match=rf"{key} = "):
        prepare(load_config(Path(__file__).parents[2] / "configs" / "quickstart.yaml", settings))


GRPO = ("algorithm=grpo", "env.group_size=2", "algorithm.advantage={}", "policy.settings={value_level: null}")


@pytest.mark.parametrize(
    ("settings", "key"),
    [
        ((*GRPO, "env.fresh=false"), "env.fresh"),
        ((*GRPO, "algorithm.reward_scaling=true"), "algorithm.reward_scaling"),
        ((*GRPO, "algorithm.filter_success=[0.9, 0.1]"), "algorithm.filter_success"),
        (("algorithm.filter_returns=[0.5, 4.5]",), "algorithm.filter_returns"),
        (("algorithm.entropy_schedule=linear",), "algorithm.entropy_schedule"),
        (("algorithm=sac", "optimizer.schedule=cosine"), "optimizer.schedule"),
        (("algorithm=sac", "optimizer.warmup_steps=3"), "optimizer.warmup_steps"),
    ],
)
def test_what_the_algorithm_of_a_run_that_acts_makes_nothing_of_is_a_mistake(settings, key):
    toy = Path(__file__).parents[2] / "configs" / "embodied" / "toy.yaml"
    with pytest.raises(ConfigError, match=rf"{key} = "):
        prepare(load_embodied(toy, settings))


def test_actions_are_learned_from_by_other_defaults_than_text():
    acting = control_algorithm_of(EmbodiedConfig())
    assert (acting.advantage.gamma, acting.advantage.lam) == (0.99, 0.95)
    assert (acting.critic.clip, acting.critic.error, acting.loss.dual_clip) == (None, "square", None)
    text = chosen("algorithm=ppo")
    assert (text.advantage.gamma, text.critic.clip, text.critic.error) == (1.0, 0.2, "huber")
