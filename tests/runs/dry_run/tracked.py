"""A training step of our own trainer code under torch's memory tracker, with fake tensors: bytes and no computation.

The tensors are fake ones of a CPU, since autograd of a CPU build refuses those of CUDA; attention goes the way of
CUDA's kernel all the same, by a stand-in that keeps what that keeps: query, key, value, the result, a number per head.

    python -m tests.runs.dry_run.tracked CASE ...      a line of JSON each, of cases as `Case.text` writes them
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, replace
from unittest.mock import patch

import numpy as np
import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed._tools.fsdp2_mem_tracker import FSDPMemTracker
from torch.distributed._tools.mem_tracker import MemTracker
from torch.distributed.device_mesh import init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore
from transformers import AutoConfig, AutoModelForCausalLM

from rlinf.algos.loss_sum import LossSum
from rlinf.config.learning import LearningSettings
from rlinf.data.packing import Packed, Row, pack
from rlinf.models.language.fsdp import ALONE, Layout, shard
from rlinf.models.language.kernels import Kernel
from rlinf.models.language.policy_model import PolicyModel
from rlinf.training.fsdp import Learner
from tests.runs.dry_run.shapes import model

QWEN2 = {
    "0.02B": (256, 1024, 4, 4, 2, 16_384, True),
    "1.5B": (1536, 8960, 28, 12, 2, 151_936, True),
    "7B": (3584, 18_944, 28, 28, 4, 152_064, False),
    "32B": (5120, 27_648, 64, 40, 8, 152_064, False),
}
"""Of Qwen2.5's sizes: hidden, inner, layers, heads, key heads, vocabulary, whether the embeddings are one."""
_EACH = 2048
"""Tokens of a sequence, a quarter of them its prompt."""


@dataclass(frozen=True, slots=True)
class Case:
    """A step to be measured."""

    size: str
    """Of `QWEN2`."""
    ranks: int
    """That share the model in slices."""
    tokens: int
    """Of a micro-batch."""
    checkpointed: bool
    """Only the input of each layer is kept."""
    entropies: bool = False
    """The loss differentiates them."""

    @property
    def text(self) -> str:
        """As an argument."""
        return json.dumps(asdict(self))


def qwen2(size: str):
    """The transformers config of a size; or of a larger model with so many layers, as in "qwen3-30b-a3b/4"."""
    if "/" in size:
        name, _, layers = size.partition("/")
        return model(name, int(layers))
    names = (
        *("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads"),
        *("vocab_size", "tie_word_embeddings"),
    )
    return AutoConfig.for_model("qwen2", **dict(zip(names, QWEN2[size], strict=True)))


@torch.library.custom_op("rlinf_tests::attend", mutates_args=())
def attend(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    raise NotImplementedError


@torch.library.custom_op("rlinf_tests::attend_back", mutates_args=())
def attend_back(
    grad: torch.Tensor, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    raise NotImplementedError


@attend.register_fake
def _(query, key, value):
    return torch.empty_like(query), query.new_empty(query.shape[1], query.shape[0], dtype=torch.float32)


@attend_back.register_fake
def _(grad, query, key, value):
    return torch.empty_like(query), torch.empty_like(key), torch.empty_like(value)


attend.register_autograd(
    lambda ctx, grad, _: attend_back(grad, *ctx.saved_tensors[:3]),
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs, *output),
)


def _attend(query, key, value, bounds, longest, scale, left):
    return attend(query.contiguous(), key.contiguous(), value.contiguous())[0]


@contextmanager
def _numbers_made_up() -> Iterator[None]:
    """Fake tensors have no values, which an optimizer step looks at to see that they are finite."""
    with ExitStack() as stack:
        stack.enter_context(patch.object(torch.Tensor, "__float__", lambda self: 1.0))
        stack.enter_context(patch.object(torch.Tensor, "tolist", lambda self: [1.0] * max(1, self.numel())))
        yield


def _loss(batch: Packed, outputs: tuple[torch.Tensor, torch.Tensor]) -> LossSum:
    logprobs, entropies = outputs
    return LossSum((logprobs * batch.advantages + 0.01 * entropies).sum(), batch.mask.sum().float(), {})


def peak_of(case: Case) -> int:
    """Bytes at the peak of a later optimizer step of two micro-batches: everything that a step ever finds is there."""
    dist.init_process_group("fake", rank=0, world_size=case.ranks, store=FakeStore())
    rows = [Row(np.arange(_EACH // 4) + n, np.arange(_EACH * 3 // 4 + 1)) for n in range(case.tokens // _EACH)]
    packed = pack(rows)
    mesh, mode = init_device_mesh("cpu", (case.ranks,)), FakeTensorMode(allow_non_fake_inputs=True)
    try:
        with _numbers_made_up(), mode:
            model = AutoModelForCausalLM.from_config(qwen2(case.size), dtype=torch.float32)
            module = PolicyModel(model, gradient_checkpointing=case.checkpointed)
            if case.ranks > 1:
                shard(module, mesh, torch.bfloat16)
            else:
                module.compute_in(torch.bfloat16)
            module.kernel = Kernel("a variable-length kernel that has only shapes", _attend)
            learner = Learner(module, LearningSettings(lr=1e-3), Layout(mesh, mesh) if case.ranks > 1 else ALONE)
            named = {name: getattr(packed, name) for name in packed.__slots__}
            fakes = {n: mode.from_tensor(one) for n, one in named.items() if isinstance(one, torch.Tensor)}
            batch = replace(packed, **fakes)
            # the first step, unwatched: where the optimizer makes its state, the tracker counts what only fakes have
            learner.accumulate([batch], _loss, entropy_slope=case.entropies)
            learner.step()
            learner.accumulate([batch], _loss, entropy_slope=case.entropies)
            tracker = FSDPMemTracker(module, learner.optimizer) if case.ranks > 1 else MemTracker()
            if module._working is not None:
                tracker.track_external(module, learner.optimizer, *module._working._copies.values())
            with tracker:
                learner.accumulate([batch], _loss, entropy_slope=case.entropies)
                learner.step()
            return int(tracker.get_tracker_snapshot("peak")[torch.device("cpu")]["Total"])
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    for text in sys.argv[1:]:
        print(json.dumps({"peak": peak_of(Case(**json.loads(text)))}))
