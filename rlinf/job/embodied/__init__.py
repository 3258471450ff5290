"""Runs of policies that act: their loop, their roles, and trials without training."""
