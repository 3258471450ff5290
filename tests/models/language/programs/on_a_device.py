"""A micro-batch of every algorithm on a device that is not there: what is read back, and the operations of a layer.

Tensors have shapes and a device, and no values (FakeTensorMode), so whatever would wait for a value raises, and so does
whatever mixes devices. The device is torch's for private use: unlike "cuda" it can be differentiated without a card.
It prints JSON lines: case, reads, copies to the device, operations that a layer adds, forward and backward.
"""

from __future__ import annotations

import json
from collections import Counter
from typing import Any

import torch
from torch._subclasses import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

from rlinf.algos import recipes
from rlinf.algos.losses import supervised
from rlinf.config.learning import LearningSettings
from rlinf.data.packing import Row, pack
from rlinf.models.language.policy_model import PolicyModel, ValueModel
from rlinf.training.fsdp import Learner
from rlinf.training.policy import advantage_rows, learn_policy, own_columns
from tests.actors import toys

_setup_privateuseone_for_python_backend("card")
DEVICE = torch.device("card", 0)
READS = ("_local_scalar_dense", "equal", "is_nonzero")
"""Operations that bring a value to the host."""
NO_KERNELS = ("t", "view", "detach", "transpose", "slice", "_unsafe_view", "unsqueeze", "select", "expand", "squeeze")
"""Operations that only look at memory in another way."""


class Counted(TorchDispatchMode):
    """Counts operations, and copies from and to the device."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: Counter[str] = Counter()

    def __torch_dispatch__(self, function: Any, types: Any, arguments: Any = (), keywords: Any = None) -> Any:
        result = function(*arguments, **(keywords or {}))
        name = function.overloadpacket.__name__
        given = [one for one in arguments if isinstance(one, torch.Tensor)]
        from_device = any(one.device == DEVICE for one in given)
        to_device = isinstance(result, torch.Tensor) and result.device == DEVICE
        if name in READS or (from_device and isinstance(result, torch.Tensor) and not to_device):
            self.seen["reads"] += 1
        elif given and to_device and not from_device:
            self.seen["sends"] += 1
        if function.namespace != "prim" and name not in NO_KERNELS:
            self.seen["operations"] += 1
        return result


def made(layers: int, dtype: torch.dtype, kind: Any = PolicyModel, **more: Any) -> Any:
    """A model on the device; module.to() would exchange parameters that fake mode remembers."""
    policy, moved = kind(toys.model(num_hidden_layers=layers, **more)), {}
    for module in policy.modules():
        for name, tensor in module._parameters.items():
            if tensor is not None:
                there = moved.setdefault(id(tensor), torch.nn.Parameter(tensor.detach().to(DEVICE)))
                module._parameters[name] = there
        module._buffers.update({name: tensor.to(DEVICE) for name, tensor in module._buffers.items()})
    policy.compute_in(dtype)
    return policy


def rows(spec: Any) -> list[Row]:
    batch = toys.conversations(toys.told(toys.groups(7)))
    own = own_columns(spec, minibatches=1, own={})
    return [row for some in advantage_rows(spec, batch, later=own.first_pass).rows for row in some]


def learned(policy: Any, spec: Any, given: list[Row], *, again: bool = False) -> Counter[str]:
    """What a micro-batch asks for; `again`: the second one since the weights changed."""
    learner = Learner(policy, LearningSettings(lr=0.0))
    if again:
        learn_policy(learner, pack(given), spec, version=3, compare=True, cached_columns={})
    with Counted() as counted:
        learn_policy(learner, pack(given), spec, version=3, compare=True, cached_columns={})
    return counted.seen


def valued(model: Any, given: list[Row]) -> Counter[str]:
    learner = Learner(model, LearningSettings(lr=0.0))
    with Counted() as counted:
        learner.accumulate([pack(given)], lambda batch, found: supervised(found[0], batch.mask))
    return counted.seen


def main() -> None:
    given = {name: rows(spec) for name, spec in toys.ALGORITHMS.items()}
    values = rows(recipes.get("rloo"))
    with FakeTensorMode():
        for dtype in (torch.bfloat16, torch.float32):
            policy = made(1, dtype)
            for name, spec in (
                toys.ALGORITHMS.items() if dtype == torch.bfloat16 else [("rloo", toys.ALGORITHMS["rloo"])]
            ):
                seen = learned(policy, spec, given[name])
                print(json.dumps([f"{name} in {dtype}", seen["reads"], seen["sends"], None]), flush=True)
            policies = [made(layers, dtype) for layers in (2, 3)]
            few, more = (learned(one, toys.SPEC, given["rloo"], again=True)["operations"] for one in policies)
            seen = valued(made(1, dtype, ValueModel), values)
            print(json.dumps([f"values in {dtype}", seen["reads"], seen["sends"], more - few]), flush=True)


if __name__ == "__main__":
    main()
