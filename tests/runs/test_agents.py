"""The corpus of configs/agents/search-r1-tiny.yaml; that agents learn is in tests/examples."""

from __future__ import annotations

import json

from examples import search_r1
from tests.launching import ROOT


def test_the_corpus_is_what_the_example_makes():
    written = [json.loads(line)["text"] for line in (ROOT / "examples" / "facts.jsonl").read_text().splitlines()]
    assert written == [fact for _, fact, _, _ in search_r1.facts()]
