"""Text generation in the actor's own process, by continuous batching of transformers' models.

`engine` drives, `batch` has the rows, `cache` keys and values, `model` the forward pass, `graphs` and `paged_attention`
steps that are recorded on GPUs.
"""
