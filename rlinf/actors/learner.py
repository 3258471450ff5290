"""The learning itself: a model, its optimizer, and the steps between them. Blocking code without any runtime.

Consumes micro-batches. Between two optimizer steps only sums gather: gradients of un-normalised losses, and token
counts. `step` divides once, by the count of everything that came; so how it was cut does not matter.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from transformers import PreTrainedModel

from rlinf.algos import losses
from rlinf.algos.losses import LossSum
from rlinf.data.batch import PolicyBatch, Tokens


class Learner:
    """Trains one model with AdamW, a linear warm-up and a bound on the gradient's norm.

    Args:
        model: trained in place.
        lr: learning rate after warm-up.
        warmup_steps: optimizer steps over which the learning rate rises linearly; step i uses lr x i / warmup_steps.
        betas: decay of the running means of the gradient and of its square.
        weight_decay: decoupled weight decay.
        grad_clip: a gradient with a larger global norm is scaled down to it.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        lr: float,
        warmup_steps: int = 0,
        betas: tuple[float, float] = (0.9, 0.999),
        weight_decay: float = 0.0,
        grad_clip: float = 1.0,
    ):
        self.model = model.train()
        self._grad_clip = grad_clip
        self._parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
        self._optimizer = torch.optim.AdamW(self._parameters, lr=lr, betas=betas, weight_decay=weight_decay, fused=True)
        self._schedule = torch.optim.lr_scheduler.LambdaLR(
            self._optimizer, lambda done: min(1.0, (done + 1) / max(1, warmup_steps))
        )
        self._sum: LossSum | None = None

    def begin(self) -> None:
        """Forget what has gathered since the last step, such as what an interrupted call left."""
        self._optimizer.zero_grad()
        self._sum = None

    def learn_policy(
        self,
        batch: PolicyBatch,
        *,
        clip_low: float,
        clip_high: float,
        dual_clip: float | None = None,
        compare: bool = False,
    ) -> None:
        """Add a micro-batch of samples to the gradient, by `losses.policy`.

        Args:
            batch: the samples.
            clip_low, clip_high, dual_clip: of the loss.
            compare: the weights are those that sampled: measure how far our log-probs are from the engine's.
        """
        logprobs, entropy = self.logprobs(batch.tokens, batch.temperature)
        mask = batch.tokens.mask
        loss = losses.policy(
            logprobs,
            batch.old_logprobs,
            batch.advantages,
            mask,
            clip_low=clip_low,
            clip_high=clip_high,
            dual_clip=dual_clip,
            entropy=entropy,
        )
        if compare:
            apart = losses.mismatch(logprobs, batch.old_logprobs, mask)
            loss = LossSum(loss.total, loss.weight, {**loss.metrics, **apart})
        self._gather(loss)

    def learn_answers(self, tokens: Tokens) -> None:
        """Add a micro-batch of worked answers to the gradient, by `losses.supervised`."""
        logprobs, _ = self.logprobs(tokens, None)
        self._gather(losses.supervised(logprobs, tokens.mask))

    def logprobs(self, tokens: Tokens, temperature: Tensor | None) -> tuple[Tensor, Tensor]:
        """Log-prob and entropy of every token of the responses, under softmax(logits / temperature).

        Args:
            tokens: prompts with responses.
            temperature: of each row, float32 [rows]; None for 1.

        Returns:
            Log-probs, differentiable, and entropies, not; nats, float32 [rows, tokens - 1], 0 outside the mask.
        """
        mask = tokens.mask
        logits = self.model(input_ids=tokens.input_ids, use_cache=False).logits[:, :-1][mask].float()
        if temperature is not None:
            logits = logits / temperature[:, None].expand_as(mask)[mask][:, None]
        all_logprobs = torch.log_softmax(logits, dim=-1)
        chosen = all_logprobs.gather(1, tokens.targets[mask][:, None]).squeeze(1)
        with torch.no_grad():
            entropies = -(all_logprobs.exp() * all_logprobs).sum(dim=-1)
        blank = torch.zeros(mask.shape, device=chosen.device)
        return blank.masked_scatter(mask, chosen), blank.masked_scatter(mask, entropies)

    def step(self) -> tuple[LossSum, dict[str, float]]:
        """Divide by the tokens that came, clip, and take one optimizer step.

        Returns:
            What gathered, and `loss`, `grad_norm` (before clipping) and `lr` of this step.

        Raises:
            ValueError: nothing came since the last step.
            FloatingPointError: the loss or the gradient is not finite; the weights have not changed.
        """
        gathered = self._sum
        if gathered is None or float(gathered.weight) == 0:
            raise ValueError("there is not one token to learn from: every response was empty or nothing came at all")
        tokens = float(gathered.weight)
        gradients = [parameter.grad for parameter in self._parameters if parameter.grad is not None]
        torch._foreach_div_(gradients, tokens)
        norm = float(torch.nn.utils.clip_grad_norm_(self._parameters, self._grad_clip))
        loss = float(gathered.mean())
        if not (math.isfinite(loss) and math.isfinite(norm)):
            self.begin()
            raise FloatingPointError(
                f"loss {loss} and gradient norm {norm} over {tokens:.0f} tokens are not both finite: the step was not "
                "taken. A smaller learning rate is the usual cure"
            )
        lr = float(self._schedule.get_last_lr()[0])
        self._optimizer.step()
        self._schedule.step()
        self.begin()
        return gathered, {"loss": loss, "grad_norm": norm, "lr": lr}

    def _gather(self, loss: LossSum) -> None:
        loss.total.backward()  # type: ignore[no-untyped-call]
        part = loss.detach()
        self._sum = part if self._sum is None else self._sum + part
