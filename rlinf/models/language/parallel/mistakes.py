"""Whether a model can be split over ranks as it is asked for: everything that is wrong, at once.

In: a model, which may be without memory, and how it is to be split. Out: sentences.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from transformers import PreTrainedModel

from rlinf.config.learning import ParallelConfig
from rlinf.models.language.parallel.experts import experts_of
from rlinf.models.language.parallel.matrices import plan_of


def mistakes_in(model: PreTrainedModel, parallel: ParallelConfig, *, adapters: bool) -> Iterator[str]:
    """What is wrong with a way to split a model.

    Args:
        model: the plain model, such as one on the meta device.
        parallel: how a copy is to be split.
        adapters: it is to be trained by adapters.
    """
    yield from stages_refused(parallel)
    checks: tuple[tuple[Callable[[PreTrainedModel, int], Any], int], ...] = (
        (plan_of, parallel.tensor),
        (experts_of, parallel.expert),
    )
    for check, parts in checks:
        try:
            if parts > 1:
                check(model, parts)
        except ValueError as error:
            yield str(error)
    if adapters and parallel.tensor > 1:
        yield (
            f"trainer.parallel.tensor={parallel.tensor}: matrices with adapters (model.lora) are not split; "
            "trainer.parallel.context splits the tokens instead"
        )


def stages_refused(parallel: ParallelConfig) -> Iterator[str]:
    """What of `parallel` is for other back ends."""
    for name in ("pipeline", "interleave"):
        if (size := getattr(parallel, name)) > 1:
            yield f"trainer.parallel.{name}={size}: fsdp has no stages; take tensor and context, or megatron"
