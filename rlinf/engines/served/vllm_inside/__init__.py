"""What runs in vLLM's processes, in its own environment; nothing of rlinf imports it. `serve.py` is run by its path."""
