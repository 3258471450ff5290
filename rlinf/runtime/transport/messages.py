"""What goes over the wire: kinds of messages, the flags and outcomes in them, frames of them, and frames as bytes.

Flows in: frames from a `Link`. Flows out: bytes, and tensors beside them where the transport has a way of its own for
these. Nobody is woken.

Messages are tuples whose first entry is their kind:
    (CALL, number, actor, method, payload, flags, name, parent, gang)    a reply is expected
    (REPLY, number, outcome, payload)
    (CAST, actor, method, args)                                          no reply; the runtime's own, plain data only
    (CANCEL, number)
    (DROP, key)                                                          a value that was kept is needed no more
    (FREE, slots)                                                        of shared memory; below 0: CUDA handles
"""

from __future__ import annotations

import io
import pickle
from dataclasses import dataclass
from typing import Any

import torch

from rlinf.runtime.base.tensor_bytes import flat_bytes

CALL, REPLY, CAST, CANCEL, DROP, FREE = range(6)

WANT, KEEP = 1, 2
"""Flags of a call: send the value with the reply; keep it for whoever fetches it."""

OK, ERROR, HELD, CANCELLED = range(4)
"""How a call ended: with a value, an error, a value that is kept where it was made, or cancelled."""

Message = tuple[Any, ...]
Packed = tuple[bytes, list[torch.Tensor]]
"""A frame pickled, with its tensors beside it."""


@dataclass(slots=True)
class Frame:
    """An ordered batch of messages between two hosts."""

    sequence: int
    """Position among all frames from this sender to this receiver, counted from 0."""
    messages: list[Message]


def pack(frame: Frame) -> Packed:
    """A frame as bytes, with the tensors of its payloads beside them, unread."""
    content = (frame.sequence, frame.messages)
    if not carries_tensors(frame.messages):
        return pickle.dumps(content, 5), []
    file = io.BytesIO()
    splitter = _TensorSplitter(file)
    splitter.dump(content)
    return file.getvalue(), splitter.tensors


def unpack(data: bytes, tensors: list[torch.Tensor]) -> Frame:
    """The frame that was packed."""
    return Frame(*(_TensorJoiner(io.BytesIO(data), tensors).load() if tensors else pickle.loads(data)))


def to_bytes(frame: Frame) -> bytes:
    """A frame as bytes alone, tensors included, for a transport that moves nothing else."""
    data, tensors = pack(frame)
    if not tensors:
        return data
    plain = [(flat_bytes(tensor.cpu()).numpy().tobytes(), tensor.dtype, tuple(tensor.shape)) for tensor in tensors]
    return pickle.dumps((data, plain), 5)


def from_bytes(data: bytes) -> Frame:
    """The frame that `to_bytes` made these of."""
    first, rest = pickle.loads(data)
    if type(first) is int:
        return Frame(first, rest)
    return unpack(first, [_tensor(*plain) for plain in rest])


def _tensor(raw: bytes, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    return torch.frombuffer(bytearray(raw), dtype=dtype).reshape(shape) if raw else torch.empty(shape, dtype=dtype)


def carries_tensors(messages: list[Message]) -> bool:
    """Whether a payload (bytes, references, parts) among the messages' entries has tensors."""
    for message in messages:
        for part in message:
            is_payload = type(part) is tuple and len(part) == 3 and type(part[0]) is bytes
            if is_payload and any(map(_is_tensor, part[2])):
                return True
    return False


def _is_tensor(part: Any) -> bool:
    return isinstance(part, torch.Tensor) or isinstance(getattr(part, "tensor", None), torch.Tensor)


class _TensorSplitter(pickle.Pickler):
    """Pickles a frame; tensors in it are collected beside the bytes."""

    def __init__(self, file: io.BytesIO):
        super().__init__(file, protocol=5)
        self.tensors: list[torch.Tensor] = []

    def persistent_id(self, obj: Any) -> int | None:
        if isinstance(obj, torch.Tensor):
            self.tensors.append(obj)
            return len(self.tensors) - 1
        return None


class _TensorJoiner(pickle.Unpickler):
    def __init__(self, file: io.BytesIO, tensors: list[torch.Tensor]):
        super().__init__(file)
        self._tensors = tensors

    def persistent_load(self, pid: int) -> torch.Tensor:
        return self._tensors[pid]
