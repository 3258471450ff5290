"""Every key of a configuration with its type, default, limits and meaning, and how YAML becomes them.

`text`, `embodied`, `learning` and `common` have the keys, `load` reads files and overrides, `importing` resolves dotted
paths. Rules that ask engines, placement or data are in `runs.rules`.
"""
