"""The engine that decodes as on GPUs, its graphs replaced by operations that are replayed on the CPU."""

from rlinf.engines.transformers import engine

REHEARSED = "tests.stand_ins.recorder.Recorder"


async def build(setup, **settings):
    return await engine.build(setup, graphs=REHEARSED, **settings)
