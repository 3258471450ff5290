"""What a rank computes of a split model: Megatron-core's layers, our attention between them and our ends around them.

`standins` has Megatron-core work where there is no CUDA. Nothing here knows of optimizers or checkpoints.
"""
