"""The command line: train, evaluate, plan, trace, dry run, and what is wrong with a configuration.

Prints and parses; a run itself is `job`.
"""
