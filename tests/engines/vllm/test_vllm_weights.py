"""Weights on their way to a vLLM server, as far as it needs none."""

import numpy as np
import torch

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
