"""Whole runs that somebody watches and steers: they learn what they would have learned alone, bit for bit."""

from __future__ import annotations

import json
import socket

from tests.launching import QUICKSTART, TINY, equal, launch, start
from tests.runtime.programs.jobs import until


class Watcher:
    """Connects to a run as soon as it lives."""

    def __init__(self, directory):
        where = directory / "live.json"
        until(where.exists, "live.json", 100)
        self.about = json.loads(where.read_text())
        self.socket = socket.socket(socket.AF_UNIX)
        self.socket.connect(self.about["socket"])
        self.socket.settimeout(100)
        self.lines = self.socket.makefile("rb")
        self.kinds = set()

    def ask(self, what):
        self.socket.sendall(json.dumps({"do": what, "id": what}).encode() + b"\n")

    def answer(self, what):
        while True:
            heard = json.loads(self.lines.readline())
            self.kinds.add(heard["kind"])
            if heard["kind"] == "did" and heard["id"] == what:
                return heard["said"]

    def to_the_end(self):
        for line in self.lines:
            heard = json.loads(line)
            self.kinds.add(heard["kind"])
        self.socket.close()
        return heard


def arguments(tmp_path, name):
    return ("--config", QUICKSTART, *TINY, "steps=4", "checkpoint.every=0", f"name={name}", f"output_dir={tmp_path}")


def test_a_run_that_is_watched_paused_saved_evaluated_killed_and_gone_on_with_learns_the_same(tmp_path):
    launch(*arguments(tmp_path, "alone"))
    ranks = start(*arguments(tmp_path, "watched"))
    try:
        watcher = Watcher(tmp_path / "watched")
        watcher.ask("pause")  # still while it starts: it comes to the pause before the first step
        assert watcher.answer("pause") == "paused after step 0"
        for what, told in (("checkpoint", "saved after step 0: "), ("evaluate", "it was evaluated after step 0")):
            watcher.ask(what)
            assert watcher.answer(what).startswith(told)
    finally:
        ranks.end()
    ranks.codes()
    assert (tmp_path / "watched" / "live.json").exists(), "it had no time to remove it"

    ranks = start(*arguments(tmp_path, "watched"), "--resume", "auto")
    try:
        until(lambda: json.loads((tmp_path / "watched" / "live.json").read_text()) != watcher.about, "a new life", 100)
        watcher = Watcher(tmp_path / "watched")
        last = watcher.to_the_end()  # the pause was not remembered
        assert ranks.codes() == [0]
    finally:
        ranks.end()
    assert last == {"kind": "status", "status": "ended", "step": 4, "asked": []}
    assert {"roles", "status", "moment", "lanes"} <= watcher.kinds
    assert not (tmp_path / "watched" / "live.json").exists()
    equal(tmp_path / "alone", tmp_path / "watched")
    rows = [json.loads(line) for line in (tmp_path / "watched" / "samples.jsonl").read_text().splitlines()]
    told = [row["tokens"] for row in rows if "tokens" in row]
    assert len(told) == 2 * 4
    assert all("".join(tokens["texts"]).startswith(row["response"]) for tokens, row in _pairs(rows))


def _pairs(rows):
    return [(row["tokens"], row) for row in rows if "tokens" in row]
