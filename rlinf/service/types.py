"""Data and results by the names of the official client, for programs of `service.client`.

In: what a program writes. Out: bytes and JSON as `app` reads them; and results, of the bytes that it answers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rlinf.service import wire
from rlinf.training.optimizer import Adam as AdamParams

__all__ = ["AdamParams"]


class TensorData:
    """An array.

    Args:
        data: numbers, in any nesting.
        dtype: int64 or float32.
        shape: None: as they are nested.
    """

    def __init__(self, data: Any, dtype: str, shape: Sequence[int] | None = None) -> None:
        array = np.asarray(data, {"int64": np.int64, "float32": np.float32}[dtype])
        self._array, self.dtype = array if shape is None else array.reshape(shape), dtype

    @staticmethod
    def from_numpy(array: np.ndarray) -> TensorData:
        """Take an array over."""
        return TensorData(array, "float32" if array.dtype.kind == "f" else "int64")

    @staticmethod
    def from_torch(tensor: Tensor) -> TensorData:
        """Take a tensor over."""
        values = tensor.detach().cpu()
        return TensorData.from_numpy((values.float() if values.is_floating_point() else values).numpy())

    def to_numpy(self) -> np.ndarray:
        return self._array

    def to_torch(self) -> Tensor:
        return torch.from_numpy(self._array)

    def tolist(self) -> list[Any]:
        nested: list[Any] = self._array.tolist()
        return nested

    @property
    def data(self) -> list[Any]:
        """Its numbers, row after row."""
        flat: list[Any] = self._array.ravel().tolist()
        return flat

    @property
    def shape(self) -> list[int]:
        return list(self._array.shape)

    def json(self) -> dict[str, Any]:
        """Write it."""
        return {"data": self.data, "dtype": self.dtype, "shape": self.shape}


@dataclass(frozen=True, slots=True)
class EncodedTextChunk:
    """Tokens that follow one another."""

    tokens: Sequence[int]


@dataclass(frozen=True, slots=True)
class ModelInput:
    """A text."""

    chunks: Sequence[EncodedTextChunk] = ()

    @staticmethod
    def from_ints(tokens: Sequence[int]) -> ModelInput:
        """Make a text of tokens."""
        return ModelInput([EncodedTextChunk(list(tokens))])

    @staticmethod
    def empty() -> ModelInput:
        return ModelInput()

    def append(self, chunk: EncodedTextChunk) -> ModelInput:
        """The text with more behind it."""
        return ModelInput([*self.chunks, chunk])

    def append_int(self, token: int) -> ModelInput:
        """The text with a token behind it."""
        return self.append(EncodedTextChunk([token]))

    def to_ints(self) -> list[int]:
        """Its tokens."""
        return [int(token) for chunk in self.chunks for token in chunk.tokens]

    @property
    def length(self) -> int:
        """How many tokens it has."""
        return len(self.to_ints())


@dataclass(frozen=True, slots=True, eq=False)
class Datum:
    """A text to learn from, and numbers of each of its tokens: lists, arrays, tensors or `TensorData`."""

    model_input: ModelInput
    loss_fn_inputs: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        object.__setattr__(self, "loss_fn_inputs", {key: _tensor(it) for key, it in self.loss_fn_inputs.items()})

    def fields(self) -> dict[str, Any]:
        """Fields of the message `Datum`."""
        tokens = np.array(self.model_input.to_ints(), "<i4").tobytes()
        inputs = [{"key": key, "value": wire.tensor(it.to_numpy())} for key, it in self.loss_fn_inputs.items()]
        return {"model_input": [{"encoded_text": {"tokens": tokens}}], "loss_fn_inputs": inputs}


def _tensor(value: Any) -> TensorData:
    if isinstance(value, TensorData):
        return value
    return TensorData.from_torch(value) if isinstance(value, Tensor) else TensorData.from_numpy(np.asarray(value))


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """Settings of answers."""

    max_tokens: int | None = None
    seed: int | None = None
    stop: str | Sequence[str] | Sequence[int] | None = None
    """None: the model's own end."""
    temperature: float = 1.0
    top_k: int = -1
    top_p: float = 1.0

    def json(self) -> dict[str, Any]:
        """Write them."""
        return {key: value for key, value in asdict(self).items() if value is not None}


@dataclass(frozen=True, slots=True)
class ForwardBackwardOutput:
    """Result of a forward pass."""

    loss_fn_outputs: list[dict[str, TensorData]]
    """Of each datum its `logprobs`."""
    metrics: dict[str, float]
    loss_fn_output_type: str = "ArrayRecord"

    @staticmethod
    def of(body: bytes) -> ForwardBackwardOutput:
        """Read it."""
        message = wire.read("ForwardBackwardOutput", body)
        outputs = []
        for record in message.loss_fn_outputs:
            (logprobs,) = (each.value for each in record.fields)
            numbers, ends = np.frombuffer(logprobs.data, "<f4"), np.frombuffer(logprobs.offsets, "<i8")[1:-1] // 4
            arrays = (each.reshape(-1, *logprobs.trailing_shape).copy() for each in np.split(numbers, ends))
            outputs += [{"logprobs": TensorData.from_numpy(each)} for each in arrays]
        return ForwardBackwardOutput(outputs, {each.key: each.value for each in message.metrics})


@dataclass(frozen=True, slots=True)
class SampledSequence:
    """An answer."""

    tokens: list[int]
    logprobs: list[float]
    stop_reason: str
    """stop or length"""
    topk_logprobs: list[list[tuple[int, float]] | None] | None = None
    """Of each token the likeliest in its place, where they were asked for."""


@dataclass(frozen=True, slots=True)
class SampleResponse:
    """Answers, and what was asked of the prompt."""

    sequences: list[SampledSequence]
    prompt_logprobs: list[float | None] | None = None
    topk_prompt_logprobs: list[list[tuple[int, float]] | None] | None = None
    target_prompt_logprobs: TensorData | None = None

    @staticmethod
    def of(body: bytes) -> SampleResponse:
        """Read it."""
        message = wire.read("SampleResponse", body)
        reasons = {number: reason for reason, number in wire.STOP_REASONS.items()}
        sequences = [
            SampledSequence(
                np.frombuffer(each.tokens, "<i4").tolist(),
                np.frombuffer(each.logprobs, "<f4").tolist(),
                reasons[each.stop_reason],
                wire.Likeliest.listed(each.topk_sampled_logprobs),
            )
            for each in message.sequences
        ]
        logprobs = [None if np.isnan(each) else float(each) for each in np.frombuffer(message.prompt_logprobs, "<f4")]
        targets, dense = None, message.target_prompt_logprobs
        if dense.shape:
            targets = TensorData(np.frombuffer(dense.dense, "<f4").copy(), "float32", dense.shape)
        return SampleResponse(sequences, logprobs or None, wire.Likeliest.listed(message.topk_prompt_logprobs), targets)
