"""The official cookbook against a service: a recipe of its runs as it is."""

import json

import pytest

from benchmarks.cookbook import MODEL, PYTHON, SERVE, Recipe, run, write
from tests.service.serving import KEY, tiny

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not PYTHON.exists(), reason="the cookbook is not installed: make test-cookbook"),
]


@pytest.mark.timeout(300)
async def test_rl_loop_takes_three_steps_and_saves(tmp_path):
    where, log = tmp_path / "work", tmp_path / "log"
    write(where, 1)
    recipe = Recipe("rl_loop", "", "reward/total")
    words = ["batch_size=2", "group_size=2", "max_tokens=4", "loss_fn=importance_sampling", "lora_rank=2"]
    longer = [each for each in SERVE if not each.startswith("serve.port")]
    async with tiny(tmp_path, f"model.tokenizer={where / MODEL}", *longer) as url:
        rows = await run(recipe, [*words, "max_steps=3", "save_every=2"], where, log, url, KEY)
        assert [row["step"] for row in rows] == [0, 1, 2]
        saved = [json.loads(line) for line in (log / "checkpoints.jsonl").read_text().splitlines()]
        assert [each["name"] for each in saved] == ["000002", "final"]
        assert all(each["state_path"].startswith("tinker://") for each in saved)
