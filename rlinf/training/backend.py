"""The protocol between trainers and back ends that train a language model: FSDP2, and others beside it.

A trainer gives micro-batches and losses of the model's outputs; a back end takes optimizer steps, and gives weights
under the names of Hugging Face checkpoints, and checkpoints. It knows nothing of reinforcement learning, and a trainer
nothing of process groups: it asks which share of a round each rank computes, and calls every method on all ranks, in
one order, since each may be a collective. All methods but `make` block; they run in the actor's compute thread.

Sums are un-normalised until `Optimization.step`, which divides once, by the weight of everything that came to all
ranks. So a back end never averages: neither over micro-batches nor over ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, Self

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from transformers import PreTrainedTokenizerBase

from rlinf.algos.loss_sum import LossSum
from rlinf.config.importing import resolve
from rlinf.config.learning import BACK_ENDS, LearningSettings
from rlinf.data.packing import Packed
from rlinf.data.weights import Export
from rlinf.models.language.build import ModelSpec
from rlinf.models.language.lora import POLICY
from rlinf.models.language.moe import Routed
from rlinf.training.checkpoint import HostCopy, Restored, Source, StateCopy
from rlinf.training.optimizer import Adam

Outputs = tuple[Tensor, Tensor] | tuple[Tensor, Tensor, Routed]
"""For each learned token, float32: log-prob and entropy [learned]; or, of a value model, the value before it [learned]
and the hidden state that it is read from [learned, width]; a reward model has scores for values. Of
a mixture of experts with `router_replay` a third: how tokens were routed."""
Loss = Callable[[Packed, Outputs], LossSum]
"""The un-normalised loss of a micro-batch, given the outputs for it; both are on the model's device."""


class Ranks(Protocol):
    """The processes that train one model, seen from one of them; a trainer actor is one."""

    mesh: DeviceMesh | None
    """All of them, in order; None for one."""
    device: torch.device
    """Where this one computes."""

    @property
    def rank(self) -> int: ...
    @property
    def world_size(self) -> int: ...
    @property
    def machines(self) -> list[str]:
        """The machine of each rank."""
        ...

    async def mesh_of(self, ranks: Sequence[int], purpose: str, rows: int | None = None) -> DeviceMesh:
        """A mesh of some ranks, in so many rows where it has two dimensions; each of them calls this, for a purpose
        that no other mesh of theirs has."""
        ...

    def compute(self, fn: Callable[..., Any], /, *args: Any) -> Coroutine[Any, Any, Any]:
        """Run blocking work in the compute thread."""
        ...


class Optimization(Protocol):
    """An optimizer of the model's trained parameters, and the gradients gathered for its next step."""

    def begin(self) -> None:
        """Forget what has gathered since the last step, such as what an interrupted call left."""

    def accumulate(self, batches: Sequence[Packed], loss: Loss, *, entropy_slope: bool = False) -> None:
        """Add the gradients of some micro-batches.

        A pipeline may compute them interleaved, so `loss` is called in any order, once for each on every rank that has
        outputs.

        Args:
            batches: of this rank's share of the batch; as many on every rank, empty ones among them.
            loss: differentiable by the outputs.
            entropy_slope: it differentiates entropies too.
        """

    def step(self, adam: Adam | None = None) -> tuple[LossSum, dict[str, float]]:
        """Divide by the weight of everything that came to all ranks, clip, and take one optimizer step.

        Args:
            adam: hyperparameters of this step, before which nothing is divided; None: its own, at its learning rate.

        Returns:
            What gathered on all ranks, and `loss`, `grad_norm` (before clipping) and `lr` of this step.

        Raises:
            ValueError: nothing came since the last step.
            FloatingPointError: the loss or the gradient is not finite; the weights have not changed.
        """
        ...

    def pass_over(self, count: int) -> None:
        """So many optimizer steps that were planned are not taken: the learning rate goes on behind them, so that a
        schedule ends with the run. Steps of the warm-up are never passed over."""


class BackEnd(Protocol):
    """A language model that can be trained, as one of its ranks sees it."""

    data_ranks: Sequence[int]
    """The share of a round of micro-batches that each rank computes, from 0. Ranks that are parts of one model
    (tensor-parallel, or stages of a pipeline) have the same."""
    copies_of_ranks: Sequence[Sequence[int]]
    """The ranks of each copy of the model, as many in each. `accumulate` and `outputs` communicate within one alone,
    and copies meet in `step`; a single one if that is not so."""

    @classmethod
    async def make(cls, ranks: Ranks, model: ModelSpec, tokenizer: PreTrainedTokenizerBase) -> Self:
        """Make the model on all ranks together.

        Raises:
            ValueError: a model or setting that this back end cannot train.
        """
        ...

    def optimization(self, settings: LearningSettings) -> Optimization:
        """A new optimizer. Several may share the model, one at work at a time."""
        ...

    def outputs(self, batch: Packed, *, adapter: str | None = POLICY) -> Outputs:
        """The model's outputs for a micro-batch, without gradient: as it learns, with other adapters of
        `ModelSpec.adapters`, or, for None, with none."""
        ...

    def export(self, dtype: torch.dtype | None = None) -> Iterator[tuple[str, Tensor | Export]]:
        """Tensors under the names of the Hugging Face checkpoint, adapters added in: whole or as `DTensor`s, at once or
        each when it is needed.

        Every rank runs it to its end and has what it yields gathered, in that order (`weight_sync.pack`). What it
        yields must not be changed.

        Args:
            dtype: what floating-point tensors are cast to before they are sent, which `pack` does for those that are
                not yet; None leaves them as they are.
        """
        ...

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Shapes of the layers that a policy has too, by checkpoint name."""
        ...

    def take(self, named: Mapping[str, Tensor]) -> None:
        """Overwrite those layers with whole tensors; the rest of the model, and optimizers, stay as they are."""

    def copies(
        self,
        optimization: Optimization,
        version: int,
        extra: Mapping[str, Any],
        tokenizer: PreTrainedTokenizerBase,
    ) -> Mapping[str, HostCopy]:
        """Copies in host memory of all that this rank writes into a checkpoint, by directory: `STATE` to go on from, in
        a form that does not depend on the number of ranks, `MODEL` for `from_pretrained`, and, with adapters,
        `ADAPTER` for peft.

        Args:
            optimization: whose optimizer belongs to it.
            version: of the weights.
            extra: JSON values that `restore` gives back.
            tokenizer: written beside the model.
        """
        ...

    def state(self, optimization: Optimization, version: int, extra: Mapping[str, Any]) -> StateCopy:
        """The `STATE` of `copies` alone, for ranks that go on elsewhere; arguments as there."""
        ...

    def restore(self, optimization: Optimization, source: Path | Source) -> Restored:
        """Go on from a `STATE` that any number of ranks wrote or exported: with its weights, what its optimizer
        remembers and its place in the schedule, and with the hyperparameters that `optimization` was given.

        Args:
            optimization: whose optimizer takes it over.
            source: its directory, or where else it is; for `load_state`.

        Raises:
            FileNotFoundError: there is no complete state.
            ValueError: it does not fit, or is damaged.
        """
        ...

    def held(self, *optimizations: Optimization) -> Iterator[Tensor]:
        """All tensors on the device that outlive a call, for `Parking`: what to move to host memory and back."""
        ...


def back_end_of(name: str) -> type[BackEnd]:
    """The class that a setting means: a short name of `BACK_ENDS`, or a dotted path.

    Raises:
        ValueError: there is nothing of that name.
    """
    try:
        return resolve(BACK_ENDS.get(name, name))  # type: ignore[no-any-return]
    except (ImportError, AttributeError) as error:
        raise ValueError(
            f"backend={name!r} is neither {' nor '.join(BACK_ENDS)} nor the dotted path of a class: {error}"
        ) from error
