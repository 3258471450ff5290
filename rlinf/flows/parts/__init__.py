"""Pieces that several flows use.

Coroutines over roles, like flows: no devices, no timers.
"""
