"""What processes of runs import, for the fork server that starts them: most of a small run's time would be imports."""

import importlib
import pkgutil
from collections.abc import Iterator

import transformers.models.llama.modeling_llama
import transformers.models.qwen2.modeling_qwen2  # noqa: F401
import uvloop  # noqa: F401

ROOMS = ("actors", "algos", "cli", "flows", "models.language", "models.policy", "runs", "storage")
"""With all below them."""
SINGLE = ("engines.transformers", "training", "training.embodied", "rewards", "envs")
"""Without what is below: it asks for packages that few runs need."""


def modules() -> Iterator[str]:
    """Their names."""
    for room in ROOMS:
        name = f"rlinf.{room}"
        yield from (each.name for each in pkgutil.walk_packages(importlib.import_module(name).__path__, f"{name}."))
    for room in SINGLE:
        name = f"rlinf.{room}"
        found = pkgutil.iter_modules(importlib.import_module(name).__path__, f"{name}.")
        yield from (each.name for each in found if not each.ispkg)


for module in modules():
    try:
        importlib.import_module(module)
    except ModuleNotFoundError as error:
        if (error.name or "").startswith("rlinf"):
            raise  # a wrong name here; what asks for a package that is not there (triton without CUDA) is left out
