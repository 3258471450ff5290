"""Weights on their way: from trainer to engines, to checkpoints, to Hugging Face directories.

Moves tensors by name; computes nothing with them.
"""
