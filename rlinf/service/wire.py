"""The few protobuf messages of the API, by their public field numbers, and arrays in and out of them.

Clients send `forward_backward` as protobuf and take its result, and a sample's, as nothing else; all other calls are
JSON. In: bytes of a request. Out: data, a loss and its settings; of a result, the bytes that clients read.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby, zip_longest
from typing import Any, NamedTuple

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
    "TopkLogprobs": "1 token_ids bytes; 2 logprobs bytes; 3 k uint32; 4 length uint32",
    "SampledSequence": "1 stop_reason int32; 2 tokens bytes; 3 logprobs bytes; 4 topk_sampled_logprobs TopkLogprobs",
    "SampleResponse": "1 sequences SampledSequence*; 2 prompt_logprobs bytes; 3 topk_prompt_logprobs TopkLogprobs; "
    "5 target_prompt_logprobs Tensor",
}
"""Fields of each message: number, name and type; * for any number of them. A map is on the wire what a list of keys
with values is, and an enumeration what a whole number is."""
_FLOAT32, _INT64, _INT32 = 1, 2, 3
_DTYPES: Mapping[int, np.dtype[Any]] = {_FLOAT32: np.dtype("<f4"), _INT64: np.dtype("<i8"), _INT32: np.dtype("<i4")}
MOST_TARGETS = 32
"""Targets at one position of a text: each costs a forward pass of its own."""
STOP_REASONS = {"stop": 0, "length": 1}
_NO_LOGPROB = -99999.0
"""Beside token 0: there is no likeliest token at a place."""


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

    data: list[Datum]
    loss: str
    settings: dict[str, float | str]
    forward_only: bool
    widths: list[int]
    """Of each datum that was sent, targets at a position: so many of `data` are made of it; 0: one, as a plain list."""

    @staticmethod
    def of(message: Any, longest: int | None) -> PassRequest:
        """Read a `ForwardBackwardRequest`.

        Args:
            message: the request.
            longest: tokens that the model has positions for.

        Raises:
            ValueError: it has something in it that is not text, or a text that is too long.
        """
        settings: dict[str, float | str] = {each.key: each.value for each in message.loss_fn_config}
        for each in message.loss_fn_config_v2:
            settings[each.key] = each.value.text or each.value.number
        data: list[Datum] = []
        widths = []
        for number, each in enumerate(message.data):
            try:
                datum = _datum(each, longest)
                widths.append(datum.targets.shape[1] if datum.targets.ndim == 2 else 0)
                data += _columns(datum, message.loss_fn)
            except ValueError as error:
                raise ValueError(f"datum {number}: {error}") from None
        return PassRequest(data, message.loss_fn, settings, message.forward_only, widths)


@dataclass(frozen=True, slots=True)
class Targets:
    """Tokens whose log-probs are asked for at positions of a prompt."""

    tokens: np.ndarray
    """int64 [tokens of the prompt - 1, targets]; -1: none."""
    places: tuple[np.ndarray, np.ndarray] | None
    """Row and column of each, where they came as a sparse tensor: so goes the answer."""

    @staticmethod
    def of(value: Mapping[str, Any], rows: int, vocabulary: int) -> Targets:
        """Read a tensor in JSON.

        Args:
            value: the tensor.
            rows: that it must have.
            vocabulary: tokens are below it.

        Raises:
            ValueError: it is none, or of another shape, or has other tokens.
        """
        try:
            data, shape = np.array(value["data"], np.int64), tuple(value["shape"])
            crow, places = value.get("sparse_crow_indices"), None
            if len(shape) != 2 or not rows or shape[0] != rows or not 1 <= shape[1] <= MOST_TARGETS:
                raise ValueError(f"its shape is {list(shape)} and must be [{rows}, 1 to {MOST_TARGETS}]")
            if crow is None:
                tokens = data.reshape(shape)
            else:
                places = _places(np.array(crow, np.int64), np.array(value["sparse_col_indices"], np.int64), shape)
                tokens = np.full(shape, -1)
                tokens[places] = data
        except (KeyError, TypeError, ValueError, IndexError, OverflowError) as error:
            raise ValueError(f"target_prompt_logprobs: {error}") from None
        if tokens.min() < -1 or tokens.max() >= vocabulary or tokens.max() < 0:
            raise ValueError(
                f"target_prompt_logprobs must name tokens, each from 0 to {vocabulary - 1}, or -1 for none"
            )
        return Targets(tokens, places)

    def answered(self, logprobs: np.ndarray) -> dict[str, Any]:
        """Fields of the `Tensor` with their log-probs, 0 where none was asked for."""
        values = np.where(self.tokens < 0, 0.0, logprobs).astype("<f4")
        about = {"dtype": _FLOAT32, "shape": list(values.shape)}
        if self.places is None:
            return {**about, "dense": values.tobytes()}
        rows, columns = self.places
        ends = np.searchsorted(rows, np.arange(len(values) + 1)).astype("<i8")
        csr = {"values": values[rows, columns].tobytes(), "crow_indices": ends.tobytes()}
        return {**about, "sparse_csr": {**csr, "col_indices": columns.astype("<i8").tobytes()}}


class Likeliest(NamedTuple):
    """The likeliest tokens at places of a text, the likeliest first."""

    tokens: np.ndarray
    """int64 [places, tokens]"""
    logprobs: np.ndarray
    """float32 [places, tokens]"""

    def behind(self, count: int) -> Likeliest:
        """These behind so many places at which there are none."""
        blank = ((count, 0), (0, 0))
        return Likeliest(np.pad(self.tokens, blank), np.pad(self.logprobs, blank, constant_values=_NO_LOGPROB))

    @staticmethod
    def listed(message: Any) -> list[list[tuple[int, float]] | None] | None:
        """Read a `TopkLogprobs`: of each place the tokens with their log-probs; None: there are none."""
        if not message.k:
            return None
        shape = message.length, message.k
        tokens = np.frombuffer(message.token_ids, "<i4").reshape(shape).tolist()
        logprobs = np.frombuffer(message.logprobs, "<f4").reshape(shape).tolist()
        places = zip(tokens, logprobs, strict=True)
        return [None if scores[0] == _NO_LOGPROB else [*zip(ids, scores, strict=True)] for ids, scores in places]

    def fields(self) -> dict[str, Any]:
        """Fields of the `TopkLogprobs`."""
        length, count = self.tokens.shape
        arrays = {"token_ids": self.tokens.astype("<i4").tobytes(), "logprobs": self.logprobs.astype("<f4").tobytes()}
        return {**arrays, "k": count, "length": length}


class Scores(NamedTuple):
    """Log-probs that are asked for beside answers."""

    prompt: np.ndarray | None = None
    """Of each token of the prompt, NaN where there is none."""
    of_targets: tuple[Targets, np.ndarray] | None = None
    """Tokens that were asked about at positions of the prompt, and their log-probs, [positions, targets]."""
    likeliest_of_prompt: Likeliest | None = None
    likeliest_of_answers: Sequence[Likeliest] = ()
    """Of each answer; none: they were not asked for."""


def _columns(datum: Datum, loss: str) -> list[Datum]:
    """The data of which one with several targets at each position, [tokens, targets], is the sum.

    Raises:
        ValueError: the loss is of one target at a position, or the shapes do not fit.
    """
    if datum.targets.ndim != 2:
        return [datum]
    if loss != "cross_entropy":
        raise ValueError(
            f"target_tokens has the shape {list(datum.targets.shape)}; several are for cross_entropy alone"
        )
    for name, value in datum.inputs.items():
        if value.shape != datum.targets.shape:
            shapes = f"{list(value.shape)} and must have that of target_tokens, {list(datum.targets.shape)}"
            raise ValueError(f"{name} has the shape {shapes}")
    if not 0 < datum.targets.shape[1] <= MOST_TARGETS:
        raise ValueError(f"target_tokens has {datum.targets.shape[1]} targets at a position, not 1 to {MOST_TARGETS}")
    return [
        Datum(datum.tokens, targets, {name: value[:, number] for name, value in datum.inputs.items()})
        for number, targets in enumerate(datum.targets.T)
    ]


def _datum(message: Any, longest: int | None) -> Datum:
    parts = []
    for chunk in message.model_input:
        if chunk.image or chunk.dmel:
            raise ValueError("model_input has a chunk that is not encoded_text, which this service does not read")
        parts.append(_array(chunk.encoded_text.tokens, _INT32, "model_input"))
    tokens = np.concatenate([*parts, np.zeros(0, np.int32)]).astype(np.int64)
    Datum.check_length(len(tokens), longest)  # before sparse numbers of so many take the memory of all
    inputs = {each.key: _tensor(each.value, each.key, len(tokens)) for each in message.loss_fn_inputs}
    if "target_tokens" not in inputs:
        raise ValueError("target_tokens is missing, which every loss needs")
    targets = inputs.pop("target_tokens")
    if targets.dtype.kind != "i":
        raise ValueError("target_tokens must be whole numbers")
    return Datum(tokens, targets.astype(np.int64), {key: value.astype(np.float32) for key, value in inputs.items()})


def _tensor(message: Any, name: str, tokens: int) -> np.ndarray:
    shape = tuple(message.shape)
    if message.HasField("sparse_csr"):
        return _dense(message, name, shape, tokens)
    values = _array(message.dense, message.dtype, name)
    if shape and int(np.prod(shape)) != len(values):
        raise ValueError(f"{name} has {len(values)} values, and its shape is {list(shape)}")
    return values.reshape(shape) if shape else values


def _dense(message: Any, name: str, shape: tuple[int, ...], tokens: int) -> np.ndarray:
    """Read a sparse `Tensor`, as clients send targets of several at a position and their weights: 0 where nothing is
    listed, which is a target that counts for nothing."""
    csr = message.sparse_csr
    values = _array(csr.values, message.dtype, name)
    rows, columns = _array(csr.crow_indices, _INT64, name), _array(csr.col_indices, _INT64, name)
    if len(shape) != 2 or shape[0] != tokens or not 1 <= shape[1] <= MOST_TARGETS:
        raise ValueError(f"{name} is sparse, of shape {list(shape)}, and must be of [{tokens}, 1 to {MOST_TARGETS}]")
    try:
        places = _places(rows, columns, shape)
        dense = np.zeros(shape, values.dtype)
        dense[places] = values
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from None
    return dense


def _places(crow: np.ndarray, columns: np.ndarray, shape: tuple[int, ...]) -> tuple[np.ndarray, np.ndarray]:
    """Row and column of each value of a sparse tensor in the form of compressed rows.

    Raises:
        ValueError: they are not places of the tensor.
    """
    counts = np.diff(crow)
    if len(crow) != shape[0] + 1 or crow[0] != 0 or (counts < 0).any() or crow[-1] != len(columns):
        raise ValueError(f"its crow_indices are not those of {shape[0]} rows with {len(columns)} values")
    if len(columns) and not 0 <= columns.min() <= columns.max() < shape[1]:
        raise ValueError(f"its col_indices must be from 0 to {shape[1] - 1}")
    return np.repeat(np.arange(shape[0]), counts), columns


def tensor(array: np.ndarray) -> dict[str, Any]:
    """Fields of the `Tensor` of an array, int64 or float32."""
    dtype = _INT64 if array.dtype.kind == "i" else _FLOAT32
    return {"dense": array.astype(_DTYPES[dtype]).tobytes(), "dtype": dtype, "shape": list(array.shape)}


def _array(data: bytes, dtype: int, name: str) -> np.ndarray:
    if dtype not in _DTYPES or len(data) % _DTYPES[dtype].itemsize:
        raise ValueError(f"{name} has {len(data)} bytes of dtype {dtype}, which are no array")
    return np.frombuffer(data, _DTYPES[dtype]).copy()


def pass_result(logprobs: Sequence[np.ndarray], metrics: Mapping[str, float], widths: Sequence[int]) -> bytes:
    """Write a `ForwardBackwardOutput`.

    Args:
        logprobs: of each of the data.
        metrics: by the names that clients merge by, such as `loss:sum`.
        widths: see `PassRequest`.
    """
    rest, records = iter(logprobs), []
    for width, alike in groupby(widths):  # a record is of arrays that are alike but for their length
        arrays = [np.stack([next(rest) for _ in range(max(1, width))], axis=1).astype("<f4") for _ in alike]
        ends = np.cumsum([0, *(each.nbytes for each in arrays)], dtype="<i8")
        batch = {"data": b"".join(each.tobytes() for each in arrays), "offsets": ends.tobytes(), "dtype": _FLOAT32}
        batch["trailing_shape"] = [width] if width else []
        fields = [{"key": "logprobs", "value": batch}]
        records.append({"type_tag": "ArrayRecord", "fields": fields, "num_datums": len(arrays)})
    numbers = [{"key": key, "value": value} for key, value in metrics.items()]
    return written("ForwardBackwardOutput", loss_fn_output_type="ArrayRecord", loss_fn_outputs=records, metrics=numbers)


def sample_result(answers: Iterable[tuple[str, np.ndarray, np.ndarray]], scores: Scores) -> bytes:
    """Write a `SampleResponse`.

    Args:
        answers: why each ended, see `STOP_REASONS`; its tokens, and their log-probs.
        scores: what else was asked.
    """
    sequences = [
        {
            "stop_reason": STOP_REASONS[reason],
            "tokens": tokens.astype("<i4").tobytes(),
            "logprobs": logprobs.astype("<f4").tobytes(),
            **({} if likeliest is None else {"topk_sampled_logprobs": likeliest.fields()}),
        }
        for (reason, tokens, logprobs), likeliest in zip_longest(answers, scores.likeliest_of_answers)
    ]
    prompt: dict[str, Any] = {}
    if scores.prompt is not None:
        prompt["prompt_logprobs"] = scores.prompt.astype("<f4").tobytes()
    if scores.of_targets is not None:
        prompt["target_prompt_logprobs"] = scores.of_targets[0].answered(scores.of_targets[1])
    if scores.likeliest_of_prompt is not None:
        prompt["topk_prompt_logprobs"] = scores.likeliest_of_prompt.fields()
    return written("SampleResponse", sequences=sequences, **prompt)


def pass_head(body: bytes | bytearray) -> Any:
    """A `ForwardBackwardRequest` of which the beginning is there, up to its number: clients write the model first.

    Raises:
        ValueError: it is none.
    """
    begins = 3 + int.from_bytes(body[1:2])  # behind tag, length and model, and the number's tag
    longer = next((place for place, byte in enumerate(body[begins : begins + 10]) if byte < 128), 0)
    return read("ForwardBackwardRequest", bytes(body[: begins + longer + 1]))


def read(name: str, body: bytes) -> Any:
    """Read a message of that name, with its fields as attributes.

    Raises:
        ValueError: it is none.
    """
    try:
        return _CLASS[name].FromString(body)
    except DecodeError as error:
        raise ValueError(f"the body is no {name}: {error}") from None


def written(name: str, **fields: Any) -> bytes:
    """Write a message of that name."""
    message: bytes = _CLASS[name](**fields).SerializeToString()
    return message
