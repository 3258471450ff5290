"""The configurations for real models load, fit their declared devices, and run with a tiny model in the real one's
place."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from transformers import AutoConfig

from rlinf.placement.seats import TEXT, place
from rlinf.runs.dry_run.footprint import complaints, fit
from rlinf.runs.dry_run.transformer import parameters_of
from rlinf.runs.rules import load_config
from tests.launching import launch, metrics_of
from tests.stand_in import save_model, save_problems

ROOT = Path(__file__).parents[2]
CONFIGS = sorted((ROOT / "configs" / "math").glob("*.yaml"))
AGENTS = ROOT / "configs" / "agents"
SEARCH_R1, RETOOL, DEEPCODER = (
    AGENTS / f"{name}.yaml" for name in ("search-r1-qwen2.5-3b", "retool-qwen3-4b", "deepcoder-qwen-1.5b")
)
SHAPES = {
    "1.5b": {"hidden_size": 1536, "intermediate_size": 8960, "num_hidden_layers": 28, "num_attention_heads": 12,
             "num_key_value_heads": 2, "vocab_size": 151936},
    "3b": {"hidden_size": 2048, "intermediate_size": 11008, "num_hidden_layers": 36, "num_attention_heads": 16,
           "num_key_value_heads": 2, "vocab_size": 151936},
    "4b": {"model_type": "qwen3", "hidden_size": 2560, "intermediate_size": 9728, "num_hidden_layers": 36,
           "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151936},
    "7b": {"hidden_size": 3584, "intermediate_size": 18944, "num_hidden_layers": 28, "num_attention_heads": 28,
           "num_key_value_heads": 4, "vocab_size": 152064, "tie_word_embeddings": False},
}  # fmt: skip
"""Of the models of Qwen2.5, and of Qwen3 for 4b, as their config.json files say."""
PARAMETERS = {"1.5b": 1.54e9, "3b": 3.09e9, "4b": 4.02e9, "7b": 7.62e9}
"""As their model cards say."""


def names(path: Path) -> str:
    return path.stem


@pytest.mark.parametrize("path", [*CONFIGS, SEARCH_R1, RETOOL, DEEPCODER], ids=names)
def test_a_real_scale_configuration_loads_for_one_node_and_fits_its_devices(path):
    config = load_config(path, hosts=8)
    (size,) = [size for size in SHAPES if f"-{size}" in path.stem]
    model = AutoConfig.for_model(**{"model_type": "qwen2", "tie_word_embeddings": True, **SHAPES[size]})
    assert 0.95 < parameters_of(model) / PARAMETERS[size] < 1.05
    kinds = [kind for kind in TEXT if kind.name in ("rollout", "judge", "trainer")]
    assert list(complaints(config, model, place(config.placement, kinds, 8))) == []
    config.placement.device_memory_gb = 4
    said = list(complaints(config, model, place(config.placement, kinds, 8)))
    assert any("for the trainer" in line and "more hosts in placement.trainer" in line for line in said)


@pytest.mark.parametrize("path", CONFIGS, ids=names)
def test_every_process_that_its_first_lines_start_has_a_role(path):
    (started,) = re.findall(r"torchrun --nproc-per-node (\d+)", path.read_text())
    config = load_config(path, hosts=int(started))
    (size,) = [size for size in SHAPES if f"-{size}" in path.stem]
    model = AutoConfig.for_model(**{"model_type": "qwen2", "tie_word_embeddings": True, **SHAPES[size]})
    roles = [kind for kind in TEXT if kind.name in ("rollout", "judge", "trainer")]
    found, problems = fit(config, model, place(config.placement, roles, int(started)), ())
    assert (problems, found.warnings) == ([], ())


@pytest.mark.slow
@pytest.mark.parametrize("path", CONFIGS, ids=names)
def test_a_real_scale_configuration_runs_with_a_tiny_model_in_its_place(path, tmp_path):
    """In one process, on what is here, and by our own engine."""
    config = load_config(path)
    model = save_model(tmp_path / "model")
    train = save_problems(tmp_path / "train.jsonl", **config.data.columns)
    held_out = save_problems(tmp_path / "test.jsonl", **{**config.data.columns, **config.evaluation.columns})
    launch(
        "--config", str(path), f"model.path={model}", f"data.train={train}", f"evaluation.data={held_out}",
        f"output_dir={tmp_path}", "steps=2", "algorithm.prompts_per_step=4", "algorithm.group_size=2",
        "algorithm.minibatches=2", "rollout.max_new_tokens=5", "rollout.max_tokens=4096", "evaluation.problems=4",
        "evaluation.samples=2", "evaluation.temperature=1.0", "evaluation.k=[1,2]", "evaluation.max_new_tokens=5",
        "reward.workers=1", "evaluation.split=test", "evaluation.named={}",
        "rollout.engine=transformers", "rollout.engine_args={}", "placement.device_kind=auto",
    )  # fmt: skip
    metrics = metrics_of(tmp_path / config.name)
    assert [line["step"] for line in metrics] == [1, 2]
    assert metrics[-1]["evaluation/failed"] == 0
    assert "evaluation/pass@2" in metrics[-1]


def save_questions(path: Path) -> Path:
    """Questions in the columns of PeterJinGo/nq_hotpotqa_train."""
    said = "Answer the given question, inside <answer> and </answer>. Question: who was number {}?\n"
    rows = [
        {
            "id": f"train_{number}", "question": f"who was number {number}?", "golden_answers": ["Ada", "Ada L."],
            "data_source": "nq", "prompt": [{"role": "user", "content": said.format(number)}],
            "ability": "fact-reasoning",
            "reward_model": {"style": "rule", "ground_truth": {"target": ["Ada", "Ada L."]}},
            "extra_info": {"index": number, "split": "train"},
        }
        for number in range(8)
    ]  # fmt: skip
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    return path


@pytest.mark.slow
def test_search_r1_runs_on_files_as_they_are_published(tmp_path):
    model = save_model(tmp_path / "model")
    train, held_out = save_questions(tmp_path / "train.parquet"), save_questions(tmp_path / "test.parquet")
    ran = launch(
        "--config", str(SEARCH_R1), f"model.path={model}", f"data.train={train}", f"evaluation.data={held_out}",
        f"output_dir={tmp_path}", "steps=2", "algorithm.prompts_per_step=4", "algorithm.group_size=2",
        "rollout.max_new_tokens=5", "rollout.max_tokens=8192", "evaluation.problems=4", "agent.args.turns=1",
    )  # fmt: skip
    assert "answer from reward_model.ground_truth.target" in ran.stdout
    metrics = metrics_of(tmp_path / "search-r1-qwen2.5-3b")
    assert [line["episodes"] for line in metrics] == [8, 8]
    assert all(line["episodes/failed"] == 0 and line["episodes/calls"] == 2 for line in metrics)
    samples = (tmp_path / "search-r1-qwen2.5-3b" / "samples.jsonl").read_text().splitlines()
    assert json.loads(samples[0])["answer"] == '["Ada", "Ada L."]'
