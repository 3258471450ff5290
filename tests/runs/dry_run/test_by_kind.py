"""What keys become that are left to the kind of devices, with kinds that this machine need not have."""

import pytest

from rlinf.config.load import ConfigError, InputError
from rlinf.flows.grpo import grpo
from rlinf.placement.seats import TEXT, place
from rlinf.runs.dry_run import transformer
from rlinf.runs.dry_run.footprint import fit
from rlinf.runs.dry_run.transformer import by_kind, refuse_other_kind
from rlinf.runs.rules import load_config
from tests.runs.dry_run.tracked import qwen2

KEYS = ("trainer.dtype", "rollout.dtype", "reference.dtype", "trainer.micro_batch_tokens")


def configured(*overrides, kind="cuda", hosts=1):
    return load_config(None, [f"placement.device_kind={kind}", *overrides], hosts)


def fitted(config, model=None, hosts=1):
    placed = place(config.placement, [kind for kind in TEXT if kind.name in ("rollout", "judge", "trainer")], hosts)
    return fit(config, qwen2("1.5B") if model is None else model, placed, (), grpo)


def values(config):
    return [getattr(getattr(config, key.partition(".")[0]), key.partition(".")[2]) for key in KEYS]


def test_gpus_compute_in_bfloat16_on_large_micro_batches_and_cpus_as_they_always_did():
    assert values(by_kind(configured())[0]) == ["bfloat16", "bfloat16", "bfloat16", 16_384]
    assert values(by_kind(configured(kind="cpu"))[0]) == ["float32", "float32", "float32", 2048]


@pytest.mark.parametrize(
    ("products", "size", "overrides", "hosts", "dtype", "told"),
    [
        (["avx512_bf16"], "large", (), 2, "bfloat16", "avx512_bf16"),
        (["amx_bf16", "avx512_vnni"], "large", (), 2, "bfloat16", "amx_bf16"),
        (["avx512_vnni"], "large", (), 2, "float32", None),
        (["avx512_bf16"], "small", (), 2, "float32", None),
        (["avx512_bf16"], "large", (), 1, "float32", "own tensors"),
        (["avx512_bf16"], "large", ("model.lora.r=4",), 1, "float32", "precision that it trains in"),
        (["avx512_bf16"], "large", ("rollout.dtype=float32",), 2, "float32", None),
        (["avx512_bf16"], "large", ("rollout.weights=int8",), 2, "float32", None),
    ],
)
def test_a_cpu_generates_in_what_it_multiplies_fast_where_that_is_most_of_the_work(
    products, size, overrides, hosts, dtype, told, monkeypatch
):
    monkeypatch.setattr(transformer, "cpu_products", lambda: frozenset(products))
    monkeypatch.setattr(transformer, "_LARGE", {"large": 1e9, "small": 1e10}[size])
    found, problems = fitted(configured(*overrides, kind="cpu", hosts=hosts), hosts=hosts)
    assert not problems
    assert (found.config.rollout.dtype, found.config.trainer.dtype) == (dtype, "float32")
    lines = [line for line in found.warnings if line.startswith("rollout.dtype=")]
    assert len(lines) == (told is not None)
    assert told is None or told in lines[0]


@pytest.mark.parametrize(
    ("kind", "trainer", "rollout", "more", "warns"),
    [
        ("cpu", "bfloat16", "float32", (), True),
        ("cpu", "float32", "bfloat16", (), True),
        ("cuda", "bfloat16", "float32", (), True),
        ("cpu", "bfloat16", "bfloat16", (), False),
        ("cpu", "float32", "float32", (), False),
        ("cpu", "bfloat16", "float32", ("algorithm.correction={cap: 2}",), False),
        ("cpu", "bfloat16", "float32", ("algorithm.correction=null",), True),
        ("cpu", "bfloat16", "float32", ("rollout.weights=int8",), False),
    ],
)
def test_a_run_says_that_engine_and_trainer_compute_in_two_precisions_that_nothing_corrects_for(
    kind, trainer, rollout, more, warns
):
    keys = (f"trainer.dtype={trainer}", f"rollout.dtype={rollout}")
    found, _ = fitted(configured(*keys, *more, kind=kind))
    assert len([line for line in found.warnings if all(key in line for key in keys)]) == warns


def test_what_is_written_stays_and_deciding_twice_changes_nothing():
    chosen, became = by_kind(configured("trainer.dtype=float32", "trainer.micro_batch_tokens=512"))
    assert values(chosen) == ["float32", "bfloat16", "bfloat16", 512]
    assert "rollout.dtype=bfloat16" in became
    assert not any(line.startswith("trainer.") for line in became)
    assert by_kind(chosen) == (chosen, [])


def test_named_teachers_follow_too():
    chosen, _ = by_kind(configured("teachers.math.model=somewhere", "teachers.code={model: x, dtype: float32}"))
    assert [each.dtype for each in chosen.named_teachers.values()] == ["bfloat16", "float32"]


def test_the_kind_is_this_machines_unless_it_is_said(monkeypatch):
    monkeypatch.setattr(transformer.torch.cuda, "is_available", lambda: True)
    assert by_kind(configured(kind="auto"))[0].trainer.dtype == "bfloat16"
    assert by_kind(configured(kind="cpu"))[0].trainer.dtype == "float32"
    refuse_other_kind(configured(kind="auto").placement)
    with pytest.raises(InputError, match=r"placement\.device_kind = cpu"):
        refuse_other_kind(configured(kind="cpu").placement)


def test_a_run_does_not_start_on_devices_that_are_not_there(monkeypatch):
    monkeypatch.setattr(transformer.torch.cuda, "is_available", lambda: False)
    with pytest.raises(InputError, match="--dry-run alone"):
        refuse_other_kind(configured(kind="cuda").placement)


@pytest.mark.parametrize(
    ("overrides", "on", "why"),
    [
        (["placement.device_memory_gb=78"], True, "78 GB a device"),
        (["placement.device_memory_gb=138"], False, "138 GB a device"),
        (["placement.device_memory_gb=80", "trainer.micro_batch_tokens=8192"], False, "enough without"),
        ([], True, "memory is not known"),
    ],
)
def test_activations_are_computed_again_where_memory_needs_it(overrides, on, why):
    found, problems = fitted(configured(*overrides))
    assert problems == []
    assert found.config.trainer.gradient_checkpointing is on
    assert why in found.became[-1]


def test_on_a_cpu_they_never_are():
    found, _ = fitted(configured("placement.device_memory_gb=80", kind="cpu"))
    assert found.config.trainer.gradient_checkpointing is False


def test_what_is_refused_cannot_fit_and_what_may_not_fit_is_given_all_there_is():
    model = qwen2("1.5B")
    found, problems = fitted(configured("placement.device_memory_gb=25"), model)
    assert "at least" in problems[0].advice
    found, problems = fitted(configured("placement.device_memory_gb=29"), model)
    assert problems == []
    assert found.memory_by_role["trainer"][0] == 29_000_000_000
    assert "trainer may take 30.2 GB" in found.warnings[0]


def test_auto_is_a_word_and_no_other_is():
    with pytest.raises(ConfigError, match=r"auto.*false"):
        configured("trainer.gradient_checkpointing=sometimes")
