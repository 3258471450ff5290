"""A machine with GPUs, as far as it matters which of them a thread works on: for tests on machines without any."""

from __future__ import annotations

import os
import threading
from types import SimpleNamespace

import torch

from rlinf.runtime.base import tensors


def pretend(monkeypatch, rank=None, cards=8):
    """Have `torch.cuda` tell of so many GPUs, each thread with a current one of its own, which begins as 0.

    Args:
        rank: this process's LOCAL_RANK; None where torchrun did not start it.
    """
    thread = threading.local()
    if rank is None:
        monkeypatch.delenv("LOCAL_RANK", raising=False)
    else:
        monkeypatch.setenv("LOCAL_RANK", str(rank))
    monkeypatch.setattr(tensors, "_index", None)
    seen = lambda: 0 if os.environ.get("CUDA_VISIBLE_DEVICES") == "" else cards  # noqa: E731
    fakes = {
        "is_available": lambda: seen() > 0,
        "device_count": lambda: seen(),
        "set_device": lambda device: setattr(thread, "device", device),
        "current_device": lambda: getattr(thread, "device", 0),
        "get_device_name": lambda device=0: "a card",
        "get_device_properties": lambda device=0: SimpleNamespace(total_memory=80 << 30, uuid=f"uuid-{device}"),
        "is_current_stream_capturing": lambda: False,
    }
    for name, fake in fakes.items():
        monkeypatch.setattr(torch.cuda, name, fake)
    before = torch.backends.cuda.cudnn_sdp_enabled()
    monkeypatch.setattr(torch.backends.cuda, "enable_cudnn_sdp", lambda on: settings.update(cudnn_sdp=on))
    settings = {"cudnn_sdp": before}
    return settings
