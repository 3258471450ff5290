"""What a configuration says of reward models, teachers and roles of one's own, and what is told of mistakes in it."""

import inspect

import pytest

from rlinf.config.load import ConfigError
from rlinf.placement.seats import TEXT, place
from rlinf.placement.simulate import trial
from rlinf.runs.dry_run.transformer import share_tensors
from rlinf.runs.roles import Teachers, collected, with_teachers
from rlinf.runs.rules import load_config
from rlinf.runs.start import prepare
from rlinf.runs.text import rollout_settings, trainer_settings
from tests.models.scoring.saved import saved_classifier, saved_language_model

OWN = ("flow=tests.own_roles.with_index", "roles.verifier.class=tests.own_roles.Verifier")
WHOLE = "algorithm=opd algorithm.loss=divergence"
INDEX = "roles.index={class: tests.own_roles.Index, settings: {top: 3}}"


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    directory = tmp_path_factory.mktemp("models")
    return {
        "CLASSIFIER": saved_classifier(directory),
        "LABELS": saved_classifier(directory, labels=3),
        "LANGUAGE": saved_language_model(directory),
    }


def problems(*overrides, hosts=1):
    """What a user reads, by key."""
    with pytest.raises(ConfigError) as caught:
        prepare(load_config(None, overrides, hosts), hosts)
    return {problem.key: problem.advice for problem in caught.value.problems}


@pytest.mark.parametrize(
    ("overrides", "key", "advice"),
    [
        ("reward.function=null", "reward.function", "nothing scores"),
        ("reward_model.template=x{response}", "reward_model.template", "no reward model"),
        ("reward_model.path=/nowhere", "reward_model.path", "no such directory"),
        ("reward_model.path=LANGUAGE", "reward_model.path", "Qwen2ForCausalLM, no classification model"),
        ("reward_model.path=LABELS", "reward_model.label", "3 labels: say which"),
        ("reward_model.path=LABELS reward_model.label=3", "reward_model.label", "3 labels, the first of which is 0"),
        ("reward_model.path=CLASSIFIER reward_model.template=hello", "reward_model.template", "{response}"),
        ("reward_model.path=CLASSIFIER reward_model.choices.a=1", "reward_model.choices", "kind: generative"),
        ("reward_model.path=LANGUAGE reward_model.kind=generative", "reward_model.template", "asked by it"),
        (
            "reward_model.path=LANGUAGE reward_model.kind=generative reward_model.template=x{response} "
            "reward_model.max_new_tokens=32768", "reward_model.max_new_tokens", "positions for 32,768 tokens",
        ),
        ("teachers.one=3", "teachers.one", "write {model: DIR}"),
        ("teachers.one.model=LANGUAGE", "teachers", "grpo has no teacher"),
        ("algorithm=opd teachers.one={model: LANGUAGE, wieght: 2}", "teachers.one", "wieght: "),
        ("algorithm=opd teachers.one={model: LANGUAGE, weight: 0}", "teachers.one", "weight: 0"),
        ("algorithm=opd teachers.one.model=LANGUAGE teacher.model=LANGUAGE", "teacher.model", "in `teachers`"),
        ("algorithm=opd teachers.one.model=LANGUAGE teacher.route=level", "teacher.route", "nothing to route"),
        ("algorithm=opd", "teacher.model", "name a saved model"),
        (f"{WHOLE} teacher.model=LANGUAGE algorithm.advantage=leave_one_out", "algorithm.advantage", "no advantage"),
        (f"{WHOLE} teacher.model=LANGUAGE teacher.tokenizer=LANGUAGE", "teacher.tokenizer", "opd"),
        (f"{WHOLE} teacher.server.url=http://a/v1", "teacher.server.url", "top_k"),
        (f"{WHOLE} teacher.model=LANGUAGE trainer.backend=megatron", "trainer.backend", "fsdp"),
        (f"{WHOLE} teachers.one.model=LANGUAGE teachers.two.model=LANGUAGE", "teacher.route", "name the column"),
        (
            "algorithm=opd algorithm.loss.name=divergence algorithm.loss.top_k=8 teacher.route=level "
            "teachers.one={server: {url: http://a/v1, dialect: echo}} teachers.two.model=LANGUAGE",
            "teachers.one.server.url", "dialect",
        ),
        ("algorithm=opd teachers.one={weight: 1}", "teachers.one", "either a `model` or a `server`"),
        ("algorithm=opd teacher.model=LANGUAGE teacher.server.url=http://a/v1", "teacher.server.url", "either this"),
        ("algorithm=opd teachers.one={server: {uri: x}}", "teachers.one", "uri"),
        ("teacher.server.url=http://a/v1", "teacher.server.url", "grpo has no teacher"),
        ("algorithm=opd teacher.server.url=localhost:8000", "teacher.server.url", "write http://HOST:PORT/v1"),
        ("algorithm=opd teachers.one={server: {url: ftp://a}}", "teachers.one", "server.url: it is no address"),
        ("reward_model.path=CLASSIFIER reward_model.chat=true", "reward_model.chat", "no chat template"),
        ("roles.judge.class=tests.own_roles.Index", "roles.judge", "a role of that name"),
        ("roles.one=tests.own_roles.Index", "roles.one", "write {class: "),
        ("roles.one={class: tests.own_roles.Index, host: 0}", "roles.one", "it has no host"),
        ("roles.one={class: tests.own_roles.Index, hosts: 0, devices: 0}", "roles.one", "hosts and devices"),
        ("roles.one={class: tests.own_roles.Indx}", "roles.one", "has no Indx"),
        ("roles.one={class: tests.own_roles.with_index}", "roles.one.class", "no actor"),
        ("roles.index={class: tests.own_roles.Index}", "roles.index.settings", "missing a required argument: 'top'"),
        (
            "roles.index={class: tests.own_roles.Index, settings: {top: 1, tpo: 2}}", "roles.index.settings",
            "unexpected keyword argument 'tpo'",
        ),
        (INDEX, "roles.index", "the flow grpo does not take it"),
        ("flow=tests.own_roles.with_index", "flow", "which there is not; a flow may take step, rollout"),
        ("roles.one={class: tests.own_roles.Index, devices: x}", "roles.one", "x"),
    ],
)  # fmt: skip
def test_a_mistake_is_told_by_its_key_before_anything_starts(saved, overrides, key, advice):
    for name, path in saved.items():
        overrides = overrides.replace(name, path)
    parts, depth = [""], 0
    for character in overrides:  # at spaces outside of braces
        depth += {"{": 1, "}": -1}.get(character, 0)
        if character == " " and not depth:
            parts.append("")
        else:
            parts[-1] += character
    assert advice in problems(*parts)[key]


def test_a_role_of_ones_own_is_placed_by_its_own_keys_and_held_for():
    config = load_config(None, [*OWN, INDEX, "roles.verifier.devices=1", "roles.verifier.memory_gb=0.5"], 2)
    prepared = prepare(config, 2)
    assert prepared.roles == ("rollout", "judge", "verifier", "index", "trainer")
    assert prepared.placed.seats["index"].hosts == (0,)
    assert prepared.placed.of_actors["verifier[0]"] == {1}
    assert "index[0]" not in prepared.placed.of_actors
    assert prepared.held["verifier"] == (500_000_000, 0)


def test_what_a_role_of_ones_own_holds_counts_in_the_devices_memory():
    given = [*OWN, INDEX, "roles.verifier.devices=0", "placement.device_memory_gb=1000"]

    def said(*more):
        with pytest.raises(ConfigError) as failed:
            prepare(load_config(None, [*given, *more], 1))
        return str(failed.value)

    prepare(load_config(None, [*given, "roles.verifier.memory_gb=900"], 1))
    told = said("roles.verifier.memory_gb=1500")
    assert "(1.5e+03 GB for the verifier)" in told
    assert "roles.verifier, or a" in told
    assert "roles.verifier.memory_gb = 1e+18: " in said("roles.verifier.memory_gb=1e18")


def test_a_reward_model_and_teachers_are_priced_by_their_own_shapes(saved):
    language, classifier = saved["LANGUAGE"], saved["CLASSIFIER"]
    one = prepare(
        load_config(
            None,
            [
                "algorithm=opd", f"teachers.a.model={language}", f"teachers.b.model={language}", "teachers.b.devices=1",
                f"reward_model.path={classifier}",
            ],
            2,
        ),
        2,
    )  # fmt: skip
    assert {"teacher_a", "teacher_b", "reward_model"} <= {*one.roles}
    assert one.placed.seats["teacher_b"].hosts == (1,)
    assert one.held["teacher_a"] == one.held["teacher_b"]
    assert one.held["reward_model"] != one.held["teacher_a"]
    assert all(one.held[role][0] > 0 for role in ("teacher_a", "reward_model"))


def test_a_reward_model_has_a_place_in_an_evaluation_too_where_there_is_no_trainer():
    kinds = [kind for kind in TEXT if kind.name in ("rollout", "judge", "reward_model")]
    placed = place(load_config(None).placement, kinds, 2)
    assert placed.seats["reward_model"].hosts == (0,)


def test_a_flow_that_takes_a_teacher_gets_several_as_one_also_in_a_rehearsal():
    asked = []

    class Named:
        def __init__(self, name):
            self.name = name

        def logprobs(self, groups):
            asked.append((self.name, groups))
            return f"{groups}>{self.name}"

    assert Teachers([Named("a"), Named("b")]).logprobs("groups") == "groups>a>b"
    assert asked == [("a", "groups"), ("b", "groups>a")]

    async def flow(step, rollout, judge, trainer, teacher, critic=None):
        groups = teacher.logprobs(judge.score.map(rollout.generate(step.prompts, n=1)))
        await trainer.train(groups)
        await rollout.load(trainer.weights())
        return {}

    both = with_teachers(flow, ["teacher_a", "teacher_b"])
    assert [*inspect.signature(both).parameters][-3:] == ["critic", "teacher_a", "teacher_b"]
    cast = trial(both, ["rollout", "judge", "trainer", "teacher_a", "teacher_b"])
    assert cast.demands["teacher_a"].items["logprobs"] == cast.demands["teacher_b"].items["logprobs"] > 0
    assert collected(["critic", "teacher_a", "teacher_b"]) == ["critic", "teacher"]


@pytest.mark.parametrize(
    ("overrides", "published"),
    [
        (("rollout.dtype=float32",), "float32"),
        (("rollout.dtype=bfloat16",), "bfloat16"),
        (("rollout.dtype=bfloat16", "reference.kind=ema", "algorithm.kl.beta=0.1"), "float32"),
    ],
)
def test_weights_leave_the_trainer_in_the_widest_dtype_of_those_who_take_them_over(overrides, published):
    prepared = prepare(load_config(None, overrides, 1), 1)
    assert trainer_settings(prepared.config, prepared.algorithm, sharding="shard").publishes == published


@pytest.mark.parametrize(
    ("overrides", "hosts", "shared"),
    [
        ((), 1, True),
        (("algorithm=ppo",), 1, True),
        (("rollout.dtype=bfloat16",), 1, False),
        (("trainer.dtype=bfloat16",), 1, False),
        (("flow=rlinf.flows.grpo_async",), 1, False),
        (("flow=benchmarks.grpo_ours.timed",), 1, True),
        (("flow=rlinf.flows.agentic",), 1, False),
        (("model.lora.r=4",), 1, False),
        ((), 2, False),
    ],
)
def test_the_rollout_computes_on_the_trainers_tensors_where_nobody_can_tell(overrides, hosts, shared):
    plan = prepare(load_config(None, ("placement.device_kind=cpu", *overrides), hosts), hosts)
    assert share_tensors(plan.config, plan.placed, plan.flow) is shared


@pytest.mark.parametrize(
    ("overrides", "steps"),
    [
        (("steps=6", "algorithm.epochs=2", "algorithm.minibatches=3"), 36),
        (("steps=6", "algorithm.epochs=2", "algorithm=ppo", "critic.head_start=2"), 8),
        (("steps=6", "critic.head_start=2"), 6),  # of no meaning without a critic
        (("steps=0",), 1),  # there is no step, and a schedule has one at least
        (("steps=1", "algorithm=ppo", "critic.head_start=4"), 1),
    ],
)
def test_a_schedule_lasts_as_many_optimizer_steps_as_the_policy_takes(overrides, steps):
    plan = prepare(load_config(None, overrides, 1), 1)
    assert trainer_settings(plan.config, plan.algorithm, sharding="shard").total_steps == steps


def test_the_rollout_answers_by_the_keys_of_the_run():
    overrides = ("rollout.top_k=5", "rollout.dtype=bfloat16", "staleness.kv=keep", "flow=rlinf.flows.grpo_async")
    settings = rollout_settings(load_config(None, overrides, 1))
    assert (settings.top_k, settings.dtype, settings.kv) == (5, "bfloat16", "keep")
