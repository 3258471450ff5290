"""Every key of the configuration says what becomes of it when a run goes on after it was changed."""

import pytest

from rlinf.config.embodied import EmbodiedConfig
from rlinf.config.schema import leaves
from rlinf.config.text import RunConfig
from rlinf.runs.resume import EMBODIED, TEXT, entry_of, on_resume

KINDS = {"text": (RunConfig, TEXT), "embodied": (EmbodiedConfig, EMBODIED)}


@pytest.mark.parametrize("kind", KINDS)
def test_every_key_has_a_class_and_every_class_a_key(kind):
    schema, table = KINDS[kind]
    entries = {leaf.key: entry_of(schema, leaf.key) for leaf in leaves(schema)}
    assert not [key for key, entry in entries.items() if entry is None], (
        "say in rlinf/runs/resume.py what becomes of it"
    )
    assert set(entries.values()) == set(table), "an entry without a key"


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_not_applied_says_why(kind):
    for key, resumed in KINDS[kind][1].items():
        assert bool(resumed.why) == (resumed.effect != "applied"), key


@pytest.mark.parametrize(
    ("key", "effect"),
    [
        ("optimizer.betas", "applied"),
        ("reward.args.strict", "applied"),
        ("model.config.hidden_size", "refused"),
        ("model.lora.alpha", "applied"),
        ("model.lora.r", "refused"),
        ("sft.lr", "ignored"),
        ("reference.model", "ignored"),
        ("a.key.of.an.earlier.version", "applied"),
    ],
)
def test_the_longest_entry_holds(key, effect):
    assert on_resume(RunConfig, key).effect == effect


def test_a_reference_that_is_kept_nowhere_is_read_from_the_new_place():
    assert on_resume(RunConfig, "reference.model", kept_reference=False).effect == "applied"
