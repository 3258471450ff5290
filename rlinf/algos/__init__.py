"""Advantages and losses: pure functions of tensors and masks, with their formulas and where they come from."""
