"""Policies for off-policy learning: a squashed normal distribution, and critics that judge actions beside it."""
