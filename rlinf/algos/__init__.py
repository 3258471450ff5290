"""Advantages and losses as pure functions of tensors and masks, with formula, paper and equation number.

`recipes` has whole algorithms by name, `algorithms` what a recipe is made of and how a batch goes through it, `losses`,
`advantages`, `critic_losses` and `preference` the functions, `loss_sum` sums that are divided once.
"""
