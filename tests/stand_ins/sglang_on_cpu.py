"""Lets SGLang's published wheels run on a CPU; it changes what is imported after it.

`make sglang` puts it into the environment's site-packages where there is no GPU, with a line of a .pth file that
imports it whenever a Python of that environment starts.

* torchvision's wheel is linked to CUDA, so that its operators do not load, and importing it fails where they are looked
  up: the two that are missing are declared.
* A seed counts only with `--enable-deterministic-inference`, which knows GPU back ends: `torch_native`, which computes
  each request by itself, is let in, and the GPU kernels that would replace torch's own are left out.
"""

from __future__ import annotations

import importlib.abc
import importlib.util
import sys
from typing import Any

_kept: list[Any] = []


def _declare_operators(_):
    import torch

    library = torch.library.Library("torchvision", "DEF")
    for name in ("nms", "qnms"):
        library.define(name + "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    _kept.append(library)  # what it declares goes with it


def _let_in(module):
    module.DETERMINISTIC_ATTENTION_BACKEND_CHOICES.append("torch_native")


def _leave_out(module):
    module.enable_batch_invariant_mode = lambda *_, **__: None


class _Changes(importlib.abc.MetaPathFinder):
    """Changes modules as they are imported: before they run, or after it."""

    def __init__(self):
        self.before = {"torchvision": _declare_operators}
        self.after = {"sglang.srt.server_args": _let_in, "sglang.srt.batch_invariant_ops": _leave_out}

    def find_spec(self, name, path=None, target=None):
        if (change := self.before.pop(name, None)) is not None:
            change(None)
        if (change := self.after.pop(name, None)) is None:
            return None
        spec: Any = importlib.util.find_spec(name)  # by the finders behind this one: the name is gone from `after`
        run = spec.loader.exec_module

        def exec_module(module):
            run(module)
            change(module)

        spec.loader.exec_module = exec_module
        return spec


sys.meta_path.insert(0, _Changes())
