"""Network and prompt of WALL-OSS: a Qwen2.5-VL whose layers have an expert for words and pictures, and one for actions.

    pictures ─▶ vision tower ─┐
    words, state ─────────────┴─▶ attention ─▶ expert 0     a place sees those before it
    x_t, mask and t ──────────────▶ attention ─▶ expert 1     actions see all of that and each other

Attention and norms are of both, feed-forward layers of one. Actions come last, so keys and values of what stands before
them are computed once for all denoising steps. The vision tower is transformers' own; places of pictures have three
positions (time, row, column), of which a third of the rotations each is made.

A prompt is Qwen's chat: pictures by the names of their cameras, the instruction, the state as one token, and then, in
the assistant's place, the actions. Pictures are scaled as lerobot does, with Pillow's antialiased filter, twice.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from types import SimpleNamespace
from typing import Any

import torch
from tokenizers import Tokenizer
from torch import Tensor, nn
from torch.nn import functional
from transformers.models.qwen2_5_vl import modeling_qwen2_5_vl as qwen
from transformers.models.qwen2_5_vl.configuration_qwen2_5_vl import Qwen2_5_VLVisionConfig

from rlinf.models.policy.robots import normalised
from rlinf.models.policy.vla.gemma import Attention, Cache

TOKENS = 768
"""Places of a prompt with its actions, as lerobot has it, which cuts off what is beyond."""
_SIDE = 256
"""Pixels of the longer side of a picture, before it is cut into patches."""
_BITS = 22
"""Binary places of Pillow's shares of a pixel: with 8 of colour and 2 to spare they are 32."""
_COLOURS = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)
"""Mean and deviation of Qwen2.5-VL's pictures in 0..1, those of CLIP."""
_VIEWS = {"face_view": "front view", "move1_view": "move view", "move2_view": "move view"}
"""How cameras are called whose names do not say it."""
_PICTURE, _STATE, _ACTION = "<|image_pad|>", "<|propri|>", "<|action|>"
_LEAST: Mapping[str, Any] = {"rms_norm_eps": 1e-5, "rope_theta": 1e6, "dim_inputs": [1536, 1536]}
"""Keys of its config.json that may be missing, as lerobot has them."""


class Layer(nn.Module):
    """One layer, whose feed-forward part has two experts.

    Args:
        sizes: of `Network`.
    """

    def __init__(self, sizes: Any):
        super().__init__()
        self.self_attn = Attention(sizes)
        for name in ("q_proj", "k_proj", "v_proj"):
            linear = getattr(self.self_attn, name)
            setattr(self.self_attn, name, nn.Linear(linear.in_features, linear.out_features))
        self.input_layernorm = qwen.Qwen2_5_VLRMSNorm(sizes.hidden_size, sizes.rms_norm_eps)
        self.post_attention_layernorm = qwen.Qwen2_5_VLRMSNorm(sizes.hidden_size, sizes.rms_norm_eps)
        self.moe = nn.Module()
        self.moe.experts = nn.ModuleList(qwen.Qwen2_5_VLMLP(each) for each in sizes.experts)

    def forward(
        self,
        x: Tensor,
        cos: Tensor,
        sin: Tensor,
        mask: Tensor,
        keys: Tensor | None = None,
        values: Tensor | None = None,
        number: int = 0,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Hidden states, and keys and values of all places; see `gemma.Layer`. All places are of expert `number`."""
        expert: Any = self.moe.experts[number]  # type: ignore[index]
        dtype = next(expert.parameters()).dtype  # looked up here: see `gemma.Layer`
        x, cos, sin = x.to(dtype), cos.to(dtype), sin.to(dtype)
        before = None if keys is None or values is None else (keys, values)
        output, k, v = self.self_attn(self.input_layernorm(x).to(dtype), cos, sin, mask, before)
        x = x + output
        normed = self.post_attention_layernorm(x).to(dtype)[..., : expert.hidden_size]
        return x + functional.pad(expert(normed), (0, x.shape[-1] - expert.hidden_size)), k, v


class Stack(nn.Module):
    """The language model: embeddings in, hidden states out.

    Args:
        sizes: of `Network`.
    """

    def __init__(self, sizes: Any):
        super().__init__()
        self.embed_tokens = nn.Embedding(sizes.vocab_size, sizes.hidden_size)
        nn.init.normal_(self.embed_tokens.weight, std=0.02)
        self.layers = nn.ModuleList(Layer(sizes) for _ in range(sizes.num_hidden_layers))
        self.norm = qwen.Qwen2_5_VLRMSNorm(sizes.hidden_size, sizes.rms_norm_eps)
        self._sections = sizes.sections
        self._periods = sizes.rope_theta ** (torch.arange(0, sizes.head_dim, 2).double() / sizes.head_dim)

    def forward(
        self, x: Tensor, mask: Tensor, positions: Tensor, before: Cache | None = None, number: int = 0
    ) -> tuple[Tensor, Cache]:
        """Hidden states after the last norm, and keys and values of all places.

        Args:
            x: embeddings, [N, S, width].
            mask: which place looks at which, bool [N, S, P + S].
            positions: int64 [3, N, S]: time, row and column.
            before: keys and values of P places before; None for none.
            number: of the expert that these places have.
        """
        angles = positions.double()[..., None] / self._periods.to(positions.device)
        parts = angles.split(self._sections, -1)
        angles = torch.cat([part[axis % 3] for axis, part in enumerate(parts)], -1).repeat(1, 1, 2)
        cos, sin = angles.cos().float(), angles.sin().float()
        cache: Cache = []
        for place, layer in enumerate(self.layers):
            keys, values = (None, None) if before is None else before[place]
            x, keys, values = layer(x, cos, sin, mask[:, None], keys, values, number)
            cache.append((keys, values))
        return self.norm(x), cache


class Network(nn.Module):
    """All modules, under the names of checkpoints, words' logits left out.

    Args:
        about: config.json of the Qwen2.5-VL with experts.
    """

    def __init__(self, about: Mapping[str, Any]):
        super().__init__()
        whole = {**_LEAST, **about}
        sizes = SimpleNamespace(
            **{name: whole[name] for name in ("hidden_size", "num_hidden_layers", "num_attention_heads", "vocab_size")},
            **{name: whole[name] for name in ("num_key_value_heads", "rms_norm_eps", "rope_theta")},
            head_dim=whole["hidden_size"] // whole["num_attention_heads"],
            sections=list(whole["rope_scaling"]["mrope_section"]),
            experts=[
                SimpleNamespace(hidden_size=width, intermediate_size=each["intermediate_size"], hidden_act="silu")
                for each, width in zip(whole["experts"][:2], whole["dim_inputs"], strict=True)
            ],
        )
        vision: Any = Qwen2_5_VLVisionConfig(**whole["vision_config"])
        vision._attn_implementation = "sdpa"
        self.patch: int = vision.patch_size
        self.merge: int = vision.spatial_merge_size
        self.visual = qwen.Qwen2_5_VisionTransformerPretrainedModel(vision)
        self.model = Stack(sizes)
        self.action_preprocessor = head = nn.Module()
        width, (actions, states) = sizes.hidden_size, numbers_in(about)
        head.w1 = nn.Linear(2 * actions, width, bias=False)
        head.w2 = nn.Linear(2 * width, width, bias=False)
        head.w3 = nn.Linear(width, width, bias=False)
        head.action_proj_back = nn.Linear(width, actions, bias=False)
        head.propri_proj = nn.Linear(2 * states, width, bias=False)

    def grid(self, height: int, width: int) -> tuple[int, int]:
        """Tokens of a picture, rows and columns."""
        unit = self.patch * self.merge
        inner, _ = _sizes(height, width, unit)
        return inner[0] // unit, inner[1] // unit

    def patches(self, pictures: Tensor) -> Tensor:
        """Tokens of pictures, [M, rows x columns, width] of uint8 [M, 3, H, W]."""
        count, merge, patch = len(pictures), self.merge, self.patch
        height, width = pictures.shape[-2:]
        inner, first = _sizes(height, width, patch * merge)
        pictures = scaled(scaled(pictures, first), inner)
        rows, columns = inner[0] // patch, inner[1] // patch
        x = normalised(pictures, *_COLOURS).view(count, 3, rows // merge, merge, patch, columns // merge, merge, patch)
        x = x.permute(0, 2, 5, 3, 6, 1, 4, 7)[..., None, :, :].expand(*[-1] * 6, 2, -1, -1)  # a film of two frames
        grids = torch.tensor([[1, rows, columns]] * count, device=pictures.device)
        tokens: Tensor = self.visual(x.reshape(count * rows * columns, -1), grids).pooler_output
        return tokens.view(count, -1, tokens.shape[-1])


def scaled(pictures: Tensor, size: tuple[int, int]) -> Tensor:
    """Pictures of another size as Pillow's `resize` makes them by default, along rows first, to the last bit: in a tiny
    network one level more in a pixel of a thousand moved actions by 4e-3.

    Args:
        pictures: uint8 [..., H, W].
        size: height and width.
    """
    for count in reversed(size):  # first along the rows
        if pictures.shape[-1] != count:
            x, total = pictures.int(), torch.tensor(1 << (_BITS - 1), device=pictures.device, dtype=torch.int32)
            for index, weight in zip(*_taps(x.shape[-1], count), strict=True):
                total = total + x[..., index.to(x.device)] * weight.to(x.device)
            pictures = (total >> _BITS).clamp(0, 255).to(torch.uint8)
        pictures = pictures.mT
    return pictures


@lru_cache(maxsize=64)
def _taps(old: int, new: int) -> tuple[Tensor, Tensor]:
    """Where each of `new` pixels in a row looks among the `old` ones, and how much of each it takes in units of 2^-22,
    int64 and int32 [taps, new]: Keys's cubic with a = -1/2, as wide as the pixels of the smaller picture."""
    ratio = old / new
    wide = max(ratio, 1.0)
    centre = (torch.arange(new, dtype=torch.float64) + 0.5) * ratio
    first, last = (centre - 2.0 * wide + 0.5).clamp(min=0).long(), (centre + 2.0 * wide + 0.5).clamp(max=old).long()
    index = first + torch.arange(int((last - first).max()))[:, None]
    away = ((index + 0.5 - centre) / wide).abs()
    near, far = (1.5 * away - 2.5) * away.square() + 1.0, ((2.5 - 0.5 * away) * away - 4.0) * away + 2.0
    share = torch.where(away < 1.0, near, torch.where(away < 2.0, far, 0.0)) * (index < last)
    weight = share / share.sum(0) * (1 << _BITS)
    return index.clamp(max=old - 1), (weight + weight.sign() / 2.0).trunc().int()


def numbers_in(about: Mapping[str, Any]) -> tuple[int, int]:
    """Numbers of an action and of a state that a network takes, padding included.

    Args:
        about: config.json of the Qwen2.5-VL with experts.
    """
    return sum(about["dof_config"].values()), sum(about["agent_pos_config"].values())


def _sizes(height: int, width: int, unit: int) -> tuple[tuple[int, int], tuple[int, int]]:
    """Height and width of a picture as it is cut into patches, and of what it is scaled to before that."""
    if width > height:
        first = int(_SIDE * height / width), _SIDE
    else:
        first = _SIDE, int(_SIDE * width / height)
    inner = max(unit, round(first[0] / unit) * unit), max(unit, round(first[1] / unit) * unit)
    return inner, first


class Prompts:
    """Instructions to rows of tokens, -1 on the right, and the positions of these.

    Args:
        contents: of tokenizer.json.
        cameras: their names in config.json.
        grid: rows and columns of tokens of each picture.
        actions: places that are left for them.
    """

    def __init__(self, contents: bytes, cameras: Sequence[str], grid: tuple[int, int], actions: int):
        try:
            self._tokenizer = Tokenizer.from_str(contents.decode())
        except Exception as error:  # of a file that may hold anything
            raise ValueError(f"policy.path: its tokenizer.json cannot be read: {error}") from error
        self._tokenizer.no_padding()
        self._tokenizer.no_truncation()
        ids = {name: self._tokenizer.token_to_id(name) for name in (_PICTURE, _STATE, _ACTION)}
        if missing := [name for name, number in ids.items() if number is None]:
            raise ValueError(f"policy.path: its tokenizer.json has no {missing[0]}: it is not that of WALL-OSS")
        self.picture, self.state = int(ids[_PICTURE] or 0), int(ids[_STATE] or 0)
        self._length = TOKENS - actions
        tokens = grid[0] * grid[1]
        self._shown = "".join(f" {_view(name)}: <|vision_start|>{_PICTURE * tokens}<|vision_end|>" for name in cameras)
        self._row = lru_cache(maxsize=4096)(self._encoded)  # environments say the same again at every step
        self._head = self._places(self._row(""), grid)

    def encode(self, instructions: Sequence[str]) -> Tensor:
        """Tokens, int64 [N, length].

        Raises:
            ValueError: one is too long, or points at a picture.
        """
        rows = [self._row(text) for text in instructions]
        return torch.tensor(rows, dtype=torch.int64).view(len(rows), self._length)

    def positions(self, count: int, device: torch.device) -> Tensor:
        """Time, row and column of so many places from the first on, int64 [3, count]; the same in all rows."""
        after = int(self._head.max()) + 1 + torch.arange(count - self._head.shape[1])
        return torch.cat([self._head, after.expand(3, -1)], 1).to(device)

    def _encoded(self, text: str) -> tuple[int, ...]:
        if "<point>" in text:
            raise ValueError(f"policy wall_x: the instruction {text!r} points at a picture, which is not read here")
        whole = (
            "<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n"
            f"<|im_start|>user\nObservation:{self._shown}\n"
            f"Instruction: {text if text.endswith('.') else text + '.'}\nPredict the next action in robot action.\n"
            f"Proprioception: {_STATE}\n<|im_end|>\n<|im_start|>assistant\n"
        )
        tokens = self._tokenizer.encode(whole).ids
        if len(tokens) > self._length:
            raise ValueError(
                f"policy wall_x: pictures and the instruction {text[:40]!r} have {len(tokens)} tokens, and "
                f"{self._length} is the most: show fewer cameras, or say less"
            )
        return (*tokens, *[-1] * (self._length - len(tokens)))

    def _places(self, row: Sequence[int], grid: tuple[int, int]) -> Tensor:
        """Positions up to the last token of a picture: a picture's begin where the words before it end, and words go
        on behind the largest."""
        rows, columns = torch.meshgrid(torch.arange(grid[0]), torch.arange(grid[1]), indexing="ij")
        picture = torch.stack([torch.zeros_like(rows), rows, columns]).flatten(1)
        parts, place, after = [torch.zeros(3, 0, dtype=torch.int64)], 0, 0
        while self.picture in row[place:]:
            words = row.index(self.picture, place) - place
            parts += [after + torch.arange(words).expand(3, -1), after + words + picture]
            place, after = place + words + picture.shape[1], int(parts[-1].max()) + 1
        return torch.cat(parts, 1)


def _view(camera: str) -> str:
    """Name of a camera in prompts."""
    name = camera.replace("observation.images.", "")
    return _VIEWS.get(name, name.replace("_", " ") if "view" in name else f"{name} view")
