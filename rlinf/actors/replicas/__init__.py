"""Replicas of a trainer that come and go: `joined` is the trainer's side, `far_side` is theirs."""
