"""Low-rank adapters: put into a model by peft, and folded back into plain weights for everybody else.

A Hugging Face model gets small trainable matrices beside frozen ones, new or read from adapters saved in peft's format.
On publishing, names and tensors are those of the model before, the adapters added in. Readers of weights alone, as
engines and checkpoints are, never hear of adapters.

A model may have several: `POLICY` learns, and is what the model computes with; others stay as they were saved, and are
computed with when asked for (`using`). All share the base's weights.
"""

from __future__ import annotations

import json
import logging
import math
import re
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from rlinf.data.rng import ONE_AT_A_TIME, mix
from rlinf.data.safetensors_io import write_tensors
from rlinf.data.weights import Weights
from rlinf.models.language.four_bits import Nf4
from rlinf.runtime.base.errors import WrongSetting

POLICY = "default"
"""Name of the adapters that learn, as peft calls the first."""
ADAPTER_CONFIG, ADAPTER_WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
"""File names in a directory of peft's."""
_KEYS = {"r", "alpha", "target_modules", "path"}
_OF_THE_BASE = {"base"}
"""Keys of `model.lora` that say what is below the adapters."""
_SAVED_AS = "base_model.model."
"""Prefix that peft puts before the names of tensors in its files."""
_WRAPPED = ".base_layer"
"""Part that peft puts into the name of a weight that has an adapter."""
ROUTERS = {"gate", "router", "shared_expert_gate"}
"""Names of linear layers that choose experts: they change which weights learn at all, and get adapters only by name."""
_UNCALLED = {"dt_proj", "out_proj"}
"""Linear layers whose weight a Mamba block reads without calling them, so that an adapter would have no effect."""
_SCALED_NAME = re.compile(r"(.+)\.lora_([AB])\.weight")
"""Name of a scaled tensor: its layer, and which of the two it is."""
_SPECIAL = re.compile(r"[\\^$*+?\[\]()|{}]")
"""A name with one of these is a regular expression."""


@torch.no_grad()
def fold_saved(model: nn.Module, path: str) -> None:
    """Add saved adapters to a model's weights, and leave none behind.

    Args:
        model: plain, not on the meta device; changed in place.
        path: directory of peft's.

    Raises:
        ValueError: see `add_adapters`.
    """
    requires = {name for name, each in model.named_parameters() if each.requires_grad}
    add_adapters(model, {"path": path})
    for parameter, value in adapter_values(model, 0, {POLICY: path}):
        parameter.copy_(value)
    for name, layer in list(model.named_modules()):
        if hasattr(layer, "get_delta_weight") and hasattr(layer, "base_layer"):
            base = layer.base_layer
            base.weight.copy_(_merged(base.weight, layer))
            model.set_submodule(name, base)
    del model.peft_config
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name in requires)


def lora_targets(model: nn.Module, wanted: str | Sequence[str]) -> list[str]:
    """The linear layers of a model that get adapters.

    Args:
        model: with adapters or without; it may be on the meta device.
        wanted: any of "auto" (the linear layers of attention, whatever they are called; all of a model that has none),
            "all-linear" (all but the output embedding and the routers of experts), "all-but-attention" (the others of
            those), "unembed" (the output embedding), the name of a layer or the end of its dotted name ("q_proj",
            "mlp.down_proj"), or a regular expression that matches all of it.

    Returns:
        Their dotted names, in the model's order.

    Raises:
        ValueError: something of `wanted` fits no linear layer; the text lists those there are.
    """
    head: Any = model.get_output_embeddings() if isinstance(model, PreTrainedModel) else None
    head = getattr(head, "base_layer", head)
    kinds = {name: type(module).__name__ for name, module in model.named_modules()}
    uncalled = {f"{name}.{part}" for name, kind in kinds.items() if "Mamba" in kind for part in _UNCALLED}
    every = [
        (name.removesuffix(_WRAPPED), module)
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear | Conv1D) and not (name in uncalled or is_adapter(name))
    ]
    linear = [name for name, module in every if module is not head]
    heads = [name for name, module in every if module is head]
    inner = [name for name in linear if name.rpartition(".")[2] not in ROUTERS]
    attention = tuple(f"{name}." for name, kind in kinds.items() if "Attention" in kind)
    names: set[str] = set()
    for each in [wanted] if isinstance(wanted, str) else wanted:
        if each == "auto":
            more = [name for name in inner if name.startswith(attention)] or inner
        elif each == "all-linear":
            more = inner
        elif each == "unembed":
            more = heads
        elif each == "all-but-attention":
            more = [name for name in inner if not name.startswith(attention)]
        elif _SPECIAL.search(each):
            more = [name for name in linear if re.fullmatch(each, name)]
        else:
            more = [name for name in linear if f".{name}".endswith(f".{each}")]
        if not more:
            raise ValueError(_no_such_layer(model, each, linear))
        names.update(more)
    return [name for name, _ in every if name in names]


def _no_such_layer(model: nn.Module, wanted: str, linear: Sequence[str]) -> str:
    there = ", ".join(sorted({name.rpartition(".")[2] for name in linear})) or "none"
    advice = f"its linear layers are {there}; or take auto or all-linear"
    if any(wanted in name.split(".") for name, _ in model.named_parameters()):
        kind = (
            "are weights of grouped experts or of an input embedding, which get no adapters here, or of the output "
            "embedding, which is called unembed"
        )
    else:
        kind = "are no linear layers of this model"
    return f"lora: target_modules {wanted!r} {kind}; {advice}"


def add_adapters(model: nn.Module, lora: Mapping[str, Any], name: str = POLICY) -> None:
    """Freeze a model and give it adapters: W x becomes W x + (alpha / r) B A x (LoRA, arXiv:2106.09685, eq. 3).

    Args:
        model: of Hugging Face, or any other; changed in place; it may be on the meta device. The adapters' values are
            `adapter_values`' business.
        lora: `r` (rank), `alpha`, and `target_modules` as for `lora_targets`; or `path` of saved adapters, which say
            all that themselves.
        name: under which the adapters are known. Any but `POLICY` do not learn.

    Raises:
        ValueError: keys are missing or unknown, no module has such a name, peft is not installed, or saved adapters
            are of a kind that cannot be added in or do not fit the model; or those that learn are of an output
            embedding which is the input embedding, too, so that they could not be merged.
    """
    path = lora.get("path")
    if set(lora) - _KEYS - _OF_THE_BASE or (path is None and not set(lora) >= _KEYS - {"path"}):
        raise ValueError(f"lora: needs exactly the keys {sorted(_KEYS - {'path'})}, or path; got {sorted(lora)}")
    logging.getLogger("bitsandbytes.backends.cpu.ops").setLevel(logging.ERROR)  # which peft imports
    try:
        from peft import inject_adapter_in_model  # takes seconds to import, and few runs need it
    except ModuleNotFoundError:
        raise WrongSetting("lora: peft is not installed; pip install 'rlinf[lora]'") from None
    config = _fresh(model, lora) if path is None else _saved(Path(path))
    before = vars(model).pop("peft_config", {})  # peft warns of it
    warnings.filterwarnings("ignore", "Model has `tie_word_embeddings=True`")  # its merging; ours refuses
    with ONE_AT_A_TIME, _out_of_sight(model):  # peft's layers draw their first values, though others are given to them
        inject_adapter_in_model(config, model, adapter_name=name)
    model.peft_config = {**before, name: config}  # type: ignore[assignment]
    if path is not None:
        check_shapes(model, name, Path(path))
    if name == POLICY:
        _check_merges(model, name)
    for layer in adapted_layers(model):
        layer.set_adapter(POLICY)  # the others neither learn nor take part
        for part, parameter in layer.named_parameters():
            parameter.requires_grad_(is_adapter(f".{part}") and f".{POLICY}" in part)


@contextmanager
def _out_of_sight(model: nn.Module) -> Iterator[None]:
    """Take the adapters that a model has out of it: peft goes through all of them for each layer that gets more."""
    aside = []
    for layer in adapted_layers(model):
        for part in (layer.lora_A, layer.lora_B, layer.lora_dropout):
            aside.append((part._modules, dict(part._modules)))
            part._modules.clear()
    try:
        yield
    finally:
        for modules, before in aside:
            more = dict(modules)
            modules.clear()
            modules.update(before | more)


def _fresh(model: nn.Module, lora: Mapping[str, Any]) -> Any:
    from peft import LoraConfig

    targets = lora_targets(model, lora["target_modules"])
    return LoraConfig(
        r=int(lora["r"]),
        lora_alpha=lora["alpha"],
        target_modules=targets,
        fan_in_fan_out=any(isinstance(_plain_layer(model, name), Conv1D) for name in targets),
        init_lora_weights=False,
        task_type="CAUSAL_LM",
    )


def _plain_layer(model: nn.Module, name: str) -> Any:
    """A layer, or the one under its adapters."""
    layer = model.get_submodule(name)
    return getattr(layer, "base_layer", layer)


def _saved(directory: Path) -> Any:
    """Return peft's configuration of saved adapters.

    Raises:
        ValueError: there are none, or of a kind whose weights are more than a product that is added.
    """
    from peft import LoraConfig, PeftConfig

    if not (directory / ADAPTER_CONFIG).is_file() or not (directory / ADAPTER_WEIGHTS).is_file():
        raise WrongSetting(f"lora: {directory} has no {ADAPTER_CONFIG} and {ADAPTER_WEIGHTS}, as peft writes them")
    config = PeftConfig.from_pretrained(str(directory))
    if not isinstance(config, LoraConfig):
        raise WrongSetting(f"lora: the adapters in {directory} are {config.peft_type.value}, not LoRA")
    odd = [key for key in ("use_dora", "modules_to_save", "alora_invocation_tokens") if getattr(config, key, None)]
    if odd or config.bias != "none":
        raise WrongSetting(
            f"lora: the adapters in {directory} have {', '.join(odd) or 'biases'}, which are not supported"
        )
    config.inference_mode, config.init_lora_weights, config.lora_dropout = False, False, 0.0
    return config


def check_shapes(model: nn.Module, name: str, directory: Path) -> None:
    """See that saved adapters fit where they were put."""
    wanted = {saved: list(parameter.shape) for saved, parameter in _parameters(model, name)}
    with safe_open(directory / ADAPTER_WEIGHTS, framework="pt") as file:
        there = {key: file.get_slice(key).get_shape() for key in file.keys()}  # noqa: SIM118  # no mapping
    if wanted != there:
        odd = sorted(key for key in {*wanted, *there} if wanted.get(key) != there.get(key))
        raise WrongSetting(
            f"lora: the adapters in {directory} are of another model: {odd[0]} is {there.get(odd[0], 'missing')} there "
            f"and {wanted.get(odd[0], 'missing')} here ({len(odd)} tensors differ)"
        )


def adapter_values(
    model: nn.Module, seed: int, saved: Mapping[str, str | None]
) -> Iterator[tuple[nn.Parameter, Tensor]]:
    """The values with which adapters start, whole, for every adapter parameter.

    Those that are not saved begin with A random and B zero, so that W is unchanged. A is drawn uniformly from
    ±sqrt(3 / fan-in), as `nn.Linear` draws its weights; one generator in the order of the parameters, so that every
    rank draws the same.

    Args:
        model: with its adapters.
        seed: of new ones.
        saved: directories of saved ones, by the adapters' name; None: these are new, and so are the policy's where
            they are not named.
    """
    everyone: dict[str, str | None] = {POLICY: None, **saved}
    for name, directory in everyone.items():
        yield from start_adapters(model, seed, name) if directory is None else saved_values(model, name, directory)


def saved_values(model: nn.Module, name: str, directory: str) -> Iterator[tuple[nn.Parameter, Tensor]]:
    """The values that adapters of a name have in a directory of peft's."""
    with safe_open(Path(directory) / ADAPTER_WEIGHTS, framework="pt") as file:
        for key, parameter in _parameters(model, name):
            yield parameter, file.get_tensor(key).to(parameter.dtype)


def scaled_tensors(directory: Path) -> Iterator[tuple[str, Tensor]]:
    """Names in the plain model, and values, of what saved adapters of one rank add: B is scaled by alpha / rank."""
    config = json.loads((directory / ADAPTER_CONFIG).read_text(encoding="utf-8"))
    with safe_open(directory / ADAPTER_WEIGHTS, framework="pt") as file:
        for key in file.keys():  # noqa: SIM118  # no mapping
            value = file.get_tensor(key)
            scale = config["lora_alpha"] / config["r"] if ".lora_B." in key else 1.0
            yield key.removeprefix(_SAVED_AS), value * scale


def save_scaled(directory: Path, named: Iterable[tuple[str, Tensor]]) -> None:
    """Write adapters of one rank in peft's format, with names and values as `scaled_tensors` has them."""
    tensors = {_SAVED_AS + name: tensor.cpu() for name, tensor in named}
    rank = next(len(tensor) for name, tensor in tensors.items() if ".lora_A." in name)
    layers = sorted({name.rpartition(".lora_")[0].rpartition(".")[2] for name in tensors})
    config = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "bias": "none", "r": rank, "lora_alpha": rank}
    (directory / ADAPTER_CONFIG).write_text(json.dumps(config | {"target_modules": layers}), encoding="utf-8")
    write_tensors(directory / ADAPTER_WEIGHTS, tensors)


def ranks_of(weights: Weights, layers: Mapping[str, tuple[int, ...]]) -> dict[str, int]:
    """Rank of adapters, scaled and named as `scaled_tensors` has them, by the layer of the plain model.

    Args:
        weights: the adapters.
        layers: shape of the weight of each layer that may have adapters, [outputs, inputs].

    Raises:
        ValueError: they do not fit.
    """
    ranks: dict[str, dict[str, int]] = {}
    for name, shape in weights.shapes.items():
        layer, kind = match.groups() if (match := _SCALED_NAME.fullmatch(name)) else ("", "")
        if (sizes := layers.get(layer)) is None:
            raise ValueError(f"adapters {weights.adapter}: {name} is of no layer that gets adapters here")
        wide, rank = (sizes[0], shape[-1]) if kind == "B" else (sizes[1], shape[0])
        if shape != ((wide, rank) if kind == "B" else (rank, wide)):
            raise ValueError(f"adapters {weights.adapter}: {name} is {list(shape)}, which does not fit its layer")
        ranks.setdefault(layer, {})[kind] = rank
    for layer, pair in ranks.items():
        if len(pair) != 2 or pair["A"] != pair["B"]:
            raise ValueError(f"adapters {weights.adapter}: {layer} has no two matrices of one rank")
    return {layer: pair["A"] for layer, pair in ranks.items()}


def start_adapters(model: nn.Module, seed: int, adapter: str = POLICY) -> Iterator[tuple[nn.Parameter, Tensor]]:
    """The values with which new adapters of a name start; see `adapter_values`."""
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in _parameters(model, adapter):
        value = torch.zeros(tuple(parameter.shape), dtype=parameter.dtype)
        if "lora_A" in name:
            bound = math.sqrt(3.0 / parameter.shape[-1])
            value.uniform_(-bound, bound, generator=generator)
        yield parameter, value


@contextmanager
def using(model: nn.Module, name: str | None) -> Iterator[None]:
    """Compute with other adapters than those that learn.

    Args:
        model: with adapters.
        name: of the adapters; None for none, the base model.
    """
    layers = list(adapted_layers(model))
    for layer in layers:
        # peft's own switches would also change which adapters learn
        layer._disable_adapters = name is None
        layer._active_adapter = [POLICY if name is None else name]
    try:
        yield
    finally:
        for layer in layers:
            layer._disable_adapters, layer._active_adapter = False, [POLICY]


def adapter_config(model: nn.Module, base: str | None, name: str = POLICY) -> dict[str, Any]:
    """Contents of `adapter_config.json` for adapters.

    Args:
        model: with adapters.
        base: where the base model was loaded from; None for a new one.
        name: of the adapters.
    """
    config = dict(model.peft_config[name].to_dict())  # type: ignore[index, union-attr]
    config |= {"base_model_name_or_path": base, "inference_mode": True, "init_lora_weights": True}
    readable = ((key, sorted(value) if isinstance(value, set) else value) for key, value in config.items())
    return json.loads(json.dumps(dict(readable), default=str))  # type: ignore[no-any-return]


def saved_names(model: nn.Module, name: str = POLICY) -> Iterator[tuple[str, nn.Parameter]]:
    """The parameters of adapters, under the names of peft's files."""
    return _parameters(model, name)


def scaled_parts(model: nn.Module, name: str) -> Iterator[tuple[str, nn.Parameter, float]]:
    """Parameters of adapters of a name and factors, under the names of the plain model's layers, as `scaled_tensors`
    has them of saved ones."""
    for path, layer in model.named_modules():
        if hasattr(layer, "_disable_adapters") and name in layer.lora_A:
            yield f"{path}.lora_A.weight", layer.lora_A[name].weight, 1.0
            yield f"{path}.lora_B.weight", layer.lora_B[name].weight, layer.scaling[name]


def apart(past: Mapping[str, Tensor], now: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Adapters that lead from a model with some merged in to the model with others.

    Args:
        past: the others, scaled, by name.
        now: those that are merged in.
    """
    parts: dict[str, Tensor] = {}
    for name, tensor in past.items():
        narrow = ".lora_A." in name
        parts[name] = torch.cat([tensor, now[name] if narrow else -now[name]], dim=0 if narrow else 1)
    return parts


def open_adapters(model: nn.Module, lora: Mapping[str, Any], name: str, seed: int) -> None:
    """Give a model further adapters that learn, beside those that it has, which stay as they are.

    Args:
        model: with `POLICY`'s, whole; not on the meta device.
        lora: see `add_adapters`.
        name: of the new ones.
        seed: of their values, where none are saved: those that a model of this seed would have as its own.

    Raises:
        ValueError: see `add_adapters`.
    """
    learns = {id(parameter) for parameter in model.parameters() if parameter.requires_grad}
    add_adapters(model, lora, name)
    values = (
        saved_values(model, name, str(lora["path"])) if lora.get("path") else start_adapters(model, mix(seed, 1), name)
    )
    for _, parameter in saved_names(model, name):  # peft makes them in the dtype of the layer below
        parameter.data = parameter.data.float()
    with torch.no_grad():
        for parameter, value in values:
            parameter.copy_(value)
    learns |= {id(parameter) for _, parameter in saved_names(model, name)}
    for parameter in model.parameters():
        parameter.requires_grad_(id(parameter) in learns)


def close_adapters(model: nn.Module, name: str) -> None:
    """Take adapters out of a model."""
    for layer in adapted_layers(model):
        if name in getattr(layer, "lora_A", ()):
            layer.delete_adapter(name)
    model.peft_config.pop(name)  # type: ignore[operator, union-attr]


def _parameters(model: nn.Module, adapter: str) -> Iterator[tuple[str, nn.Parameter]]:
    for name, parameter in model.named_parameters():
        plain, part, kind = name.rpartition(f".{adapter}")
        if is_adapter(name) and part and kind in ("", ".weight"):
            yield _SAVED_AS + plain + kind, parameter


def adapted_layers(model: nn.Module) -> Iterator[Any]:
    """The layers of a model that have adapters, as peft wraps them."""
    return (module for module in model.modules() if hasattr(module, "_disable_adapters"))


def is_adapter(name: str) -> bool:
    """True if a parameter of this name belongs to an adapter."""
    return ".lora_" in name


def plain_name(name: str) -> str:
    """The name that a parameter has in the model without adapters."""
    return name.replace(_WRAPPED, "")


def merged_named_parameters(model: nn.Module, adapter: str | None = POLICY) -> Iterator[tuple[str, Tensor]]:
    """Names and weights as the plain Hugging Face model has them, adapters added in; tied weights once.

    A model without adapters gives its own `named_parameters()`. Of a model that is spread over ranks they come as the
    `DTensor`s that they are, and merging communicates, so all ranks must go through this together.

    Args:
        model: the Hugging Face model, spread or not, with adapters or without.
        adapter: name of those that are added in; None: none.

    Yields:
        Name without wrappers, and a tensor that must not be changed; merged weights are made one at a time.
    """
    for name, _, make in plain_parameters(model, adapter):
        yield name, make()


def plain_parameters(
    model: nn.Module, adapter: str | None = POLICY
) -> Iterator[tuple[str, nn.Parameter, Callable[[], Tensor]]]:
    """Named parameters before adapters of a name (None: none) are merged in: name, the parameter without adapters, and
    a function that makes the merged weight."""
    deltas = _layers_by_weight(model)
    _check_merges(model, adapter)
    for name, parameter in model.named_parameters():
        if not is_adapter(name):
            yield plain_name(name), parameter, partial(_merged, parameter, deltas.get(name), adapter)


def _layers_by_weight(model: nn.Module) -> dict[str, Any]:
    """Layers with adapters, by the names of the weights under them."""
    return {
        f"{path}{_WRAPPED}.weight": module
        for path, module in model.named_modules()
        if hasattr(module, "get_delta_weight") and hasattr(module, "base_layer")
    }


def _check_merges(model: nn.Module, adapter: str | None) -> None:
    """See that each weight with adapters of a name is its layer's alone.

    Raises:
        ValueError: it is not, so that merged weights would change other layers.
    """
    own = {name for name, layer in _layers_by_weight(model).items() if adapter in layer.lora_A}
    if shared := own - {name for name, _ in model.named_parameters()}:
        raise WrongSetting(
            f"lora: adapters {adapter} are of {plain_name(min(shared))}, which is the weight of another layer, too "
            "(tied embeddings), so they cannot be merged into it: leave that layer out, or take a model whose "
            "embeddings are two"
        )


@torch.no_grad()
def _merged(weight: Tensor, layer: Any, adapter: str | None = POLICY) -> Tensor:
    weight = weight.plain() if isinstance(weight, Nf4) else weight
    if layer is None or adapter not in layer.lora_A:  # adapters of others may be in more layers
        return weight.detach()
    delta: Tensor = layer.get_delta_weight(adapter)  # of what is kept in half precision it is float32 all the same
    delta = delta.to(torch.promote_types(delta.dtype, weight.dtype))
    if isinstance(weight, DTensor):
        assert isinstance(delta, DTensor)
        delta = delta.redistribute(weight.device_mesh, weight.placements)
    return delta.add_(weight)  # it is nobody else's
