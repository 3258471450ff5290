"""Text generation behind one interface, `base.Engine`; `base.make` makes the engine that is named.

`transformers` generates in the actor's own process, `served` around an inference server (SGLang, vLLM). Nothing here
knows of actors, leases or flows.
"""

ENGINES = {
    "transformers": "rlinf.engines.transformers.engine.build",
    "sglang": "rlinf.engines.served.sglang.build",
    "vllm": "rlinf.engines.served.vllm.build",
}
"""Engines that have a short name, and the functions that make them."""
