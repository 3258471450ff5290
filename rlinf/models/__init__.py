"""Networks: language models as we train them, policies that act, and models that score.

Networks only; losses are in `algos`, optimizer steps in `training`.
"""
