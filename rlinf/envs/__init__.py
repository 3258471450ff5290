"""Simulators behind one protocol, `base.Simulator`, and what every environment needs around them.

`environment` adds chunks, resets, seeds and metrics, `workers` child processes, `wrappers` rules and mixtures of tasks;
adapters are a file each, those that are installed apart in `adapters`. No policies and no learning.
"""
