"""Text generation with a transformers model in the actor's own process: continuous batching.

Only the engine's own parts; the protocol is `engines.base`.
"""
