"""Weights on their way to a vLLM server, as far as it needs none."""

import ast
import re
import sys
from pathlib import Path

import numpy as np
import torch

import rlinf
from rlinf.data.weights import Weights
from rlinf.engines.served.vllm import VllmServer


def test_memory_for_weights_is_reused_and_grows():
    server = VllmServer("python", {}, 1.0)
    for size in (10, 1000, 10):
        weights = Weights.pack([("one", torch.full((size,), float(size)))], size)
        ((bucket,),) = [server._shared(weights)]
        with open(bucket["path"], "rb") as file:
            assert np.frombuffer(file.read(bucket["bytes"]), np.float32).tolist() == [float(size)] * size
    assert len(server._memory) == 1
    server.close()


async def test_adapters_have_a_new_name_at_the_server_whenever_they_come():
    told = []

    class Http:
        async def post(self, path, body, seconds=None):
            told.append((path, *body.values()))

    server, http = VllmServer("python", {}, 1.0, adapter_rank=8), Http()
    assert VllmServer("python", {}, 1.0).adapters is None
    assert " ".join(server.command(Path(), "", 1)).endswith("--adapter-rank 8")
    for name in "aba":
        await server.adapters.load(http, name, Path("/files"))
    await server.adapters.unload(http, "b")
    held = [("/hold", "a-1", "/files"), ("/hold", "b-2", "/files"), ("/hold", "a-3", "/files")]
    assert told == [*held, ("/drop", "a-1"), ("/drop", "b-2")]
    assert server.adapters.names == {"a": "a-3"}


def test_files_that_servers_load_by_their_paths_need_nothing_of_rlinf_but_one_another():
    """vLLM's processes have numpy and torch, and no rlinf."""
    package = Path(rlinf.__file__).parent
    inside = (package / "engines/served/vllm_inside/rlinf_draw.py").read_text()
    shared = re.findall(r'shared\("(.*?)"\)', inside)
    assert len(shared) == 2
    for name in shared:
        tree = ast.parse(package.parent.joinpath(*name.split(".")).with_suffix(".py").read_text())
        imported = {node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and node.module}
        imported |= {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
        outside = {each.partition(".")[0] for each in imported} - set(sys.stdlib_module_names) - {"numpy", "torch"}
        assert outside <= {"rlinf"}
        assert {each for each in imported if each.startswith("rlinf")} <= set(shared)
