"""Modules that run in vLLM's processes, in its own environment; rlinf imports none. `serve.py` is run by its path."""
