"""Plain data that travels between the roles, and where it comes from; no roles and no models.

`sample` (prompts, answers, groups), `packing`, `weights` (the manifest), `tokenizer`, `rng` (by counters, not by
order), `ledger` (what became of every sample); folders for data sets, demonstrations and work in flight.
"""
