"""What roles cost, and how far a step is from its lower bound: spans to profiles, workloads, bounds.

Pure functions of measured spans.
"""
