"""The computations of trainers: batches, passes, schedules, optimizer steps, weight transfer, checkpoints.

`backend` is the protocol of what trains, `fsdp` and `megatron` have it; `schedule` cuts and orders micro-batches,
`policy` makes advantages and losses of groups, `weight_sync` publishes and receives. No endpoints, no processes.
"""
