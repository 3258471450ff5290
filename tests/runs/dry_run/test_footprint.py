"""What roles take on their devices, held against what torch allocates; and what is said of what does not fit."""

import copy
from dataclasses import replace

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, DynamicCache

from rlinf.config.learning import LearningSettings
from rlinf.data.packing import Row, pack
from rlinf.models.language.policy_model import PolicyModel
from rlinf.models.offload import bytes_of
from rlinf.placement.seats import TEXT, place
from rlinf.runs.dry_run.footprint import complaints, footprints, spread_of
from rlinf.runs.dry_run.transformer import Shape, working_copy
from rlinf.runs.rules import load_config
from rlinf.training.muon import Muon, hidden_matrices
from rlinf.training.weight_sync import publishing_bytes

SHAPE = {
    "model_type": "qwen2", "hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "intermediate_size": 48, "vocab_size": 64, "tie_word_embeddings": False,
}  # fmt: skip
MODEL = AutoConfig.for_model(**SHAPE)
ALL = ("critic", "reference", "teacher")
MODEL_BYTES = 2 * Shape.of(MODEL).parameters
"""In bfloat16."""
TOKENS = 96
MODEL_IN_HALF = copy.deepcopy(MODEL)
MODEL_IN_HALF.dtype = torch.bfloat16


def configured(*overrides, hosts=1):
    return load_config("configs/quickstart.yaml", [f"trainer.micro_batch_tokens={TOKENS}", *overrides], hosts)


def seats(ranks=1):
    return {role: [frozenset({rank}) for rank in range(ranks)] for role in ("rollout", "judge", "trainer", *ALL)}


def taken(*overrides, ranks=1):
    return footprints(configured(*overrides), MODEL, seats(ranks), ALL)


def footprint_of(config):
    return footprints(config, MODEL, seats(), ALL)["trainer"]


def placed(config, hosts=1, roles=()):
    return place(
        config.placement, [kind for kind in TEXT if kind.name in ("rollout", "judge", "trainer", *roles)], hosts
    )


@pytest.fixture(scope="module")
def learning():
    """A model that has taken a step, and what it kept for its gradient on the way."""
    torch.manual_seed(0)
    policy = PolicyModel(AutoModelForCausalLM.from_config(AutoConfig.for_model(**SHAPE)), chunk=1024)
    policy.settle()
    optimizer = torch.optim.AdamW(policy.parameters())
    ids = torch.arange(24).numpy()
    rows = [Row(ids[:8] + first, ids[8:]) for first in range(TOKENS // 24)]  # none begins as another
    kept = {}

    def keep(tensor):
        kept[tensor.untyped_storage()._cdata] = tensor.untyped_storage()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        logprobs, _ = policy(pack(rows))
    weights = {parameter.untyped_storage()._cdata for parameter in policy.parameters()}
    activations = sum(storage.nbytes() for key, storage in kept.items() if key not in weights)
    logprobs.sum().backward()
    gradients = bytes_of([parameter.grad for parameter in policy.parameters()])
    optimizer.step()
    return policy, gradients, optimizer, activations


def test_weights_gradients_and_optimizer_are_those_that_torch_allocates(learning):
    policy, gradients, optimizer, _ = learning
    trainer = taken()["trainer"]
    assert trainer.weights == bytes_of(policy.parameters())
    assert trainer.gradients == gradients
    means = [state[name] for state in optimizer.state.values() for name in ("exp_avg", "exp_avg_sq")]
    assert trainer.optimizer == bytes_of(means)
    assert (trainer.gathered, trainer.parked_bytes) == (0, 0)


def test_muon_keeps_one_mean_of_hidden_matrices(learning):
    policy, *_ = learning
    optimizer = Muon(list(policy.parameters()), hidden_matrices(policy.model), LearningSettings(kind="muon"))
    for each in policy.parameters():
        each.grad = torch.ones_like(each)
    optimizer.step()
    means = [each for state in optimizer.state.values() for each in state.values() if each.dim()]
    vectors = bytes_of([each for each in policy.parameters() if each.dim() == 1])  # of which two are kept
    assert taken("optimizer.kind=muon")["trainer"].optimizer == bytes_of(means) - vectors


def test_activations_are_a_little_less_than_what_is_kept_for_the_gradient(learning):
    *_, kept = learning
    logits = 2 * TOKENS * MODEL.vocab_size * 4
    estimate = taken()["trainer"].activations - logits
    assert 0.4 * kept < estimate < kept


def test_keys_and_values_are_those_of_a_cache():
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**SHAPE))
    cache = DynamicCache()
    model(torch.zeros(5, 8, dtype=torch.long), past_key_values=cache)
    keys = bytes_of([tensor for layer in cache.layers for tensor in (layer.keys, layer.values)])
    assert taken("rollout.max_tokens=40")["rollout"].cache == keys
    assert taken("rollout.max_tokens=40", "rollout.dtype=bfloat16")["rollout"].cache == keys / 2


def test_ranks_share_what_learns_and_each_has_the_whole_of_what_does_not():
    one, four = taken(), taken(ranks=4)
    for role in ("trainer", "critic"):
        for part in ("weights", "gradients", "optimizer"):
            assert getattr(four[role], part) == getattr(one[role], part) / 4
        assert four[role].activations == one[role].activations
        assert four[role].gathered > 0
    for role in ("reference", "teacher", "rollout"):
        assert four[role] == one[role]


def test_settings_that_save_memory_are_seen_to():
    plain = taken()
    assert "judge" not in plain
    assert taken("trainer.gradient_checkpointing=true")["trainer"].activations < plain["trainer"].activations / 1.5
    assert taken("model.lora.r=4")["trainer"].active_bytes < plain["trainer"].active_bytes / 1.5
    adapted = configured("model.lora.r=4", "trainer.dtype=bfloat16")
    saved = replace(adapted, model=replace(adapted.model, path="directory"))
    narrow = footprints(saved, MODEL_IN_HALF, seats(), ALL)["trainer"]  # a frozen base is kept as it was saved
    assert narrow.weights + narrow.gathered == (footprint_of(saved).weights + footprint_of(saved).gathered) / 3
    assert taken("reference.dtype=bfloat16")["reference"].weights == plain["reference"].weights / 2
    assert (
        taken("reference.dtype=bfloat16", "reference.kind=ema")["reference"].weights == plain["reference"].weights * 1.5
    )
    head = 4 * MODEL.vocab_size * MODEL.hidden_size
    assert plain["critic"].weights == plain["trainer"].weights - head  # it predicts one number, not a token


def test_ranks_that_compute_a_micro_batch_together_keep_a_part_of_its_activations_each():
    alone, together = (taken(*keys, ranks=2)["trainer"] for keys in ((), ("trainer.parallel.context=2",)))
    assert together.activations == alone.activations / 2
    assert (together.weights, together.gathered) == (alone.weights, alone.gathered)
    assert taken("trainer.parallel.context=2", ranks=2)["reference"] == taken(ranks=2)["reference"], "it is never split"


def test_on_gpus_new_weights_lie_beside_the_old_ones_where_they_come_from_another():
    cuda = ("placement.device_kind=cuda", "rollout.dtype=bfloat16")
    roles = {"trainer": [frozenset({0})], "rollout": [frozenset({0}), frozenset({1})]}
    config = configured(*cuda)
    here = footprints(config, MODEL, roles)["rollout"]
    apart = footprints(config, MODEL, {**roles, "rollout": roles["rollout"][1:]})["rollout"]
    assert apart.active_bytes - here.active_bytes == here.weights == MODEL_BYTES
    assert apart.least_bytes == here.least_bytes  # through host memory it goes without
    on_cpus = {**roles, "rollout": roles["rollout"][1:]}
    assert footprints(configured(), MODEL, on_cpus)["rollout"] == footprints(configured(), MODEL, roles)["rollout"]


def test_what_publishing_takes_counts_where_it_is_more_than_a_step_takes():
    def most(*overrides, ranks):
        trainer = taken("placement.device_kind=cuda", *overrides, ranks=ranks)["trainer"]
        return trainer.active_bytes - trainer.weights - trainer.gradients - trainer.optimizer

    for ranks in (1, 4):
        pieces = publishing_bytes(0, on_device=False, ranks=ranks)
        pieces += MODEL_BYTES if ranks == 1 else 0  # a whole copy has its weights in bfloat16 too
        assert most(ranks=ranks) == pieces  # a step of so small a model takes less
        shape = Shape.of(MODEL)
        lora = most("model.lora.r=4", ranks=ranks) - pieces
        assert lora > 2 * 4 * shape.hidden * shape.inner / ranks  # a merged weight, and what merges it


def test_a_whole_copy_has_its_weights_in_bfloat16_beside_it_unless_only_without_them_it_fits():
    half = "trainer.dtype=bfloat16"
    assert taken(half)["trainer"].gathered == MODEL_BYTES
    assert 0 < taken(half, "trainer.working_copy=false")["trainer"].gathered < MODEL_BYTES
    assert taken("trainer.working_copy=false", "trainer.dtype=float32")["trainer"].gathered == 0
    cuda = ("placement.device_kind=cuda", "trainer.gradient_checkpointing=true", half)
    less, more = (taken(*cuda, f"trainer.working_copy={each}")["trainer"].least_bytes for each in ("false", "true"))

    def chosen(room):
        return working_copy(configured(*cuda), lambda one: footprint_of(one).least_bytes <= room)

    found, why = chosen(more)
    assert (found.trainer.working_copy, why) == (True, "")
    found, why = chosen(less)
    assert found.trainer.working_copy is False
    assert why.startswith("trainer.working_copy=false")


# What does not fit ---------------------------------------------------------------------------------------------------


def test_roles_that_take_turns_need_not_fit_side_by_side():
    sizes = {role: size.active_bytes for role, size in taken().items()}
    config = configured(f"placement.device_memory_gb={1.001 * max(sizes.values()) / 1e9}")
    where = placed(config, roles=ALL)
    assert list(complaints(config, MODEL, where, ALL)) == []
    (said,) = complaints(config, MODEL, replace(where, turns=False), ALL)
    assert f"at least {sum(sizes.values()) / 1e9:.3g} GB" in said


def test_every_role_that_cannot_fit_is_named_with_its_hosts_and_what_would_help():
    big = AutoConfig.for_model(**{**SHAPE, "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 8})
    config = configured("placement.device_memory_gb=1.5", "placement.trainer=0-1", "placement.rollout=1", hosts=2)
    trainer, rollout = complaints(config, big, placed(config, 2))
    assert trainer.startswith("hosts 0, 1 ")
    assert "for the trainer" in trainer
    assert "placement.trainer" in trainer
    assert "model.lora.r=16" in trainer
    assert rollout.startswith("host 1 ")
    assert "for the rollout" in rollout
    assert "rollout.dtype=bfloat16" in rollout


def test_processes_of_one_role_are_on_their_device_together():
    one = taken()["rollout"].active_bytes
    config = configured(
        f"placement.device_memory_gb={1.5 * one / 1e9}", "placement.trainer=0", "placement.rollout=1:0-1", hosts=2
    )
    (said,) = [line for line in complaints(config, MODEL, placed(config, 2)) if "rollout" in line]
    assert said.startswith("host 1 ")
    assert f" {2 * one / 1e9:.3g} GB" in said


def test_nothing_is_said_where_the_memory_is_not_known():
    assert list(complaints(configured(), MODEL, placed(configured(), 1, ALL), ALL)) == []


def spread(*overrides, hosts=4, roles=()):
    """What is chosen for a trainer on all hosts."""
    ranks = f"0-{hosts - 1}" if hosts > 1 else "0"
    config = configured(f"placement.trainer={ranks}", f"placement.rollout={ranks}", *overrides, hosts=hosts)
    return spread_of(config, MODEL, placed(config, hosts, roles), roles)


def test_auto_copies_the_model_where_it_fits_and_slices_it_where_it_does_not(monkeypatch):
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")  # four hosts on two machines
    kept = footprints(configured(), MODEL, seats(4), (), {"trainer": 1})["trainer"].active_bytes
    per_machine = footprints(configured(), MODEL, seats(4), (), {"trainer": 2})["trainer"].active_bytes
    for memory, expected, slices in (
        (None, "replicate", 1),
        (kept / 0.7 * 1.01, "replicate", 1),
        (kept / 0.7 * 0.99, "hybrid", 2),
        (per_machine / 0.7 * 0.99, "shard", 4),
    ):
        limit = [] if memory is None else [f"placement.device_memory_gb={memory / 1e9:.9f}"]
        found = spread(*limit)
        assert (found.sharding, found.slices) == (expected, {"trainer": slices})
        assert f"sharding {expected}, which auto chose" in found.words


def test_a_sharding_that_is_asked_for_is_taken_or_refused(monkeypatch):
    assert spread("trainer.sharding=shard").sharding == "shard"
    assert spread(hosts=1).words is None
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    with pytest.raises(ValueError, match=r"hybrid.*\[2, 1\]"):
        spread("trainer.sharding=hybrid", hosts=3)
    assert spread(hosts=3, roles=("critic",)).slices == {"trainer": 1, "critic": 1}
