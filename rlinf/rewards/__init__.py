"""Reward functions, how their arguments are found, and the child processes in which they run.

`base` calls any function, `pool` runs it in processes that may be killed; `joined` has others help, whose side is
`far_side`; one file per reward that comes with it.
"""
