"""The search for the best placement of a profiled flow.

Pure functions of a workload.
"""
