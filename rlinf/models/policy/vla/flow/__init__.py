"""Policies that act by denoising (flow matching): pi0, pi0.5, and a small one on states.

`matching` is the arithmetic of denoising as a policy, `policy` what all of them share.
"""
