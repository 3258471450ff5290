"""Language models as we train them: loading, packed attention, log-prob head, sharding, adapters, experts.

No losses and no optimizers: those are in `algos` and `training`.
"""
