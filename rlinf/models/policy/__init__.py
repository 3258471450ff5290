"""Policies that act in environments, behind one protocol (`base`).

Networks and distributions; no trainer, no environment.
"""
