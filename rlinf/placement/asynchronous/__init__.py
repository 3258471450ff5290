"""Plans for flows with work in flight between steps: what a step takes in the long run, and which staleness pays.

Pure functions of a workload.
"""
