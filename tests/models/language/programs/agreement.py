"""Ranks of which one cannot compute attention as the others do: what each settles on, as JSON lines.

Usage: agreement.py CASE, "whole" or "sliced": how the model lies on the ranks.
"""

from __future__ import annotations

import json
import sys

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from rlinf.data.packing import Row, pack
from rlinf.models.language import packed_attention
from rlinf.models.language.fsdp import shard
from rlinf.models.language.policy_model import PolicyModel
from tests.actors import toys


def main() -> None:
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
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
