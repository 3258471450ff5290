"""A Hugging Face model as the critic sees it: packed tokens in, a value before each learned token out.

In: a `Packed` micro-batch. Out: what the rest of an answer is expected to earn, as seen from the place that predicts
each of its tokens, so before that token is known. The layers are those of a policy, run in the same way; in place of
the output embedding, which is given up, stands one linear unit.

The unit is the model's `score`, the name that transformers gives to it in models for token classification: what
`save_pretrained` would write, `AutoModelForTokenClassification.from_pretrained(path, num_labels=1)` reads.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from transformers import PreTrainedModel

from rlinf.data.packing import Packed
from rlinf.models.language.policy_model import PolicyModel

HEAD = "score."
"""How the names of the unit's parameters begin; a policy has all the others too."""


class ValueModel(PolicyModel):
    """Values by the layers of a causal language model.

    Args:
        model: the Hugging Face model, changed in place; what it keeps has the names that it has in the policy.
        gradient_checkpointing: keep only the input of each layer, and compute the rest again for the gradient.
        more: `attention`, `compiled`, `compiler`, see `PolicyModel`.
    """

    def __init__(self, model: PreTrainedModel, *, gradient_checkpointing: bool = False, **more: Any):
        without_head(model)
        width, device = model.config.get_text_config().hidden_size, model.get_input_embeddings().weight.device
        model.add_module("score", nn.Linear(width, 1, device=device, dtype=torch.float32))
        super().__init__(model, gradient_checkpointing=gradient_checkpointing, **more)
        self.start_head()

    @property
    def head(self) -> nn.Linear:
        """Makes a value of a hidden state; in float32 whatever the layers compute in."""
        return cast(nn.Linear, self.model.score)

    def forward(self, batch: Packed) -> tuple[Tensor, Tensor]:  # type: ignore[override]  # it has no entropy
        """The value before each learned token.

        Returns:
            Values, float32 [learned], and the hidden states that they are read from, [learned, width];
            both differentiable.
        """
        share = self._share(batch)
        hidden = self._kept(self.model.base_model, batch, "last_hidden_state", share)
        values = self.head(hidden.to(self.head.weight.dtype)).sum(-1)  # of one each: no view, of which FSDP would warn
        return (values, hidden) if share is None else (share.whole(values), share.whole(hidden))

    @torch.no_grad()
    def start_head(self) -> None:
        """Let every value be 0: until it has learned something, a critic should not make advantages worse."""
        for parameter in self.head.parameters():
            parameter.zero_()

    def shard_head(self, mesh: DeviceMesh) -> None:
        """Spread the head by itself, before the rest, since it stays in float32 where the rest does not."""
        fully_shard(self.head, mesh=mesh)


class ScoreModel(ValueModel):
    """Scores by a sequence classifier of one label: the reward model. What is read before a learned token is the score
    of everything up to there, so a row whose last token alone is learned has one score, of all before it.

    `AutoModelForSequenceClassification.from_pretrained` reads what it saves.

    Args:
        model: the classifier, changed in place; its head, `score`, is trained also where adapters train the rest.
        gradient_checkpointing, more: see `ValueModel`.

    Raises:
        ValueError: the classifier has no such head.
    """

    def __init__(self, model: PreTrainedModel, *, gradient_checkpointing: bool = False, **more: Any):
        if not isinstance(getattr(model, "score", None), nn.Linear):
            raise ValueError(f"{type(model).__name__} has no linear head `score`: take a decoder's classifier")
        PolicyModel.__init__(self, model, gradient_checkpointing=gradient_checkpointing, **more)
        self.head.requires_grad_(True)

    def start_head(self) -> None:
        """It was drawn, or read, with the rest."""


def without_head(model: PreTrainedModel) -> None:
    """Take the output embedding off a causal language model, and with it [vocabulary, width] of memory, unless the
    input embedding is the same tensor."""
    head = model.get_output_embeddings()
    for path, module in list(model.named_modules()):
        if module is head:
            parent, _, name = path.rpartition(".")
            setattr(model.get_submodule(parent), name, nn.Identity())
