"""Policies that act in environments: networks behind one protocol, from two layers on a state to a small VLA."""
