"""The model as decoding sees it, by way of its own `forward`; how it takes new weights, and leaves its device."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.cache_utils import DynamicCache

from rlinf.data.offload import Parking
from rlinf.data.weights import Weights, misfits
from rlinf.engines.transformers.kv_cache import Band, BandCache, Layers


class ModelForward:
    """Runs the model's own `forward`.

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
        self._parking: Parking | None = None
        self._arrived: Weights | None = None

    def read(self, ids: Tensor, real: Tensor | None) -> tuple[Tensor, Layers]:
        """Read texts from their beginnings.

        Args:
            ids: int64 [rows, tokens], texts aligned at their ends.
            real: which of them are no padding, bool of that shape; None if all.

        Returns:
            Logits after the last token, [rows, vocabulary], and keys and values of all.
        """
        cache = DynamicCache()
        output = self._model(
            input_ids=ids,
            attention_mask=None if real is None else causal_bias(real, self.dtype),
            position_ids=positions_of(ids, real),
            past_key_values=cache,
            use_cache=True,
            logits_to_keep=1,
        )
        layers: list[Any] = cache.layers
        return output.logits[:, -1], [(layer.keys, layer.values) for layer in layers]

    def step(self, ids: Tensor, positions: Tensor, bands: Sequence[Band]) -> Tensor:
        """Read one token per row and write its keys and values; the caller has reserved the column and advances it.

        Args:
            ids: int64 [rows], band after band.
            positions: of each in its own text, int64 [rows].
            bands: what was read before.

        Returns:
            Logits after them, [rows, vocabulary].
        """
        sizes = [len(band) for band in bands]
        parts = zip(ids.split(sizes), positions.split(sizes), bands, strict=True)
        logits = [self._step(token, position, band) for token, position, band in parts]
        return logits[0] if len(logits) == 1 else torch.cat(logits)

    def _step(self, ids: Tensor, positions: Tensor, band: Band) -> Tensor:
        output = self._model(
            input_ids=ids[:, None],
            attention_mask=band.mask(),
            position_ids=positions[:, None],
            past_key_values=BandCache(band, self.layers),
            use_cache=True,
            logits_to_keep=1,
        )
        logits: Tensor = output.logits[:, -1]
        return logits

    def check(self, weights: Weights) -> None:
        """Raise ValueError if `weights` are not this model's, by name and shape; changes nothing."""
        own = {name: tuple(parameter.shape) for name, parameter in self._model.named_parameters()}
        kinds = {name: tensor.dtype for name, tensor in weights.named()}
        odd = "; ".join(f"{name} is of {kind}" for name, kind in kinds.items() if not kind.is_floating_point)
        if problems := misfits(own, weights.shapes) or odd:
            raise ValueError(
                f"weights of version {weights.version} do not fit {type(self._model).__name__}: {problems}"
            )

    def load(self, weights: Weights) -> None:
        """Take `weights`, cast to the model's type, or raise ValueError and change nothing.

        While the model is parked they are kept as they came, and taken when it is back: there is no device to put
        them on.
        """
        self.check(weights)
        self.version = weights.version
        if self._parking is None:
            self._take(weights)
        else:
            self._arrived = weights

    @torch.no_grad()
    def _take(self, weights: Weights) -> None:
        parameters = dict(self._model.named_parameters())
        for name, tensor in weights.named():
            parameters[name].copy_(tensor)

    def park(self) -> None:
        """Give the memory of all weights back; `read` and `step` need them again."""
        if self._parking is None:
            self._parking = Parking(self._held())
        self._parking.park()

    def unpark(self) -> None:
        """Undo `park`, with the weights that have come meanwhile."""
        if self._parking is not None:
            self._parking.unpark()
            self._parking = None
        if self._arrived is not None:
            self._take(self._arrived)
            self._arrived = None

    def _held(self) -> list[Tensor]:
        """All that lies on the device."""
        return [*self._model.parameters(), *self._model.buffers()]


def positions_of(ids: Tensor, real: Tensor | None) -> Tensor:
    """Position of every token in its own text, int64 [rows, tokens]; 0 in the padding before it."""
    if real is None:
        return torch.arange(ids.shape[1], device=ids.device).expand(ids.shape)
    return (real.cumsum(dim=1) - 1).clamp(min=0)


def causal_bias(real: Tensor, dtype: torch.dtype) -> Tensor:
    """What is added to the scores of texts aligned at their ends, [rows, 1, tokens, tokens]."""
    columns = real.shape[1]
    causal = torch.ones((columns, columns), dtype=torch.bool, device=real.device).tril()
    # Padding sees itself: a row of attention that sees nothing is NaN, and 0 x NaN spreads from the cache.
    itself = torch.eye(columns, dtype=torch.bool, device=real.device)
    hidden = ~((real[:, None, :] & causal) | itself)
    return torch.zeros(hidden.shape, dtype=dtype, device=real.device).masked_fill_(hidden, -torch.inf)[:, None]
