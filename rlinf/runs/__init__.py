"""One run, from its configuration to its end.

`start` runs a checked configuration; `rules` and `prepare` check it, `roles` spawns, `loop` is around the steps,
`evaluation` and `resume` are beside it. `dry_run` estimates, `live` feeds the page, `library` is `Session` and `train`.
"""
