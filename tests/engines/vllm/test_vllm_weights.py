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
