"""The directories in which authors publish policies: their tensors and small files, read and written back.

Such a directory has safetensors files (one, or several and their index) and small files beside them. A policy is read
from it, and written as a directory of the same form. `Policy.published_name` and its neighbours say how a policy's own
names and settings correspond to the authors'.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import safe_open
from torch import Tensor, nn

from rlinf.data.safetensors_io import make_room, sync_directory, write_tensors, write_text
from rlinf.runtime.base.progress import work

if TYPE_CHECKING:
    pass

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
"""File names of the weights, and of what says which file has which tensor."""
EXTRA = "extra.safetensors"
"""File beside them with what the authors' form has no place for, such as a value head."""
_NO_WEIGHTS = ("policy_preprocessor*", "policy_postprocessor*")
"""Files in which lerobot keeps statistics beside the weights."""
_SHARD_BYTES = 5_000_000_000
"""Default size of a weights file: what hubs and file systems take without trouble."""


def matches(name: str, patterns: Iterable[str]) -> bool:
    """True if a name fits one of some glob patterns, in which `*` stands for any characters, dots included."""
    return any(fnmatchcase(name, pattern) for pattern in patterns)


# Tensors in files -----------------------------------------------------------------------------------------------------


def tensor_files(directory: Path) -> dict[str, Path]:
    """The file of each tensor in a directory of safetensors files.

    Raises:
        FileNotFoundError: there is none, or the index names a file that is missing.
        ValueError: the index or a file is damaged.
    """
    index = directory / INDEX
    if index.is_file():
        try:
            names: dict[str, str] = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(f"{index} is damaged: {error}") from error
        if missing := sorted({file for file in names.values() if not (directory / file).is_file()}):
            raise FileNotFoundError(f"{directory} lacks {', '.join(missing)}, which its {INDEX} names")
        return {name: directory / file for name, file in names.items()}
    files: dict[str, Path] = {}
    for path in sorted(directory.glob("*.safetensors")):
        if path.name != EXTRA and not matches(path.name, _NO_WEIGHTS):
            files |= tensors_in(path)
    if not files:
        raise FileNotFoundError(f"{directory} holds no safetensors files")
    return files


def tensor_shapes(files: Mapping[str, Path]) -> dict[str, tuple[int, ...]]:
    """Shapes of tensors in files, without reading them."""
    shapes: dict[str, tuple[int, ...]] = {}
    for path in sorted(set(files.values())):
        with safe_open(path, framework="pt") as file:
            names = [name for name, where in files.items() if where == path]
            shapes |= {name: tuple(file.get_slice(name).get_shape()) for name in names}
    return shapes


def read_tensors(files: Mapping[str, Path]) -> Iterator[tuple[str, Tensor]]:
    """Names and tensors in files, one at a time.

    Raises:
        ValueError: a file is damaged, or lacks a tensor that it should have.
    """
    paths = sorted(set(files.values()))
    with work(f"loading {paths[0].parent if paths else 'nothing'}", len(files), "tensors") as loading:
        for path in paths:
            with _opened(path) as file:
                for name in sorted(name for name, where in files.items() if where == path):
                    try:
                        yield name, file.get_tensor(name)
                    except Exception as error:
                        raise ValueError(f"{path} has no {name} that can be read: {error}") from error
                    loading.advance()


def tensors_in(path: Path) -> dict[str, Path]:
    """Names of the tensors in one file, each with the file.

    Raises:
        FileNotFoundError: it is not there.
        ValueError: it is damaged.
    """
    if not path.is_file():
        raise FileNotFoundError(f"{path} is missing")
    with _opened(path) as file:
        return dict.fromkeys(file.keys(), path)


def _opened(path: Path) -> Any:
    try:
        return safe_open(path, framework="pt")
    except Exception as error:  # of files that may hold anything
        raise ValueError(f"{path} is no safetensors file: {error}") from error


def write_sharded(directory: Path, named: Mapping[str, Tensor], *, shard_bytes: int = _SHARD_BYTES) -> None:
    """Write tensors as `model.safetensors`, or as several files with an index where they are large.

    Args:
        directory: made if need be.
        named: in host memory.
        shard_bytes: bound on a file; a tensor that is larger has one of its own.

    Raises:
        OSError: it cannot be written; the text says what is missing.
    """
    parts: list[dict[str, Tensor]] = [{}]
    size = 0
    for name, tensor in named.items():
        if size + tensor.nbytes > shard_bytes and parts[-1]:
            parts.append({})
            size = 0
        parts[-1][name] = tensor
        size += tensor.nbytes
    make_room(directory, sum(tensor.nbytes for tensor in named.values()))
    stem, suffix = WEIGHTS.split(".")
    files = (
        [WEIGHTS]
        if len(parts) == 1
        else [f"{stem}-{number:05d}-of-{len(parts):05d}.{suffix}" for number in range(1, len(parts) + 1)]
    )
    for file, part in zip(files, parts, strict=True):
        write_tensors(directory / file, {name: each.contiguous() for name, each in part.items()}, {"format": "pt"})
    if len(parts) > 1:
        index = {
            "metadata": {"total_size": sum(tensor.nbytes for tensor in named.values())},
            "weight_map": {name: file for file, part in zip(files, parts, strict=True) for name in part},
        }
        write_text(directory / INDEX, json.dumps(index, indent=2, sort_keys=True))
    sync_directory(directory)


# Tensors into policies ------------------------------------------------------------------------------------------------

_reading = threading.local()
_register = nn.Module.register_parameter


@contextmanager
def _flag(name: str) -> Iterator[None]:
    """Set a flag of this thread in the block."""
    before = getattr(_reading, name, False)
    setattr(_reading, name, True)
    try:
        yield
    finally:
        setattr(_reading, name, before)


def without_memory() -> AbstractContextManager[None]:
    """Policies that are made in the block, in this thread, make the modules of `to_be_read` without memory."""
    return _flag("on")


@contextmanager
def to_be_read() -> Iterator[None]:
    """Modules made in the block get parameters without memory and without first values, where a directory is about to
    be read that has them all; buffers are made as always. Elsewhere it changes nothing.

        with to_be_read():
            self.language_model = LlamaForCausalLM(config)
        self.critic = perceptron(...)       # of our own, in no published file: has first values in any case
    """
    if not getattr(_reading, "on", False):
        yield
        return
    # installed once, and for good: it does nothing but in this block, and in this thread
    nn.Module.register_parameter = _registered  # type: ignore[assignment]
    with _flag("empty"):
        yield


def _registered(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
    if parameter is not None and getattr(_reading, "empty", False) and not parameter.is_meta:
        parameter = nn.Parameter(parameter.to("meta"), requires_grad=parameter.requires_grad)
    _register(module, name, parameter)


@torch.no_grad()
def fill(
    module: nn.Module,
    named: Iterable[tuple[str, Tensor]],
    *,
    where: str,
    optional: Sequence[str] = (),
    device: torch.device | None = None,
) -> None:
    """Give parameters and saved buffers their values, one at a time; those without memory get it here.

    Args:
        module: changed in place.
        named: values under the names of its state.
        where: they come from, for errors.
        optional: patterns of names that need not come.
        device: of those that have no memory yet; None: the host's memory.

    Raises:
        ValueError: a name is unknown, a shape is another, or something is missing.
    """
    state = module.state_dict(keep_vars=True)
    owners: dict[int, list[tuple[nn.Module, str]]] = {}
    for part in module.modules():
        for leaf, parameter in part.named_parameters(recurse=False):
            owners.setdefault(id(parameter), []).append((part, leaf))
    names: dict[int, str] = {id(tensor): name for name, tensor in state.items()}
    unfilled = {id(tensor) for name, tensor in state.items() if not matches(name, optional)}
    for name, value in named:
        target = state.get(name)
        if target is None:
            raise ValueError(f"{where} has {name}, which the policy has not: it is of another model, or version")
        if target.shape != value.shape:
            raise ValueError(f"{where}: {name} is {list(value.shape)} there, and {list(target.shape)} in the policy")
        unfilled.discard(id(target))
        if not target.is_meta:
            target.copy_(value)
            continue
        weight = nn.Parameter(
            value.to(device=device, dtype=target.dtype, copy=True), requires_grad=target.requires_grad
        )
        for part, leaf in owners[id(target)]:
            part._parameters[leaf] = weight
    if missing := sorted(names[each] for each in unfilled):
        raise ValueError(
            f"{where} lacks {', '.join(missing[:3])}{f' and {len(missing) - 3} more' if len(missing) > 3 else ''}, "
            "which the policy needs: it is of another model, or version"
        )
