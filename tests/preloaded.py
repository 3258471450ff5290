"""What processes of runs import, for the fork server that starts them: most of a small run's time would be imports."""

import importlib
import pkgutil

import transformers.models.llama.modeling_llama
import transformers.models.qwen2.modeling_qwen2  # noqa: F401

for room in ("actors", "cli", "flows", "job"):
    for module in pkgutil.iter_modules(importlib.import_module(f"rlinf.{room}").__path__):
        importlib.import_module(f"rlinf.{room}.{module.name}")
