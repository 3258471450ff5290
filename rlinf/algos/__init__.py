"""Advantages and losses: pure functions of tensors and masks, with their formulas and where they come from.

`spec` names whole algorithms, `apply` runs one on a batch.
"""
