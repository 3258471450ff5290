"""Sums, masks and sequence bookkeeping on tensors that losses and advantages share.

Pure functions without algorithm names.
"""
