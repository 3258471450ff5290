"""The roles of a run as actors: endpoints, state, and the compute thread's work in the right order.

What is computed is `training`, `engines`, `models`; what a step does with roles is `flows`.
"""
