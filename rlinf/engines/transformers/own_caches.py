"""transformers' own caches, for models that are decoded by their own `forward`: an empty one, and one over a band.

In: a model, and bands. Out: what its `forward` takes as the past. Nobody waits here.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor
from transformers import PreTrainedModel
from transformers.cache_utils import (
    Cache,
    CacheLayerMixin,
    DynamicCache,
    DynamicLayer,
    DynamicSlidingWindowLayer,
    LinearAttentionAndFullAttentionLayer,
    LinearAttentionAndSlidingWindowAttentionLayer,
    LinearAttentionCacheLayerMixin,
    LinearAttentionLayer,
)

from rlinf.engines.transformers.cache import Band, Place


def empty_cache(model: PreTrainedModel) -> Cache:
    """An empty cache of the layers that the model has; windows are not cut, so that all columns stand side by side."""
    cache = DynamicCache(config=model.config)
    for number, layer in enumerate(cache.layers):
        if type(layer) is DynamicSlidingWindowLayer:
            cache.layers[number] = DynamicLayer()
        elif type(layer) is LinearAttentionAndSlidingWindowAttentionLayer:
            cache.layers[number] = LinearAttentionAndFullAttentionLayer(number_of_states=layer.number_of_states)
    return cache


def states_of(cache: Cache) -> tuple[list[Tensor], list[Place]]:
    """States of fixed size in a cache, and where they lie."""
    states, places = [], []
    for number, layer in enumerate(cache.layers):
        if isinstance(layer, LinearAttentionCacheLayerMixin):
            for kind in ("conv_states", "recurrent_states"):
                for which, state in getattr(layer, kind).items():
                    if state is not None:
                        states.append(state)
                        places.append((number, kind, which))
    return states, places


def keeps_states(cache: Cache) -> bool:
    """Say whether some layer remembers a text in a state of fixed size."""
    return any(isinstance(layer, LinearAttentionCacheLayerMixin) for layer in cache.layers)


def keeps_columns(cache: Cache) -> bool:
    """Say whether some layer has keys and values of every token."""
    return any(isinstance(layer, CacheLayerMixin) for layer in cache.layers)


class _Columns(CacheLayerMixin):
    """The attention of one layer, its columns in a band."""

    def __init__(self, band: Band, number: int):
        super().__init__()
        self._band, self._number = band, number
        self.is_initialized = True

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Nothing to do: the band has its memory."""

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        return self._band.write(self._number, key_states[:, :, 0], value_states[:, :, 0])

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self._band.width + query_length, 0

    def get_seq_length(self) -> int:
        return self._band.width

    def get_max_length(self) -> int:
        return -1


class _ColumnsAndStates(LinearAttentionLayer, _Columns):  # type: ignore[override]  # as transformers' own
    """One layer with both."""

    def __init__(self, band: Band, number: int, states: int):
        _Columns.__init__(self, band, number)
        LinearAttentionLayer.__init__(self, number_of_states=states)

    def lazy_initialization(self, *args: Any, **kwargs: Any) -> None:
        """Nothing to do: the band has its memory."""


class BandCache(Cache):
    """A band as transformers' models take it, for one token per row.

    Args:
        band: holds what was read.
        like: the cache into which the model reads texts, for the kind of each layer.
    """

    def __init__(self, band: Band, like: Cache):
        layers: list[Any] = [_layer(band, number, layer) for number, layer in enumerate(like.layers)]
        for (number, kind, which), state in band.states():
            layer = layers[number]
            getattr(layer, kind)[which] = state
            getattr(layer, f"is_{kind}_initialized")[which] = True
            layer.has_previous_state[which] = True
            if kind == "conv_states":
                layer.conv_kernel_size[which] = state.shape[-1]
        super().__init__(layers=layers)


def _layer(band: Band, number: int, like: Any) -> Any:
    if type(like).__name__ == "DummyLayer":  # keeps nothing; transformers has it from 5.18 on
        return type(like)()
    if not isinstance(like, LinearAttentionCacheLayerMixin):
        return _Columns(band, number)
    if isinstance(like, CacheLayerMixin):
        return _ColumnsAndStates(band, number, like.number_of_states)
    return LinearAttentionLayer(number_of_states=like.number_of_states)
