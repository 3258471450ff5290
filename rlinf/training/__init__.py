"""What trainers compute: batches, passes, schedules, optimizer steps, for text and for policies that act.

No endpoints, no processes: actors call this.
"""
