"""The transformers engine: text generation in the actor's own process, by continuous batching.

Only this engine's own parts; what every engine has is in `engines/base.py`.
"""
