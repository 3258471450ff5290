"""From trajectories and transitions to gradients of a policy.

Batches, replay, PPO- and SAC-like steps, behaviour cloning; no simulators.
"""
