"""Where roles run, when they own a device, and how far that is from the best possible.

`grammar` and `seats` read what is asked for, `plan` is a placement, `profile` and `costs` what roles take, `planner`,
`asynchronous` and `auto` choose, `simulate` rehearses. No torch; roles are moved by `runs.placement_manager`.
"""
