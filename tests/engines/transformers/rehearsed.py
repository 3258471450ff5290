"""The engine that decodes as on GPUs, its graphs replaced by operations that are replayed on the CPU."""

from rlinf.engines.transformers import engine


async def build(setup, **settings):
    return await engine.build(setup, graphs="rehearse", **settings)
