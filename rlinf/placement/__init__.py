"""Where roles run, when they own a device, and how far that is from the best.

Pure logic: no torch, no process; moving roles is `job.placement_manager`.
"""
