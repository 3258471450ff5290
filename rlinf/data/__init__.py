"""What travels between the roles, and where it comes from: prompts, samples, batches, weights, tokenizers.

Plain data and pure functions of it; no roles, no models.
"""
