"""A model that is split over processes: what the process that has the most has of it.

In: the numbers of a model, and how a copy is split. Out: the same numbers of a part. No weights are read.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from rlinf.config.learning import ParallelConfig, TrainerConfig
from rlinf.job.checks.transformer import Shape


def splits_whole(trainer: TrainerConfig) -> bool:
    """Whether processes have parts of their own, which stay; otherwise all share one copy, or each has one (FSDP)."""
    return trainer.backend == "megatron"


def part_of(shape: Shape, parallel: ParallelConfig) -> Shape:
    """The largest part of a model that is split by Megatron-core, with weights that stay where they are.

    A stage has ceil(layers / pipeline) layers, of which a process has 1 / tensor of the matrices and 1 / expert of the
    experts. The first has the input embedding and the last the output embedding, 1 / tensor of each; of tied ones both
    have a copy. Norms and routers, which every process of a stage has, are counted as if they were split.

    Args:
        shape: of the whole model.
        parallel: how it is split.
    """
    stages, tensor = parallel.pipeline, parallel.tensor
    layers = -(-shape.layers // stages)
    dense = shape.layer - shape.expert_parameters / shape.layers
    inside = layers * (dense / tensor + shape.expert_parameters / shape.layers / parallel.expert)
    outside = (shape.outside if stages == 1 else shape.head) / tensor
    return replace(
        shape,
        parameters=int(inside + outside),
        outside=int(outside),
        layers=layers,
        vocabulary=-(-shape.vocabulary // tensor),
        expert_parameters=int(layers * shape.expert_parameters / shape.layers / parallel.expert),
    )


def tokens_of(tokens: int, parallel: ParallelConfig) -> int:
    """Tokens of a micro-batch whose activations a process keeps: contexts divide them, and so do tensors, since what is
    not split by heads or columns is split by tokens (sequence parallelism)."""
    return -(-tokens // (parallel.context * parallel.tensor))


def gathered_of(shape: Shape, parallel: ParallelConfig) -> Shape:
    """What FSDP2 gathers, where layers are split by tensors or experts besides: only a process's own part of them.

    Widths stay: of what lies between matrices a process has all columns of its part of the tokens (`tokens_of`), and
    within them its columns of all tokens, which is as much.
    """
    experts = shape.expert_parameters / parallel.expert
    dense = shape.parameters - shape.outside - shape.expert_parameters
    outside = shape.outside / parallel.tensor
    return replace(
        shape,
        parameters=int(dense / parallel.tensor + experts + outside),
        outside=int(outside),
        expert_parameters=int(experts),
    )


def engine_split(engine_args: dict[str, Any]) -> int:
    """Devices over which an engine splits a model, by `rollout.engine_args.tensor_parallel`."""
    given = engine_args.get("tensor_parallel", 1)
    return given if isinstance(given, int) and given > 0 else 1
