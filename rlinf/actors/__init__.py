"""The roles of a run as actors: their endpoints and state, and work on the compute thread in the right order.

`rollout`, `judge`, `trainer`, `critic`, `reference` and `reward_model` for text; `env`, `policy`, `policy_trainer` and
`off_policy_trainer` for acting; `base` is what those with a model share. What they compute is in `training`.
"""
