"""What off-policy trainers compute: a replay buffer, and the optimizer steps of SAC, CrossQ and IQL."""
