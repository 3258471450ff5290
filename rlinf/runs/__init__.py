"""One run, from its configuration to its end: checks, roles, the loop of steps, checkpoints, evaluation, going on."""
