"""Reward functions, how their arguments are found, and the child processes in which they run.

Scores single answers; what is learned from scores is `algos`.
"""
