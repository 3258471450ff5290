"""Which plan to follow: the planner's finalists rehearsed, and when a running job changes its placement.

Decides; moving roles is `job.placement_manager`.
"""
