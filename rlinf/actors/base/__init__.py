"""What several roles share: ranks in step, the base of trainers, calls in flight, hand-over of unfinished answers.

No role of its own lives here, and nothing that only one role uses.
"""
