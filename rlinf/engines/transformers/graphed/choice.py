"""Which way an engine decodes: by graphs on GPUs where model and machine allow it, in bands otherwise.

Flows in: the model, and what the user wants. Flows out: the rows, and a sentence that says which way and why.
"""

from __future__ import annotations

import importlib.util
from typing import Any, Literal, get_args

import numpy as np
import torch

from rlinf.engines.base import Request, Sampling
from rlinf.engines.transformers.banded_rows import BandedRows
from rlinf.engines.transformers.conversations import Reader
from rlinf.engines.transformers.decode_batch import Rows
from rlinf.engines.transformers.graphed.graphed_rows import GraphedRows
from rlinf.engines.transformers.graphed.paged_cache import PAGE
from rlinf.engines.transformers.graphed.recording import CudaRecorder, Recorder
from rlinf.engines.transformers.graphed.rehearsed import RehearsedRecorder
from rlinf.engines.transformers.llama_forward import LeanForward
from rlinf.engines.transformers.model_forward import ModelForward, tolerance
from rlinf.engines.transformers.slots import Slots

Graphs = Literal["auto", "off", "rehearse", False]
"""Whether steps are recorded as CUDA graphs: where that is possible, never, or by a stand-in on the CPU. YAML reads
`off` as False."""
_REHEARSED_PAGE = 16
"""Tokens of a page in a rehearsal: a few rows then have several."""


def unknown(graphs: Any) -> str | None:
    """Why this is no word for `Graphs`; None if it is one."""
    words = get_args(Graphs)
    return None if graphs in words else f"graphs={graphs!r} must be one of {', '.join(filter(None, words))}"


def rows_for(
    forward: ModelForward, max_rows: int, graphs: Graphs = "auto", max_tokens: int | None = None
) -> tuple[Rows, str]:
    """The rows of a decode batch, and which they are.

    Args:
        forward: the model.
        max_rows: answers in flight at a time.
        graphs: what the user wants.
        max_tokens: of keys and values that answers in flight may come to; None for no bound.

    Raises:
        ValueError: `graphs` is no such word, or the model cannot be rehearsed.
    """
    if (problem := unknown(graphs)) is not None:
        raise ValueError(f"rollout.engine_args: {problem}")
    if graphs == "rehearse":
        if not isinstance(forward, LeanForward) or forward.device.type != "cpu":
            raise ValueError("rollout.engine_args: graphs=rehearse needs a Llama-like model on the CPU")
        name = "recorded steps, rehearsed on the CPU"
        return _graphed(forward, RehearsedRecorder(), max_rows, _REHEARSED_PAGE, max_tokens, name)
    if graphs in ("off", False) or forward.device.type != "cuda":
        return BandedRows(forward), f"step by step on {forward.device.type}"
    if not isinstance(forward, LeanForward):
        return BandedRows(forward), "step by step: the model is not of the kind that is recorded"
    if importlib.util.find_spec("triton") is None:
        return BandedRows(forward), "step by step: Triton, whose kernels recorded steps need, is not installed"
    recorder = CudaRecorder(forward.device)
    return _graphed(forward, recorder, max_rows, PAGE, max_tokens, "recorded steps (CUDA graphs)")


def _graphed(
    forward: LeanForward, recorder: Recorder, max_rows: int, page: int, max_tokens: int | None, name: str
) -> tuple[Rows, str]:
    tried = GraphedRows(forward, recorder, 2, page)
    if (far := difference(forward, tried)) > 2 * tolerance(forward.dtype):  # of log-probs, which differ by two logits
        return BandedRows(forward), f"step by step: recorded steps are off by {far:.1%} of the largest logit"
    return GraphedRows(forward, recorder, max_rows, page, max_tokens), name


@torch.inference_mode()
def difference(forward: LeanForward, rows: GraphedRows) -> float:
    """How far log-probs of a recorded step are from those of texts that are read whole, as a share of the largest
    logit. The rows are empty again afterwards."""
    texts = [(np.arange(length) * 7919 + length) % forward.vocabulary for length in (9, 6)]
    records = Slots(len(texts), None)
    slots = records.open([Request(slot, text[:-1], Sampling(3), seed=slot) for slot, text in enumerate(texts)])
    records.lengths[slots], records.last[slots] = 1, [text[-1] for text in texts]
    readers = [Reader(text[:-1], text[:-1], [slot], None) for slot, text in zip(slots.tolist(), texts, strict=True)]
    for _ in rows.read(readers, records):
        pass
    rows.step(records)
    drawn = rows.settle()
    rows.park()
    assert drawn is not None
    whole = [forward.read(torch.from_numpy(text[None]).to(forward.device), None)[0] for text in texts]
    logits = torch.cat(whole).float().cpu()
    order = [drawn.slots.tolist().index(slot) for slot in slots.tolist()]
    expected = logits.log_softmax(-1).gather(1, torch.from_numpy(drawn.tokens[order])[:, None])[:, 0]
    return float((torch.from_numpy(drawn.logprobs[order]) - expected).abs().max() / logits.abs().max())
