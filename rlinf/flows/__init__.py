"""Macro flows: one step of an algorithm as one async function, in the words of reinforcement learning alone."""
