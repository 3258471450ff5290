"""A policy from its configuration, and from a directory: a mapping in, the same policy in every process.

    build_policy_model({"type": "mlp", "state_size": 35, "action_size": 4})

`type` is a name below, or the dotted path of a class derived from `Policy`; the other keys are those of its `Config`.
A directory of ours holds `policy.json`, that mapping, and `policy.safetensors`, weights and running statistics. Of a
policy with a published form (`published.py`) it holds that form in place of the latter, and `extra.safetensors` with
what the form has no place for; and an authors' directory, without `policy.json`, is read as well.
"""

from __future__ import annotations

import dataclasses
import json
import typing
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor
from torch.distributed.fsdp import FSDPModule

from rlinf.config.importing import resolve
from rlinf.config.schema import nearest, type_name
from rlinf.data.rng import ONE_AT_A_TIME, mix
from rlinf.data.safetensors_io import write_tensors, write_text
from rlinf.models.policy import published
from rlinf.models.policy.base import DtypeOf, Policy, PolicyConfig

POLICIES = {
    "mlp": "rlinf.models.policy.actor_critic.MlpPolicy",
    "cnn": "rlinf.models.policy.actor_critic.CnnPolicy",
    "vla": "rlinf.models.policy.vla.tokens.VlaPolicy",
    "soft": "rlinf.models.policy.sac.SoftPolicy",
    "soft_pixels": "rlinf.models.policy.sac.SoftPixelsPolicy",
    "flow": "rlinf.models.policy.vla.flow.MlpFlowPolicy",
    "steered": "rlinf.models.policy.sac.SteeredPolicy",
    "openvla": "rlinf.models.policy.vla.openvla.OpenVlaPolicy",
    "openvla-oft": "rlinf.models.policy.vla.openvla.OpenVlaOftPolicy",
    "pi0": "rlinf.models.policy.vla.pi0.Pi0Policy",
    "pi05": "rlinf.models.policy.vla.pi0.Pi05Policy",
    "pi0_fast": "rlinf.models.policy.vla.pi0_fast.Pi0FastPolicy",
    "gr00t": "rlinf.models.policy.vla.gr00t.Gr00tPolicy",
    "act": "rlinf.models.policy.act.ActPolicy",
    "diffusion": "rlinf.models.policy.diffusion.DiffusionPolicy",
    "smolvla": "rlinf.models.policy.vla.smolvla.SmolVlaPolicy",
    "wall_x": "rlinf.models.policy.vla.wall_x.WallXPolicy",
}
"""By short name; imported when asked for, since transformers takes seconds."""

CONFIG, WEIGHTS = "policy.json", "policy.safetensors"
"""Files of a saved policy's directory."""


def build_policy_model(config: Mapping[str, Any]) -> Policy:
    """Make a policy with its first weights; the same configuration makes the same ones everywhere.

    Args:
        config: `type` and the keys of that policy's `Config`.

    Returns:
        The policy, on the CPU, float32.

    Raises:
        ValueError: no such policy or key (the text gives the nearest), a value of the wrong kind, or one is missing.
    """
    settings = policy_config(config)
    kind = policy_class(config)
    with ONE_AT_A_TIME, torch.random.fork_rng(devices=[]):
        torch.manual_seed(mix(settings.seed))
        return kind(settings)


def make_policy(
    config: Mapping[str, Any], path: str | None, device: torch.device, dtype: torch.dtype | DtypeOf = torch.float32
) -> Policy:
    """A policy on a device: from a directory if there is one, else from its configuration. Blocking.

    Args:
        config: `type` and further keys.
        path: of a saved policy, whose own configuration counts then, or of the authors, which `config` goes before.
        device: where it is to be.
        dtype: of its parameters, but for those that its class keeps in float32; or what says it of each.
    """
    if path is not None:
        return load_policy(Path(path).expanduser(), config, device=device, dtype=dtype)
    return build_policy_model(config).to(device).keep(dtype)


def policy_class(config: Mapping[str, Any]) -> type[Policy]:
    """The class that `type` names.

    Raises:
        ValueError: there is none, or it is no policy.
    """
    name = config.get("type")
    if not isinstance(name, str) or ("." not in name and name not in POLICIES):
        near = nearest(name, POLICIES) if isinstance(name, str) else None
        raise ValueError(
            f"policy: type={name!r} must be one of {', '.join(POLICIES)}, or the dotted path of a class"
            + (f"; did you mean {near}?" if near else "")
        )
    policy = resolve(POLICIES.get(name, name))
    if not (isinstance(policy, type) and issubclass(policy, Policy)):
        raise ValueError(
            f"policy: type={name} names {policy!r}, which is no class derived from rlinf.models.policy.base.Policy"
        )
    return policy


def policy_config(config: Mapping[str, Any]) -> PolicyConfig:
    """The checked configuration of a policy, as its class wants it.

    Raises:
        ValueError: see `build_policy_model`.
    """
    kind = policy_class(config).Config
    where = f"policy {config['type']}"
    hints = typing.get_type_hints(kind)
    fields = {field.name: field for field in dataclasses.fields(kind)}
    values = {key: value for key, value in config.items() if key != "type"}
    for key in values:
        if key not in fields:
            near = nearest(key, fields)
            raise ValueError(
                f"{where} has no key {key!r}" + (f"; did you mean {near}?" if near else f": it has {', '.join(fields)}")
            )
    missing = [name for name, field in fields.items() if name not in values and _is_required(field)]
    if missing:
        raise ValueError(f"{where} needs {' and '.join(missing)}, which the environment's sizes mostly say")
    return kind(**{key: _typed(f"{where}: {key}", value, hints[key]) for key, value in values.items()})


def fitted(
    config: Mapping[str, Any],
    shapes: Mapping[str, tuple[int, ...]],
    action_size: int,
    choices: tuple[int, ...] | None = None,
    bounds: tuple[Sequence[float], Sequence[float]] | None = None,
) -> dict[str, Any]:
    """A configuration completed by what the environment is like.

    Args:
        config: `type` and keys; those that are there stay, so `state_size: 0` goes on not looking at the state.
        shapes: of one row of each array of an observation, such as {"state": (35,), "rgb": (64, 64, 3)}.
        action_size: numbers in one action, A.
        choices: how many choices each of them stands for; None where they are real.
        bounds: least and greatest value of each number of an action, in the simulator's own units, A each; infinite
            where there is none. None: not known.

    Returns:
        The configuration with `action_size`, `choices`, `action_low`, `action_high`, `state_size` and `image`, as far
        as the policy has those keys.
    """
    names = {field.name for field in dataclasses.fields(policy_class(config).Config)}
    sizes: dict[str, Any] = {"action_size": action_size}
    if choices is not None:
        sizes["choices"] = choices
    if bounds is not None:
        sizes["action_low"], sizes["action_high"] = (tuple(float(each) for each in bound) for bound in bounds)
    if "state" in shapes:
        sizes["state_size"] = shapes["state"][0]
    if "rgb" in shapes:
        sizes["image"] = tuple(shapes["rgb"])
    return {**{key: value for key, value in sizes.items() if key in names}, **config}


def described(policy: Policy) -> dict[str, Any]:
    """The configuration that makes a policy like this one, with every key, as `build_policy_model` takes it."""
    kind = next(kind for kind in type(policy).__mro__ if not issubclass(kind, FSDPModule))  # of one that is spread
    path = f"{kind.__module__}.{kind.__qualname__}"
    short = {long: name for name, long in POLICIES.items()}
    return {"type": short.get(path, path), **dataclasses.asdict(policy.config)}


def configured(config: Mapping[str, Any], directory: Path) -> dict[str, Any]:
    """The whole configuration of the policy in a directory.

    Args:
        config: `type` and keys for an authors' directory, which go before what that says.
        directory: of a saved policy, or of the authors.

    Raises:
        FileNotFoundError: it is neither.
        ValueError: what it says is damaged.
    """
    about = directory / CONFIG
    if (directory / published.INDEX).is_file():
        published.tensor_files(directory)  # whether all that it names are there
    if about.is_file():
        try:
            saved: dict[str, Any] = json.loads(about.read_text(encoding="utf-8"))
        except ValueError as error:
            raise ValueError(f"{about} is damaged: {error}") from error
        return saved
    kind = policy_class(config) if config.get("type") is not None else None
    if kind is None or not kind.published:
        raise FileNotFoundError(
            f"{directory} holds no {CONFIG}: it is not the directory of a saved policy"
            + ("" if kind is None else f", and {config['type']} has no published form")
        )
    missing = [pattern for pattern in kind.published if not any(directory.glob(pattern))]
    if missing:
        raise FileNotFoundError(
            f"{directory} holds neither {CONFIG} nor {' and '.join(missing)}: it is not the directory of a saved "
            f"policy, and not of a published {config['type']}"
        )
    return {**kind.published_settings(directory), **config}


def save_policy(policy: Policy, directory: Path, state: Mapping[str, Tensor] | None = None) -> None:
    """Write a policy into a directory, which is made if it is not there.

    Args:
        policy: whose configuration and form are written.
        directory: takes `policy.json` and `policy.safetensors`, or the published form and `extra.safetensors`; those
            that are there are replaced.
        state: what is written in place of the policy's own `weights`, under the same names, in host memory.
    """
    directory.mkdir(parents=True, exist_ok=True)
    tensors = policy.weights() if state is None else state
    weights = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    if policy.published:
        for name, content in policy.files.items():
            (directory / name).parent.mkdir(parents=True, exist_ok=True)
            (directory / name).write_bytes(content)
        own = {name: tensor for name, tensor in weights.items() if published.matches(name, policy.own)}
        policy.write_published(directory, {name: weights[name] for name in weights if name not in own})
        policy.write_own(directory, own)
    else:
        write_tensors(directory / WEIGHTS, weights)
    write_text(directory / CONFIG, json.dumps(described(policy), indent=2) + "\n")


def load_policy(
    directory: Path,
    config: Mapping[str, Any] | None = None,
    *,
    device: torch.device | None = None,
    dtype: torch.dtype | DtypeOf = torch.float32,
) -> Policy:
    """Read a policy that `save_policy` wrote, or its authors.

    Args:
        directory: of the files.
        config: `type` and keys, for an authors' directory.
        device: where the policy is to be; None: in the host's memory.
        dtype: see `make_policy`.

    Raises:
        FileNotFoundError: the directory holds no policy.
        ValueError: the configuration is wrong, or weights do not fit it.
    """
    whole = configured(config or {}, directory)
    with published.without_memory():
        policy = build_policy_model(whole)
    complete = (directory / published.EXTRA).is_file() or not policy.published  # authors have not all
    optional = () if complete else policy.own
    policy.keep(dtype)
    published.fill(policy, saved_tensors(policy, directory), where=str(directory), optional=optional, device=device)
    return policy.to(device)


def saved_tensors(policy: Policy, directory: Path) -> Iterator[tuple[str, Tensor]]:
    """The tensors of a policy in a directory, under its own names, one at a time; what is no tensor it takes over.

    Args:
        policy: of the directory's configuration.
        directory: of a saved policy, or of the authors.
    """
    if not policy.published:
        return published.read_tensors(published.tensors_in(directory / WEIGHTS))
    paths = sorted({path for pattern in policy.small_files for path in directory.glob(pattern) if path.is_file()})
    policy.files = {path.relative_to(directory).as_posix(): path.read_bytes() for path in paths}
    policy.open_published(directory)
    own = directory / published.EXTRA
    ours = published.read_tensors(published.tensors_in(own)) if own.is_file() else ()
    return chain(policy.read_published(directory), ours)


def _is_required(field: dataclasses.Field[Any]) -> bool:
    return field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING


def _typed(where: str, value: Any, hint: Any) -> Any:
    """A value of the kind that the field has; whole numbers stand for floats, lists for tuples."""
    kinds = typing.get_args(hint) if typing.get_origin(hint) is not tuple else ()
    if typing.get_origin(hint) is tuple and isinstance(value, list | tuple):
        inner = typing.get_args(hint)
        if inner[-1] is Ellipsis or len(inner) == len(value):
            return tuple(_typed(where, each, inner[0]) for each in value)
    elif typing.get_origin(hint) is Literal:
        if value in kinds:
            return value
    elif typing.get_origin(hint) is not None and type(None) in kinds:
        return None if value is None else _typed(where, value, next(kind for kind in kinds if kind is not type(None)))
    elif hint is float and isinstance(value, int | float) and not isinstance(value, bool):
        return float(value)
    elif isinstance(value, Mapping) and typing.get_origin(hint) in (dict, Mapping):
        return dict(value)
    elif isinstance(hint, type) and type(value) is hint:
        return value
    raise ValueError(f"{where}={value!r} must be {type_name(hint)}")
