"""Bars of transformers, huggingface_hub and datasets are told as work of ours, and draw nothing themselves."""

from __future__ import annotations

import pytest
import torch

from rlinf.data.library_progress import fold_datasets, fold_transformers
from rlinf.data.tokenizer import character_tokenizer
from rlinf.models.language.build import build_model
from rlinf.runtime.base.progress import report_to
from tests.runtime.test_progress import Notes

TINY = {
    "model_type": "qwen2", "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1,
    "num_attention_heads": 1, "num_key_value_heads": 1,
}  # fmt: skip


@pytest.fixture
def hub_bars():
    from huggingface_hub.utils import tqdm

    fold_transformers()
    return tqdm


@pytest.fixture
def datasets_bars():
    from datasets.utils import tqdm

    fold_datasets()
    fold_datasets()  # a second time changes nothing
    return tqdm


def test_loading_a_model_tells_of_its_weights(tmp_path, capsys):
    tokenizer, notes = character_tokenizer("01"), Notes()
    build_model(TINY, tokenizer).save_pretrained(tmp_path)
    with report_to(notes):
        loaded = build_model(str(tmp_path), tokenizer)
    assert isinstance(loaded, torch.nn.Module)
    begins = next(told for told in notes.told if isinstance(told, tuple) and told[0] == "loading weights")
    total = begins[1]
    assert total > 10
    assert (total, None) in notes.told
    assert "broken" not in notes.told
    assert capsys.readouterr() == ("", "")


def test_a_download_tells_its_bytes_and_whether_it_is_whole(hub_bars, capsys):
    notes = Notes()
    with report_to(notes):
        with hub_bars(desc="model.safetensors", total=100, initial=40, unit="B", unit_scale=True) as bar:
            bar.update(60)
        with hub_bars(total=None, desc="Fetching", unit="it") as bar:
            bar.total = 3
            bar.update(1)
    assert notes.told == [
        ("model.safetensors", 100, "bytes"), (40, None), (100, 100), "done",
        ("fetching", None, ""), (0, None), (1, 3), "broken",
    ]  # fmt: skip
    assert capsys.readouterr() == ("", "")


def test_going_through_items_tells_of_each(datasets_bars, capsys):
    notes = Notes()
    with report_to(notes):
        assert list(datasets_bars(["a", "b"], desc="Generating train split", unit=" examples")) == ["a", "b"]
    assert notes.told == [
        ("generating train split", 2, "examples"), (0, None), (1, 2), (2, 2), "done",
    ]  # fmt: skip
    assert capsys.readouterr() == ("", "")


def test_without_a_listener_bars_say_nothing(hub_bars, datasets_bars, capsys):
    for bars in (hub_bars, datasets_bars):
        assert list(bars(range(3), desc="x")) == [0, 1, 2]
        with bars(total=2) as bar:
            bar.update()
    assert capsys.readouterr() == ("", "")
