"""Two ranks that share one model in slices, of which the second never has a picture: how far the gradients of both are
from those of one process, by model, as a JSON line."""

from __future__ import annotations

import json

import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from rlinf.data.packing import pack
from rlinf.data.tokenizer import load_tokenizer
from rlinf.models.language.build import ModelSpec, build_module
from rlinf.models.language.fsdp import Layout
from tests.models.language.test_pictures import policy_of, rows_of
from tests.pictured import MODELS, TOKENIZER


def main() -> None:
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (2,))
    far = {}
    for kind in MODELS:
        rows = rows_of(kind)
        alone = policy_of(kind)
        alone(pack(rows))[0].sum().backward()
        spec = ModelSpec(MODELS[kind], seed=1)
        policy = build_module(spec, load_tokenizer(TOKENIZER), "cpu", Layout(mesh, mesh))
        mine = [row for row in rows if bool(row.images) == (dist.get_rank() == 0)]
        policy(pack(mine))[0].sum().backward()
        expected = {name: one.grad for name, one in alone.model.named_parameters()}
        found = {name: one.grad.full_tensor() for name, one in policy.model.named_parameters()}
        far[kind] = max(float((found[name] - grad).abs().max()) for name, grad in expected.items())
    print(json.dumps(far), flush=True)
    dist.destroy_process_group()


main()
