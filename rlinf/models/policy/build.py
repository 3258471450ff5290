"""A policy from its configuration, and from a directory: a mapping in, the same policy in every process.

    build_policy_model({"type": "mlp", "state_size": 35, "action_size": 4})

`type` is a name below, or the dotted path of a class derived from `Policy`; the other keys are those of its `Config`.
A directory holds `policy.json`, that mapping, and `policy.safetensors`, weights and running statistics.
"""

from __future__ import annotations

import dataclasses
import json
import threading
import typing
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors.torch import load_file, save_file

from rlinf.config.importing import resolve
from rlinf.config.schema import nearest, type_name
from rlinf.data.rng import mix
from rlinf.models.policy.base import Policy, PolicyConfig

POLICIES = {
    "mlp": "rlinf.models.policy.mlp.MlpPolicy",
    "cnn": "rlinf.models.policy.cnn.CnnPolicy",
    "vla": "rlinf.models.policy.vla.model.VlaPolicy",
    "soft": "rlinf.models.policy.off_policy.soft.SoftPolicy",
    "soft_pixels": "rlinf.models.policy.off_policy.pixels.SoftPixelsPolicy",
}
"""By short name; imported when asked for, since transformers takes seconds."""

CONFIG, WEIGHTS = "policy.json", "policy.safetensors"
"""Files of a saved policy's directory."""
_ONE_AT_A_TIME = threading.Lock()  # first weights come from torch's one global generator


def build_policy_model(config: Mapping[str, Any]) -> Policy:
    """Make a policy with its first weights; the same configuration makes the same ones everywhere.

    Args:
        config: `type` and the keys of that policy's `Config`.

    Returns:
        The policy, on the CPU, float32.

    Raises:
        ValueError: no such policy or key (the text gives the nearest), a value of the wrong kind, or one is missing.
    """
    made = policy_config(config)
    kind = policy_class(config)
    with _ONE_AT_A_TIME, torch.random.fork_rng(devices=[]):
        torch.manual_seed(mix(made.seed))
        return kind(made)


def make_policy(config: Mapping[str, Any], path: str | None, device: torch.device) -> Policy:
    """A policy on a device: from a saved one's directory if there is a path, else from its configuration. Blocking."""
    return (build_policy_model(config) if path is None else load_policy(Path(path).expanduser())).to(device)


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
    found = resolve(POLICIES.get(name, name))
    if not (isinstance(found, type) and issubclass(found, Policy)):
        raise ValueError(
            f"policy: type={name} names {found!r}, which is no class derived from rlinf.models.policy.base.Policy"
        )
    return found


def policy_config(config: Mapping[str, Any]) -> PolicyConfig:
    """The checked configuration of a policy, as its class wants it.

    Raises:
        ValueError: see `build_policy_model`.
    """
    kind = policy_class(config).Config
    where = f"policy {config['type']}"
    hints = typing.get_type_hints(kind)
    fields = {field.name: field for field in dataclasses.fields(kind)}
    given = {key: value for key, value in config.items() if key != "type"}
    for key in given:
        if key not in fields:
            near = nearest(key, fields)
            raise ValueError(
                f"{where} has no key {key!r}" + (f"; did you mean {near}?" if near else f": it has {', '.join(fields)}")
            )
    missing = [name for name, field in fields.items() if name not in given and _is_required(field)]
    if missing:
        raise ValueError(f"{where} needs {' and '.join(missing)}, which the environment's sizes mostly say")
    return kind(**{key: _typed(f"{where}: {key}", value, hints[key]) for key, value in given.items()})


def fitted(config: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]], action_size: int) -> dict[str, Any]:
    """A configuration completed by what the environment is like.

    Args:
        config: `type` and keys; those that are there stay, so `state_size: 0` goes on not looking at the state.
        shapes: of one row of each array of an observation, such as {"state": (35,), "rgb": (64, 64, 3)}.
        action_size: numbers in one action.

    Returns:
        The configuration with `action_size`, `state_size` and `image`, as far as the policy has those keys.
    """
    known = {field.name for field in dataclasses.fields(policy_class(config).Config)}
    sizes: dict[str, Any] = {"action_size": action_size}
    if "state" in shapes:
        sizes["state_size"] = shapes["state"][0]
    if "rgb" in shapes:
        sizes["image"] = tuple(shapes["rgb"])
    return {**{key: value for key, value in sizes.items() if key in known}, **config}


def described(policy: Policy) -> dict[str, Any]:
    """The configuration that makes a policy like this one, with every key, as `build_policy_model` takes it."""
    path = f"{type(policy).__module__}.{type(policy).__qualname__}"
    short = {long: name for name, long in POLICIES.items()}
    return {"type": short.get(path, path), **dataclasses.asdict(policy.config)}


def save_policy(policy: Policy, directory: Path) -> None:
    """Write a policy into a directory, which is made if it is not there.

    Args:
        policy: whole, on one device (not spread over ranks).
        directory: takes `policy.json` and `policy.safetensors`; those that are there are replaced.
    """
    directory.mkdir(parents=True, exist_ok=True)
    (directory / CONFIG).write_text(json.dumps(described(policy), indent=2) + "\n", encoding="utf-8")
    weights = {name: tensor.detach().cpu().contiguous() for name, tensor in policy.state_dict().items()}
    save_file(weights, directory / WEIGHTS)


def load_policy(directory: Path) -> Policy:
    """Read a policy that `save_policy` wrote.

    Raises:
        FileNotFoundError: the directory holds no policy.
        RuntimeError: weights do not fit the configuration.
    """
    if not (directory / CONFIG).is_file():
        raise FileNotFoundError(f"{directory} holds no {CONFIG}: it is not the directory of a saved policy")
    policy = build_policy_model(json.loads((directory / CONFIG).read_text(encoding="utf-8")))
    policy.load_state_dict(load_file(directory / WEIGHTS))
    return policy


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
