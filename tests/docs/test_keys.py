"""Keys of a configuration that pages name within a line are keys."""

import re
from pathlib import Path

import pytest

from rlinf.config.embodied import EmbodiedConfig
from rlinf.config.schema import leaves
from rlinf.config.text import RunConfig
from tests.docs.snippets import PAGES, ROOT, without_blocks

KEYS = frozenset(leaf.key for schema in (RunConfig, EmbodiedConfig) for leaf in leaves(schema))
SECTIONS = frozenset(key.partition(".")[0] for key in KEYS if "." in key)
NAMED = re.compile(r"`([a-z_]+(?:\.[a-z_0-9]+)+)(?:[=:][^`]*)?`")
FILE = re.compile(r"\.(json|jsonl|py|yaml|safetensors)$")
OTHERS = {"model.generate", "policy.decoder", "reward_model.ground_truth", "system.preemption.asked", "trainer.save"}
OTHERS |= {"task.answer", "task.id", "task.row", "task.text"}
"""What looks like a key, and is a method, an attribute or a column."""
OURS = [page for page in PAGES if page.stem != "coming-from"]  # those have the keys of others beside ours


def is_key(name: str) -> bool:
    """Whether it is a key, a section, or lies within a key that holds a mapping."""
    parts = name.split(".")
    within = any(".".join(parts[:count]) in KEYS for count in range(1, len(parts) + 1))
    return within or any(key.startswith(f"{name}.") for key in KEYS)


@pytest.mark.parametrize("page", OURS, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_keys_that_a_page_names_are_there(page: Path) -> None:
    named = set(NAMED.findall(without_blocks(page.read_text(encoding="utf-8")))) - OTHERS
    wrong = [name for name in named if name.partition(".")[0] in SECTIONS and not FILE.search(name)]
    assert [name for name in sorted(wrong) if not is_key(name)] == []
