"""Configurations of verl's and RLinf's as ours: `rlinf convert THEIRS.yaml OURS.yaml`.

A package beside `rlinf`, installed with it, which imports nothing of this one: what other frameworks' keys mean changes
as they do. `foreign` reads their files, `convert` applies the tables of `conversions` to them.
"""
