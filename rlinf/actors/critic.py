"""The critic: predicts, before every token of an answer, the reward still to come, and learns from the returns.

Consumes judged groups, twice: `values` gives its predictions, on micro-batches as groups come; `train`, once a batch
has ended, learns from the returns of that batch. The ranks compute together and answer as one; how they do is
`text_trainer.py`'s business. `train` takes its turn after it has read its batch, so a `values` that makes this batch,
and is on its way still, goes first whichever of the two calls arrives first.
"""

from __future__ import annotations

from collections.abc import AsyncIterable, AsyncIterator, Iterable
from contextlib import aclosing
from functools import partial

from torch import Tensor

from rlinf.actors.base import configured
from rlinf.actors.text_trainer import TextTrainer
from rlinf.algos.algorithms import value_loss_of
from rlinf.algos.loss_sum import LossSum, counted
from rlinf.config.learning import CriticSettings
from rlinf.data.packing import Packed
from rlinf.data.sample import Group
from rlinf.data.tokenizer import TokenizerSource
from rlinf.data.weights import Weights
from rlinf.models.language.build import ModelSource, ModelSpec
from rlinf.runtime.actor.actor import endpoint
from rlinf.runtime.base.calls import start_apart
from rlinf.runtime.streams.stream import each
from rlinf.training.backend import Optimization, Outputs
from rlinf.training.batch_metrics import describe_values, taken_steps
from rlinf.training.policy import RETURNS, VALUES, Algorithm, algorithm_of, value_rows
from rlinf.training.schedule import BatchPlan, BatchSchedule, Forward, ForwardBackward

Groups = Iterable[Group] | AsyncIterable[Group]


class Critic(TextTrainer):
    """Owns a model of what answers will earn."""

    @configured(CriticSettings)
    async def setup(
        self,
        *,
        model: ModelSource,
        tokenizer: TokenizerSource,
        settings: CriticSettings,
        algorithm: Algorithm = "ppo",
        seed: int = 0,
    ) -> None:
        """Make the model on the ranks, and its optimizer.

        Args:
            model: a policy's Hugging Face directory, or the configuration of a new one: the critic has its layers, and
                a head that says 0 until it has learned.
            tokenizer: a Hugging Face directory, or `{"characters": alphabet}`.
            settings: how it computes and learns; or any of its keys, such as lr=1e-4. The head is float32 whatever
                `dtype` says.
            algorithm: a recipe's name, `{"name": "ppo", "overrides": {...}}`, or a spec: says what returns are, and the
                loss. The trainer's.
            seed: of a new model's weights, and of the order of minibatches.

        Raises:
            ValueError: a model or tokenizer that cannot be made, a setting that does not exist, an algorithm without a
                critic, or two ranks on a host.
        """
        self._spec, self._settings, self._seed = algorithm_of(algorithm), settings, seed
        if self._spec.critic is None:
            raise ValueError(f"critic: algorithm {self._spec.name!r} has none: take 'ppo', or leave the role out")
        await self._make(ModelSpec(model, "values", seed, compute=settings), tokenizer)

    # Predicting --------------------------------------------------------------------------------------------------

    @endpoint(device=True, gang=True, late=True)
    async def values(self, groups: Groups) -> AsyncIterator[Group]:
        """Groups with what is still to be expected before each token of their answers, under `values`.

        Args:
            groups: a list or a stream of them, judged.

        Yields:
            Each group as soon as it is complete, in the order of prompts' ids (or, with order "arrival", as they come).
            Answers whose judging failed have NaN, for nobody learns from them.
        """
        async with aclosing(self._annotated(groups, (VALUES,))) as annotated:
            async for group in annotated:
                yield group

    def _score(self, command: Forward) -> Tensor:
        return self._back.outputs(command.packed())[0][None]

    # Learning ----------------------------------------------------------------------------------------------------

    @endpoint(device=True, joint=True, late=True)
    async def train(self, groups: Groups) -> dict[str, float]:
        """Learn from a batch of groups that `values` has seen: `epochs` x `minibatches` optimizer steps.

        Args:
            groups: a list or a stream of them, judged, with values. Samples without a reward count as not drawn.

        Returns:
            `critic/loss`, `critic/grad_norm` and `critic/lr` of the last optimizer step; `critic/clip_frac`, the share
            of predictions that had moved beyond the bound; of the values that came with the batch `values/mean`,
            `returns/mean` and `critic/explained_variance`; and `reward/mean`. None on other ranks than 0.

        Raises:
            ValueError: a group that was not judged or has no values, or nothing to learn from.
            FloatingPointError: the loss or its gradient is not finite; that step was not taken.
        """
        batch = await start_apart(_read(groups), "batch") if self.rank == 0 else []
        settings, seed = self._settings, (self._seed, self.version)
        plan = BatchPlan("critic.train", seed, settings.epochs, settings.minibatches, whole_batch=True)
        schedule = BatchSchedule(partial(value_rows, self._spec), plan, self._packing, self.compute)
        steps = await self._work(schedule.commands(batch), self._learner, _of_critic)
        if self.rank > 0:
            return {}
        metrics = taken_steps(steps)
        return {
            **await self.compute(describe_values, schedule.groups, schedule.learned.rows),
            **{f"critic/{name}": metrics[name] for name in ("loss", "grad_norm", "lr")},
            "critic/clip_frac": metrics.get("value_clip_frac", 0.0),
        }

    def _learn(self, learner: Optimization, command: ForwardBackward, *, again: bool = False) -> None:
        def loss(batch: Packed, outputs: Outputs) -> LossSum:
            values = outputs[0]
            old, returns = (
                batch.columns.get(name, values.detach()) for name in (VALUES, RETURNS)
            )  # none without a row
            return value_loss_of(
                self._spec, values, old, returns, batch.mask, counted(batch.sequences, len(batch.lengths))
            )

        learner.accumulate([command.packed()], loss)

    # Starting from a policy --------------------------------------------------------------------------------------

    @endpoint(device=True, joint=True)
    async def load(self, weights: Weights) -> int:
        """Take a policy's weights for the layers, on all ranks or, with an error, on none; the head stays as it is.

        For the time before the critic has learned: what its optimizer remembers stays, too.

        Args:
            weights: published by a trainer of the same model.

        Returns:
            Their version; the critic's own does not change.

        Raises:
            ValueError: they are damaged, or do not fit.
        """
        await self.compute(self._fits, weights)  # a rank that finds fault never takes its turn, so no other does

        await self.compute_spmd(self._back.take, dict(weights.named()))
        return weights.version

    def _fits(self, weights: Weights) -> None:
        weights.verify()
        offered = {name: tuple(tensor.shape) for name, tensor in weights.named()}
        wanted = self._back.shapes()
        wrong = [
            f"{name} is {offered.get(name)}, not {shape}"
            for name, shape in wanted.items()
            if offered.get(name) != shape
        ]
        if wrong:
            raise ValueError(
                f"critic.load: {len(wrong)} of the policy's {len(wanted)} tensors do not fit ({'; '.join(wrong[:3])}). "
                "A critic whose model (critic.model) is not the policy's starts from its own files instead"
            )


async def _of_critic(error: FloatingPointError, met: int) -> FloatingPointError:
    return FloatingPointError(f"critic, version {met}: {error}")


async def _read(groups: Groups) -> list[Group]:
    return [group async for group in each(groups)]
