"""The model as decoding sees it, by way of the model's own `forward`; and how it takes new weights."""

from __future__ import annotations

import torch
from torch import Tensor
from transformers import PreTrainedModel

from rlinf.data.weights import Weights
from rlinf.engines.cache import RowCache


class ModelForward:
    """Runs the model's own `forward`; implements `decoding.Forward`.

    Args:
        model: in place on its device, in evaluation mode.
        version: of the weights it has.

    Raises:
        ValueError: the model has layers that are not full attention.
    """

    def __init__(self, model: PreTrainedModel, version: int):
        config = model.config.get_text_config()
        kinds = set(getattr(config, "layer_types", None) or [])
        if kinds - {"full_attention"} or (not kinds and getattr(config, "sliding_window", None)):
            raise ValueError(
                f"{type(model).__name__}: the transformers engine decodes models whose layers are all full attention, "
                f"this one has {sorted(kinds) or 'a sliding window'}"
            )
        self.layers: int = config.num_hidden_layers
        self.device: torch.device = model.device
        self.dtype: torch.dtype = model.dtype
        self.version = version
        self._model = model

    def __call__(self, ids: Tensor, positions: Tensor, mask: Tensor | None, cache: RowCache) -> Tensor:
        output = self._model(
            input_ids=ids,
            attention_mask=mask,
            position_ids=positions,
            past_key_values=cache,
            use_cache=True,
            logits_to_keep=1,
        )
        logits: Tensor = output.logits[:, -1]
        return logits

    @torch.no_grad()
    def load(self, weights: Weights) -> None:
        """Copy `weights` into the model, or raise ValueError and change nothing."""
        parameters = dict(self._model.named_parameters())
        arrived = dict(weights.named())
        problems = [
            *(f"missing {name}" for name in parameters.keys() - arrived.keys()),
            *(f"unknown {name}" for name in arrived.keys() - parameters.keys()),
            *(
                f"{name} is {list(arrived[name].shape)} where the model has {list(parameter.shape)}"
                for name, parameter in parameters.items()
                if name in arrived and arrived[name].shape != parameter.shape
            ),
        ]
        if problems:
            raise ValueError(
                f"weights of version {weights.version} do not fit {type(self._model).__name__}: "
                + "; ".join(sorted(problems)[:5])
                + (f"; and {len(problems) - 5} more" if len(problems) > 5 else "")
            )
        for name, parameter in parameters.items():
            parameter.copy_(arrived[name])
        self.version = weights.version
