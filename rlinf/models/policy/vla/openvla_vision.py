"""The two vision encoders of OpenVLA, DINOv2 with registers and SigLIP, in one class with timm's tensor names.

From pictures as `robots.py` normalises them they make features of patches, of the last block but one, without class and
register tokens and without the final norm: what OpenVLA was trained on (arXiv:2406.09246, section 3.1).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from rlinf.models.policy.robots import HALF, IMAGENET_MEAN, IMAGENET_STD, normalised

_EPSILON = 1e-6  # of all layer norms, as timm has it


@dataclass(frozen=True, slots=True, kw_only=True)
class VitSizes:
    """Sizes of one vision transformer."""

    width: int
    """Numbers in a token."""
    depth: int
    """Blocks, of which the last is not computed."""
    heads: int
    """Heads of the attention."""
    mlp: int
    """Width inside a block's perceptron."""
    image: int = 224
    """Pixels along a picture's side."""
    patch: int = 14
    """Pixels along a patch's side."""
    registers: int = 0
    """Register tokens behind the class token, with which every block's results are scaled too (DINOv2); 0 for an
    encoder without class token (SigLIP), which pools by attention instead."""

    @property
    def patches(self) -> int:
        """Tokens that a picture becomes."""
        return (self.image // self.patch) ** 2


TIMM = {
    "vit_large_patch14_reg4_dinov2.lvd142m": VitSizes(width=1024, depth=24, heads=16, mlp=4096, registers=4),
    "vit_so400m_patch14_siglip_224": VitSizes(width=1152, depth=27, heads=16, mlp=4304),
}
"""Sizes by timm's names, as a checkpoint's `timm_model_ids` gives them."""


def sizes_of(names: Sequence[str], overrides: Sequence[Mapping[str, Any]] = ()) -> tuple[VitSizes, ...]:
    """Sizes of encoders.

    Args:
        names: timm's.
        overrides: fields of `VitSizes` for each, for instances of other sizes; none for the true ones.

    Raises:
        ValueError: a name is unknown, or the sizes do not fit together.
    """
    found = []
    for name, changed in zip(names, overrides or [{}] * len(names), strict=True):
        if name not in TIMM:
            raise ValueError(f"policy openvla: timm_model_ids names {name}, but only {', '.join(TIMM)} are known")
        each = replace(TIMM[name], **changed)
        if each.image % each.patch or each.width % each.heads or each.depth < 2:
            raise ValueError(
                f"policy openvla: {each} must have whole patches, a width that its heads divide, and 2 blocks at least"
            )
        found.append(each)
    return tuple(found)


class _Attention(nn.Module):
    def __init__(self, width: int, heads: int):
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width)
        self.proj = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        rows, tokens, width = x.shape
        q, k, v = self.qkv(x).view(rows, tokens, 3, self.heads, width // self.heads).permute(2, 0, 3, 1, 4)
        found: Tensor = self.proj(functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
        return found


class _Mlp(nn.Module):
    def __init__(self, width: int, inner: int):
        super().__init__()
        self.fc1 = nn.Linear(width, inner)
        self.fc2 = nn.Linear(inner, width)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.fc2(functional.gelu(self.fc1(x)))  # the exact one: SigLIP's usual tanh is 1.6e-3 off
        return found


class _LayerScale(nn.Module):
    def __init__(self, width: int):
        super().__init__()
        self.scale_factor = nn.Parameter(torch.full((width,), 1e-5))  # timm calls it gamma

    def forward(self, x: Tensor) -> Tensor:
        return x * self.scale_factor


class Block(nn.Module):
    """Attention and a perceptron, each normalised before and added to what came in."""

    def __init__(self, sizes: VitSizes):
        super().__init__()
        scale = _LayerScale if sizes.registers else nn.Identity
        self.norm1 = nn.LayerNorm(sizes.width, eps=_EPSILON)
        self.attn = _Attention(sizes.width, sizes.heads)
        self.ls1 = scale(sizes.width)
        self.norm2 = nn.LayerNorm(sizes.width, eps=_EPSILON)
        self.mlp = _Mlp(sizes.width, sizes.mlp)
        self.ls2 = scale(sizes.width)

    def forward(self, x: Tensor) -> Tensor:
        """Tokens [N, T, width] to tokens."""
        x = x + self.ls1(self.attn(self.norm1(x)))
        found: Tensor = x + self.ls2(self.mlp(self.norm2(x)))
        return found


class _PatchEmbed(nn.Module):
    def __init__(self, sizes: VitSizes):
        super().__init__()
        self.proj = nn.Conv2d(3, sizes.width, sizes.patch, sizes.patch)

    def forward(self, pixels: Tensor) -> Tensor:
        found: Tensor = self.proj(pixels).flatten(2).transpose(1, 2)
        return found


class _AttentionPool(nn.Module):
    """SigLIP's pooling. Nothing reads it here; it is in the checkpoints."""

    def __init__(self, sizes: VitSizes):
        super().__init__()
        width = sizes.width
        self.latent = nn.Parameter(torch.zeros(1, 1, width))
        self.q, self.kv, self.proj = nn.Linear(width, width), nn.Linear(width, 2 * width), nn.Linear(width, width)
        self.norm = nn.LayerNorm(width, eps=_EPSILON)
        self.mlp = _Mlp(width, sizes.mlp)


class Vit(nn.Module):
    """One encoder. What lies behind its last block but one, `unread`, is there for the checkpoints only."""

    def __init__(self, sizes: VitSizes):
        super().__init__()
        self.sizes = sizes
        if sizes.registers:
            self.cls_token = nn.Parameter(torch.zeros(1, 1, sizes.width))
            self.reg_token = nn.Parameter(torch.zeros(1, sizes.registers, sizes.width))
        self.pos_embed = nn.Parameter(torch.empty(1, sizes.patches, sizes.width).normal_(std=0.02))
        self.patch_embed = _PatchEmbed(sizes)
        self.blocks = nn.ModuleList(Block(sizes) for _ in range(sizes.depth))
        self.norm = nn.LayerNorm(sizes.width, eps=_EPSILON)
        if not sizes.registers:
            self.attn_pool = _AttentionPool(sizes)
        self.unread = (f"blocks.{sizes.depth - 1}.*", "norm.*", "attn_pool.*")

    def forward(self, pixels: Tensor) -> Tensor:
        """Normalised pictures [N, 3, image, image] to features of patches [N, patches, width]."""
        x = self.patch_embed(pixels) + self.pos_embed
        first = 0
        if self.sizes.registers:
            first = 1 + self.sizes.registers
            x = torch.cat([torch.cat([self.cls_token, self.reg_token], 1).expand(len(x), -1, -1), x], 1)
        for block in self.blocks[:-1]:
            x = block(x)
        return x[:, first:]


class VisionBackbone(nn.Module):
    """Both encoders beside each other: the features of a patch are DINOv2's, then SigLIP's."""

    def __init__(self, sizes: Sequence[VitSizes]):
        super().__init__()
        dino, siglip = sizes
        self.featurizer, self.fused_featurizer = Vit(dino), Vit(siglip)
        self.width = dino.width + siglip.width
        """Numbers in the features of a patch."""

    def encoders(self) -> Sequence[tuple[str, Vit]]:
        """Both, by their names in the policy."""
        return (
            ("vision_backbone.featurizer", self.featurizer),
            ("vision_backbone.fused_featurizer", self.fused_featurizer),
        )

    def forward(self, pictures: Tensor) -> Tensor:
        """Pictures of the encoders' size, uint8 [N, 3, image, image], to features [N, patches, width]."""
        dtype = self.featurizer.pos_embed.dtype
        dino = self.featurizer(normalised(pictures, IMAGENET_MEAN, IMAGENET_STD, dtype))
        return torch.cat([dino, self.fused_featurizer(normalised(pictures, HALF, HALF, dtype))], -1)


class Projector(nn.Module):
    """Features of patches as tokens of the language model."""

    def __init__(self, seen: int, width: int):
        super().__init__()
        self.fc1 = nn.Linear(seen, 4 * seen)
        self.fc2 = nn.Linear(4 * seen, width)
        self.fc3 = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        """[N, patches, seen] to [N, patches, width]."""
        x = functional.gelu(self.fc2(functional.gelu(self.fc1(x))))
        found: Tensor = self.fc3(x)
        return found
