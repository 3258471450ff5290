"""Models: language models as we train them (`language`), and policies that act (`policy`).

Networks only; losses are `algos`, optimizer steps `training`.
"""
