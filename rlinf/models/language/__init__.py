"""Language models as we train them: loading, packed attention, log-prob heads, sharding, adapters.

No losses and no optimizers: those are `algos` and `training`.
"""
