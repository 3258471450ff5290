"""Text generation behind one interface (`base.py`); `make.py` makes the engine that `rollout.engine` names.

Each engine has a folder of its own, or is somebody else's code. Nothing here knows of actors, leases or flows.
"""

ENGINES = {
    "transformers": "rlinf.engines.transformers.engine.build",
    "sglang": "rlinf.engines.served.sglang.build",
    "vllm": "rlinf.engines.served.vllm.build",
}
"""Engines that have a short name, and the functions that make them."""
