"""Replicas of a trainer that come and go.

`joined` is the side of a trainer of one process, `helpers` that of one of several, both with `members`; `far_side` is
the replicas'.
"""
