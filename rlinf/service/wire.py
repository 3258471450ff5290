"""The few protobuf messages of the API, by their public field numbers, and arrays in and out of them.

Clients send `forward_backward` as protobuf and take its result, and a sample's, as nothing else; all other calls are
JSON. In: bytes of a request. Out: data, a loss and its settings; of a result, the bytes that clients read.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from google.protobuf.message import DecodeError

from rlinf.data.sample import Datum

PROTOBUF = "application/x-protobuf"
"""Content type of these messages."""

_MESSAGES = {
    "Chunk": "1 encoded_text EncodedTextChunk; 2 image bytes; 3 dmel bytes",
    "EncodedTextChunk": "1 tokens bytes",
    "SparseCsr": "1 values bytes; 2 crow_indices bytes; 3 col_indices bytes",
    "Tensor": "1 dense bytes; 2 sparse_csr SparseCsr; 3 dtype int32; 4 shape int64*",
    "NamedTensor": "1 key string; 2 value Tensor",
    "Datum": "1 model_input Chunk*; 2 loss_fn_inputs NamedTensor*",
    "NamedNumber": "1 key string; 2 value double",
    "LossConfigValue": "1 number double; 2 text string",
    "NamedSetting": "1 key string; 2 value LossConfigValue",
    "ForwardBackwardRequest": "1 model_id string; 2 seq_id int32; 3 data Datum*; 4 loss_fn string; "
    "5 loss_fn_config NamedNumber*; 6 forward_only bool; 7 loss_fn_config_v2 NamedSetting*",
    "BatchedTensor": "1 data bytes; 2 offsets bytes; 3 dtype int32; 4 trailing_shape int64*",
    "NamedBatch": "1 key string; 2 value BatchedTensor",
    "ArrayRecord": "1 type_tag string; 2 fields NamedBatch*; 3 num_datums int64",
    "ForwardBackwardOutput": "1 loss_fn_output_type string; 2 loss_fn_outputs ArrayRecord*; 3 metrics NamedNumber*",
    "SampledSequence": "1 stop_reason int32; 2 tokens bytes; 3 logprobs bytes",
    "SampleResponse": "1 sequences SampledSequence*; 2 prompt_logprobs bytes",
}
"""Fields of each message: number, name and type; * for any number of them. A map is on the wire what a list of keys
with values is, and an enumeration what a whole number is."""
_FLOAT32, _INT64, _INT32 = 1, 2, 3
_DTYPES: Mapping[int, np.dtype[Any]] = {_FLOAT32: np.dtype("<f4"), _INT64: np.dtype("<i8"), _INT32: np.dtype("<i4")}
STOP_REASONS = {"stop": 0, "length": 1}


def _classes() -> Mapping[str, Any]:
    """The messages as classes."""
    field = descriptor_pb2.FieldDescriptorProto
    file = descriptor_pb2.FileDescriptorProto(name="training_service", package="rlinf", syntax="proto3")
    for name, fields in _MESSAGES.items():
        message = file.message_type.add(name=name)
        for each_field in fields.split("; "):
            number, label, kind = each_field.split(" ")
            plain = kind.removesuffix("*")
            repeated = field.LABEL_REPEATED if kind.endswith("*") else field.LABEL_OPTIONAL
            entry = message.field.add(name=label, number=int(number), label=repeated)
            if plain in _MESSAGES:
                entry.type, entry.type_name = field.TYPE_MESSAGE, f".rlinf.{plain}"
            else:
                entry.type = getattr(field, f"TYPE_{plain.upper()}")
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)  # type: ignore[attr-defined]
    return {name: message_factory.GetMessageClass(pool.FindMessageTypeByName(f"rlinf.{name}")) for name in _MESSAGES}


_CLASS = _classes()


@dataclass(frozen=True, slots=True)
class PassRequest:
    """A forward pass that was asked for, with or without its gradient."""

    model_id: str
    seq_id: int
    data: list[Datum]
    loss: str
    settings: dict[str, float | str]
    forward_only: bool


class BadPass(ValueError):
    """A forward pass that cannot be read.

    Args:
        message: why.
        model_id: of the model that was asked.
        seq_id: number of the request.
    """

    def __init__(self, message: str, model_id: str, seq_id: int) -> None:
        super().__init__(message)
        self.model_id, self.seq_id = model_id, seq_id


def read_pass(body: bytes) -> PassRequest:
    """Read a `ForwardBackwardRequest`.

    Raises:
        BadPass: it has something in it that is not text.
        ValueError: it is none.
    """
    message = _CLASS["ForwardBackwardRequest"]()
    try:
        message.ParseFromString(body)
    except DecodeError as error:
        raise ValueError(f"the body is no ForwardBackwardRequest: {error}") from None
    settings: dict[str, float | str] = {each.key: each.value for each in message.loss_fn_config}
    for each in message.loss_fn_config_v2:
        settings[each.key] = each.value.text or each.value.number
    data = []
    for number, each in enumerate(message.data):
        try:
            data.append(_datum(each))
        except ValueError as error:
            raise BadPass(f"datum {number}: {error}", message.model_id, message.seq_id) from None
    return PassRequest(message.model_id, message.seq_id, data, message.loss_fn, settings, message.forward_only)


def _datum(message: Any) -> Datum:
    parts = []
    for chunk in message.model_input:
        if chunk.image or chunk.dmel:
            raise ValueError("model_input has a chunk that is not encoded_text, which this service does not read")
        parts.append(_array(chunk.encoded_text.tokens, _INT32, "model_input"))
    tokens = np.concatenate([*parts, np.zeros(0, np.int32)]).astype(np.int64)
    inputs = {each.key: _tensor(each.value, each.key) for each in message.loss_fn_inputs}
    if "target_tokens" not in inputs:
        raise ValueError("target_tokens is missing, which every loss needs")
    targets = inputs.pop("target_tokens")
    if targets.dtype.kind != "i":
        raise ValueError("target_tokens must be whole numbers")
    return Datum(tokens, targets.astype(np.int64), {key: value.astype(np.float32) for key, value in inputs.items()})


def _tensor(message: Any, name: str) -> np.ndarray:
    if message.sparse_csr.crow_indices:
        raise ValueError(f"{name} is a sparse tensor, which this service does not read")
    values = _array(message.dense, message.dtype, name)
    shape = tuple(message.shape)
    if shape and int(np.prod(shape)) != len(values):
        raise ValueError(f"{name} has {len(values)} values, and its shape is {list(shape)}")
    return values.reshape(shape) if shape else values


def _array(data: bytes, dtype: int, name: str) -> np.ndarray:
    if dtype not in _DTYPES or len(data) % _DTYPES[dtype].itemsize:
        raise ValueError(f"{name} has {len(data)} bytes of dtype {dtype}, which are no array")
    return np.frombuffer(data, _DTYPES[dtype]).copy()


def pass_result(logprobs: Sequence[np.ndarray], metrics: Mapping[str, float]) -> bytes:
    """Write a `ForwardBackwardOutput`.

    Args:
        logprobs: of each datum.
        metrics: by the names that clients merge by, such as `loss:sum`.
    """
    ends = np.cumsum([0, *(each.nbytes for each in logprobs)], dtype="<i8")
    data = b"".join(each.astype("<f4").tobytes() for each in logprobs)
    batch = {"data": data, "offsets": ends.tobytes(), "dtype": _FLOAT32}
    record = {"type_tag": "ArrayRecord", "fields": [{"key": "logprobs", "value": batch}], "num_datums": len(logprobs)}
    numbers = [{"key": key, "value": value} for key, value in metrics.items()]
    return written(
        "ForwardBackwardOutput", loss_fn_output_type="ArrayRecord", loss_fn_outputs=[record], metrics=numbers
    )


def sample_result(
    answers: Iterable[tuple[str, np.ndarray, np.ndarray]], prompt_logprobs: np.ndarray | None = None
) -> bytes:
    """Write a `SampleResponse`.

    Args:
        answers: why each ended, see `STOP_REASONS`; its tokens, and their log-probs.
        prompt_logprobs: of each token of the prompt, NaN where there is none.
    """
    sequences = [
        {
            "stop_reason": STOP_REASONS[reason],
            "tokens": tokens.astype("<i4").tobytes(),
            "logprobs": logprobs.astype("<f4").tobytes(),
        }
        for reason, tokens, logprobs in answers
    ]
    prompt = {} if prompt_logprobs is None else {"prompt_logprobs": prompt_logprobs.astype("<f4").tobytes()}
    return written("SampleResponse", sequences=sequences, **prompt)


def written(name: str, **fields: Any) -> bytes:
    """Write a message of that name."""
    message: bytes = _CLASS[name](**fields).SerializeToString()
    return message
