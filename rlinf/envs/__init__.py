"""Simulators behind one protocol, and what every environment needs around them once: chunks, resets, seeds, metrics.

Steps worlds, in child processes; no policies and no learning.
"""
