"""Decoding on GPUs: a step is one recorded graph, sampling included, and its tokens are told while the next one runs.

`graphed_rows` is what the decode batch sees; the other modules are its parts.
"""
