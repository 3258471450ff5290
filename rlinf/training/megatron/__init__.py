"""The back end for models that are split over processes by Megatron-core: tensors, pipelines, contexts, experts.

Megatron-core is imported where a model is made, not here: it takes seconds, and most runs do without.
"""
