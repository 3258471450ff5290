"""Measurements: each runs as `python -m benchmarks.NAME` and prints ours beside its peers."""
