"""Engines of other processes that join a running job, and leave it or are lost, while it goes on.

`pool` is the job's side, an engine that shares its requests with those that joined; `far_side` is theirs;
`connection` is what they speak over.
"""
