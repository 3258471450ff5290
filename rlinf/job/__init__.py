"""One run from its configuration to its end: roles started, steps counted, checkpoints, placements that change.

No command-line parsing and no reinforcement learning: that is `cli` and `flows`.
"""
