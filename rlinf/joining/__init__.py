"""Processes that are no members of a job, join it while it goes on, and leave it or are lost.

`listener` is where they come in, and what each end does there; `connection` is what they speak over; `peer` is the
job's view of one of them; `address` is where a job listens. What they do for the job lies above, such as
`engines/pool`.
"""
