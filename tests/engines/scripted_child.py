"""The far side of `scripted_process`: a Qwen2 in numpy, without a cache. Imports no torch, so it starts in no time."""

from __future__ import annotations

import zlib

import numpy as np


class Model:
    """Draws the next token of texts.

    Args:
        heads, groups: of attention: query heads, and key-value heads.
        epsilon: of the norms.
        frequencies: of the rotations, float32 [head size / 2].
    """

    def __init__(self, heads: int, groups: int, epsilon: float, frequencies: np.ndarray):
        self._heads, self._groups, self._epsilon, self._frequencies = heads, groups, epsilon, frequencies
        self._weights: dict[str, np.ndarray] = {}
        self._version: int | None = None

    def load(self, version: int | None, weights: dict[str, np.ndarray]) -> None:
        """Use these weights, by the names of `named_parameters()`."""
        self._version, self._weights = version, weights

    def held(self) -> int:
        """Bytes of weights."""
        return sum(array.nbytes for array in self._weights.values())

    def next(self, version: int, texts: list, draws: list) -> list[tuple[int, float]] | None:
        """Draw the next token of each text.

        Args:
            version: of the weights that are meant; None comes back if they are not here.
            texts: token ids and digests of the images, each text once.
            draws: which text, random number in [0, 1) and temperature of each row.

        Returns:
            Token and log-prob of each row.
        """
        if version != self._version:
            return None
        logits: list[np.ndarray] = [np.empty(0)] * len(texts)
        for length in {len(ids) for ids, _ in texts}:
            alike = [number for number, (ids, _) in enumerate(texts) if len(ids) == length]
            for number, row in zip(alike, self._logits([texts[number] for number in alike]), strict=True):
                logits[number] = row
        return [_draw(logits[text], uniform, temperature) for text, uniform, temperature in draws]

    def _logits(self, texts: list) -> np.ndarray:
        """Of texts of one length, [texts, vocabulary]."""
        weights = self._weights
        hidden = weights["model.embed_tokens.weight"][np.array([ids for ids, _ in texts])]
        for row, (_, digests) in enumerate(texts):
            for digest in digests:  # a picture is a vector made from its digest, where the first token is
                seen = np.random.default_rng(zlib.crc32(digest.encode())).standard_normal(hidden.shape[-1])
                hidden[row, 0] += seen.astype(np.float32)
        layer = 0
        while (name := f"model.layers.{layer}.") + "input_layernorm.weight" in weights:
            block = {key.removeprefix(name): array for key, array in weights.items() if key.startswith(name)}
            hidden = hidden + self._attention(self._norm(hidden, block["input_layernorm.weight"]), block)
            inner = self._norm(hidden, block["post_attention_layernorm.weight"])
            gate = inner @ block["mlp.gate_proj.weight"].T
            swish = gate / (1 + np.exp(-gate))
            hidden = hidden + (swish * (inner @ block["mlp.up_proj.weight"].T)) @ block["mlp.down_proj.weight"].T
            layer += 1
        head = weights.get("lm_head.weight", weights["model.embed_tokens.weight"])
        return self._norm(hidden[:, -1], weights["model.norm.weight"]) @ head.T

    def _norm(self, hidden: np.ndarray, weight: np.ndarray) -> np.ndarray:
        return weight * hidden / np.sqrt((hidden**2).mean(-1, keepdims=True) + self._epsilon)

    def _attention(self, hidden: np.ndarray, block: dict[str, np.ndarray]) -> np.ndarray:
        def heads(which: str, count: int) -> np.ndarray:
            made = hidden @ block[f"self_attn.{which}_proj.weight"].T + block[f"self_attn.{which}_proj.bias"]
            return made.reshape(*made.shape[:2], count, -1).swapaxes(1, 2)

        query, keys = self._rotated(heads("q", self._heads)), self._rotated(heads("k", self._groups))
        values = heads("v", self._groups)
        keys, values = (np.repeat(array, self._heads // self._groups, axis=1) for array in (keys, values))
        scores = query @ keys.swapaxes(-1, -2) / np.sqrt(query.shape[-1])
        scores = np.where(np.tri(scores.shape[-1], dtype=bool), scores, -np.inf)
        shares = np.exp(scores - scores.max(-1, keepdims=True))
        mixed = (shares / shares.sum(-1, keepdims=True)) @ values
        return mixed.swapaxes(1, 2).reshape(hidden.shape[0], hidden.shape[1], -1) @ block["self_attn.o_proj.weight"].T

    def _rotated(self, heads: np.ndarray) -> np.ndarray:
        angles = np.arange(heads.shape[2], dtype=np.float32)[:, None] * self._frequencies
        cos, sin = (np.concatenate([wave, wave], axis=-1) for wave in (np.cos(angles), np.sin(angles)))
        one, other = np.split(heads, 2, axis=-1)
        return heads * cos + np.concatenate([-other, one], axis=-1) * sin


def _draw(logits: np.ndarray, uniform: float, temperature: float) -> tuple[int, float]:
    scaled = logits.astype(np.float64) / (temperature or 1.0)
    cumulative = np.exp(scaled - scaled.max()).cumsum()
    token = int(np.searchsorted(cumulative, uniform * cumulative[-1], side="right")) if temperature else scaled.argmax()
    return int(token), float(scaled[token] - scaled.max() - np.log(cumulative[-1]))
