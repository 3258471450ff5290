"""Flows: each is one step of an algorithm as one async function over roles.

No devices, no timers, no configuration: which role runs where, and what runs side by side, is decided below.
"""
