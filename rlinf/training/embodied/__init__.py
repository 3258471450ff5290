"""Gradients of a policy from trajectories and transitions: batches, replay, PPO, SAC, cloning; no simulators."""
