"""Ranks of which one cannot compute attention as the others do: what each settles on, as JSON lines.

Usage: agreement.py CASE, "whole" or "sliced", as the model lies on the ranks; or "compiled": in slices, first with a
compiler on one rank alone, then with one on each, where it prints how far gradients are from those of one process.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from rlinf.data.packing import Row, pack
from rlinf.models.language import attention as packed_attention
from rlinf.models.language.fsdp import shard
from rlinf.models.language.policy_model import PolicyModel
from tests.actors import toys
from tests.models.language.kernels.test_blocks import KERNEL


def compiled(mesh: DeviceMesh) -> None:
    judged = toys.groups(4)
    parts = [pack([Row.of(sample) for sample in one.samples]) for one in judged]
    plain = PolicyModel(toys.model(num_hidden_layers=2))
    for batch in parts:
        plain(batch)[0].sum().backward()
    for compilers in (1, 2):
        torch.compiler.reset()
        PolicyModel.compiler = "aot_eager"
        policy = PolicyModel(toys.model(num_hidden_layers=2), compiled=True)
        shard(policy, mesh, torch.float32)
        PolicyModel._at_hand = lambda *_: KERNEL
        found = torch._dynamo.lookup_backend
        if dist.get_rank() >= compilers:
            torch._dynamo.lookup_backend = lambda name: refuses
        try:
            policy.settle(mesh)
        except ValueError as error:
            print(json.dumps(str(error)), flush=True)
            continue
        finally:
            torch._dynamo.lookup_backend = found
        for batch in parts[dist.get_rank() :: 2]:
            policy(batch)[0].sum().backward()
        gradients = {name: one.grad.full_tensor() for name, one in policy.model.named_parameters()}
        print(json.dumps([policy.words, toys.furthest(gradients, toys.gradients(plain.model))]), flush=True)


def refuses(graph: Any, inputs: Any) -> Any:
    raise RuntimeError("there is no C++ compiler")


def main() -> None:
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    if sys.argv[1] == "compiled":
        compiled(mesh)
        dist.destroy_process_group()
        return
    able = packed_attention._by_rectangles
    calls = 0

    def attend(*arguments):
        nonlocal calls
        calls += 1
        if calls > 1 and dist.get_rank() == 1:  # in the second layer, where others are on their way to the third
            raise TypeError("this card has no such kernel")
        return able(*arguments)

    packed_attention._by_rectangles = attend
    for attention in ("any", "packed"):
        calls = 0
        policy = PolicyModel(toys.model(num_hidden_layers=4), attention=attention)
        if sys.argv[1] == "sliced":
            shard(policy, mesh, torch.float32)
        try:
            policy.settle(mesh)
            said = policy.words
            policy(pack([Row.of(sample) for sample in toys.group(0, np.random.default_rng(0)).samples]))[
                0
            ].sum().backward()
        except ValueError as error:
            said = str(error)
        print(json.dumps([attention, said]), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
