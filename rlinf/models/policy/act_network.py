"""The network of ACT, the action chunking transformer (arXiv:2304.13705), under the names of LeRobot's checkpoints.

    actions, state ─▶ encoder of the latent ─▶ mean and variance ─▶ a draw; 0 where it acts
    latent, state, pictures (ResNet, every place of its map a token) ─▶ encoder ─▶ decoder ─▶ H actions at once

There is no dropout, and the batch norms of the ResNet stand still.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from rlinf.models.policy.resnet import BACKBONES, ResNet

SIZES: Mapping[str, Any] = {
    "vision_backbone": "resnet18",
    "dim_model": 512,
    "n_heads": 8,
    "dim_feedforward": 3200,
    "n_encoder_layers": 4,
    "n_decoder_layers": 1,
    "n_vae_encoder_layers": 4,
    "use_vae": True,
    "latent_dim": 32,
    "pre_norm": False,
    "feedforward_activation": "relu",
    "chunk_size": 100,
}
"""LeRobot's defaults."""
ACTIVATIONS: Mapping[str, Callable[[Tensor], Tensor]] = {"relu": functional.relu, "gelu": functional.gelu}


def waves(places: Tensor, size: int) -> Tensor:
    """Sines and cosines by turns, of rising periods, float32 [P, size] of places [P] (arXiv:1706.03762, 3.5)."""
    numbers = torch.arange(size, device=places.device)
    angles = places.double()[:, None] / 10000.0 ** (2.0 * (numbers // 2) / size)
    return torch.where(numbers % 2 == 0, angles.sin(), angles.cos()).float()


class _Feeds(nn.Module):
    """The feed-forward part of a layer, and where norms are."""

    def __init__(self, sizes: Mapping[str, Any], norms: int):
        super().__init__()
        width, inner = sizes["dim_model"], sizes["dim_feedforward"]
        self.linear1, self.linear2 = nn.Linear(width, inner), nn.Linear(inner, width)
        for number in range(1, norms + 1):
            self.add_module(f"norm{number}", nn.LayerNorm(width))
        self._activation, self._first = ACTIVATIONS[sizes["feedforward_activation"]], bool(sizes["pre_norm"])

    def _before(self, number: int, x: Tensor) -> Tensor:
        normed: Tensor = getattr(self, f"norm{number}")(x) if self._first else x
        return normed

    def _after(self, number: int, x: Tensor) -> Tensor:
        normed: Tensor = x if self._first else getattr(self, f"norm{number}")(x)
        return normed

    def _fed(self, number: int, x: Tensor) -> Tensor:
        inner = self._activation(self.linear1(self._before(number, x)))
        return self._after(number, x + self.linear2(inner))


class EncoderLayer(_Feeds):
    """Places look at each other; queries and keys know where they are."""

    def __init__(self, sizes: Mapping[str, Any]):
        super().__init__(sizes, 2)
        self.self_attn = nn.MultiheadAttention(sizes["dim_model"], sizes["n_heads"], batch_first=True)

    def forward(self, x: Tensor, positions: Tensor, pads: Tensor | None = None) -> Tensor:
        """[N, S, width] of the same; positions [S, width]; pads: places that nobody looks at, bool [N, S]."""
        y = self._before(1, x)
        at = y + positions
        x = self._after(1, x + self.self_attn(at, at, y, key_padding_mask=pads, need_weights=False)[0])
        return self._fed(2, x)


class DecoderLayer(_Feeds):
    """Places look at each other, then at what was encoded."""

    def __init__(self, sizes: Mapping[str, Any]):
        super().__init__(sizes, 3)
        self.self_attn = nn.MultiheadAttention(sizes["dim_model"], sizes["n_heads"], batch_first=True)
        self.multihead_attn = nn.MultiheadAttention(sizes["dim_model"], sizes["n_heads"], batch_first=True)

    def forward(self, x: Tensor, own: Tensor, encoded: Tensor, positions: Tensor) -> Tensor:
        """[N, H, width] of the same, at places `own` [H, width]; encoded [N, S, width] at positions [S, width]."""
        y = self._before(1, x)
        at = y + own
        x = self._after(1, x + self.self_attn(at, at, y, need_weights=False)[0])
        at = self._before(2, x) + own
        x = self._after(2, x + self.multihead_attn(at, encoded + positions, encoded, need_weights=False)[0])
        return self._fed(3, x)


class Stack(nn.Module):
    """Layers and the last norm, if there is one."""

    def __init__(self, layers: list[nn.Module], width: int | None, *, xavier: bool = True):
        super().__init__()
        self.layers = nn.ModuleList(layers)
        self.norm = nn.Identity() if width is None else nn.LayerNorm(width)
        for parameter in self.parameters() if xavier else ():
            if parameter.ndim > 1:
                nn.init.xavier_uniform_(parameter)

    def forward(self, x: Tensor, *args: Tensor) -> Tensor:
        """See the layers' own."""
        for layer in self.layers:
            x = layer(x, *args)
        normed: Tensor = self.norm(x)
        return normed


class ActNetwork(nn.Module):
    """The whole of it.

    Args:
        sizes: as `SIZES`.
        pictures: it looks at some.
        state, world: numbers of the robot's state and of the world's; 0 for none.
        numbers: of an action, A.
    """

    vae_encoder_pos_enc: Tensor

    def __init__(self, sizes: Mapping[str, Any], *, pictures: bool, state: int, world: int, numbers: int):
        super().__init__()
        width, latent, horizon = sizes["dim_model"], sizes["latent_dim"], sizes["chunk_size"]
        self.latents, self.horizon, self.width = latent, horizon, width
        last = width if sizes["pre_norm"] else None
        self.vae_encoder: Stack | None = None
        if sizes["use_vae"]:
            layers: list[nn.Module] = [EncoderLayer(sizes) for _ in range(sizes["n_vae_encoder_layers"])]
            self.vae_encoder = Stack(layers, last, xavier=False)
            self.vae_encoder_cls_embed = nn.Embedding(1, width)
            if state:
                self.vae_encoder_robot_state_input_proj = nn.Linear(state, width)
            self.vae_encoder_action_input_proj = nn.Linear(numbers, width)
            self.vae_encoder_latent_output_proj = nn.Linear(width, 2 * latent)
            places = torch.arange(1 + bool(state) + horizon)
            self.register_buffer("vae_encoder_pos_enc", waves(places, width)[None])
        self.backbone = ResNet(BACKBONES[sizes["vision_backbone"]]) if pictures else None
        self.encoder = Stack([EncoderLayer(sizes) for _ in range(sizes["n_encoder_layers"])], last)
        self.decoder = Stack([DecoderLayer(sizes) for _ in range(sizes["n_decoder_layers"])], width)
        self.encoder_robot_state_input_proj = nn.Linear(state, width) if state else None
        self.encoder_env_state_input_proj = nn.Linear(world, width) if world else None
        self.encoder_latent_input_proj = nn.Linear(latent, width)
        if self.backbone is not None:
            self.encoder_img_feat_input_proj = nn.Conv2d(self.backbone.width, width, 1)
        self.encoder_1d_feature_pos_embed = nn.Embedding(1 + bool(state) + bool(world), width)
        self.decoder_pos_embed = nn.Embedding(horizon, width)
        self.action_head = nn.Linear(width, numbers)

    def blocks(self) -> list[nn.Module]:
        """All layers of the transformers."""
        stacks = [each for each in (self.vae_encoder, self.encoder, self.decoder) if each is not None]
        return [layer for stack in stacks for layer in stack.layers]

    def latent(self, actions: Tensor, pads: Tensor, state: Tensor | None, noise: Tensor) -> tuple[Tensor, Tensor]:
        """A draw of the latent of demonstrated actions, and how far its distribution is from N(0, 1).

            KL = - sum (1 + log s^2 - m^2 - s^2) / 2        latent = m + s noise

        Args:
            actions: [N, H, A].
            pads: places of actions that count for nothing, bool [N, H].
            state: the robot's, [N, S]; None without.
            noise: standard normal, [N, L].

        Returns:
            Latent [N, L] and divergence, nats, [N].
        """
        assert self.vae_encoder is not None
        dtype = self.action_head.weight.dtype
        front = [self.vae_encoder_cls_embed.weight.expand(len(actions), 1, -1)]
        if state is not None:
            front.append(self.vae_encoder_robot_state_input_proj(state.to(dtype))[:, None])
        x = torch.cat([*front, self.vae_encoder_action_input_proj(actions.to(dtype))], 1)
        pads = functional.pad(pads, (len(front), 0), value=False)
        summary = self.vae_encoder(x, self.vae_encoder_pos_enc[0].to(dtype), pads)[:, 0]
        mean, log_variance = self.vae_encoder_latent_output_proj(summary).float().chunk(2, -1)
        divergence = -0.5 * (1.0 + log_variance - mean.square() - log_variance.exp()).sum(-1)
        return mean + (log_variance / 2).exp() * noise, divergence

    def encoded(
        self, pictures: Tensor | None, state: Tensor | None, world: Tensor | None, latent: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Encode latent, states and pictures as tokens [N, S, width]; and the tokens' positions [S, width].

        Args:
            pictures: normalised, [N, k, 3, h, w]; None without.
            state, world: normalised numbers, [N, S] and [N, W]; None without.
            latent: [N, L].
        """
        dtype = self.action_head.weight.dtype
        tokens = [self.encoder_latent_input_proj(latent.to(dtype))]
        layers = self.encoder_robot_state_input_proj, self.encoder_env_state_input_proj
        for layer, numbers in zip(layers, (state, world), strict=True):
            if layer is not None and numbers is not None:
                tokens.append(layer(numbers.to(dtype)))
        x, positions = torch.stack(tokens, 1), self.encoder_1d_feature_pos_embed.weight
        if self.backbone is not None and pictures is not None:
            maps = self.backbone(pictures.flatten(0, 1).to(dtype))
            places = self._places(maps.shape[-2], maps.shape[-1], maps.device).repeat(pictures.shape[1], 1)
            patches = self.encoder_img_feat_input_proj(maps).flatten(2).transpose(1, 2)
            x = torch.cat([x, patches.unflatten(0, pictures.shape[:2]).flatten(1, 2)], 1)
            positions = torch.cat([positions, places.to(dtype)], 0)
        return self.encoder(x, positions), positions

    def decoded(self, encoded: Tensor, positions: Tensor) -> Tensor:
        """Actions [N, H, A], float32, of what `encoded` says."""
        queries = encoded.new_zeros(len(encoded), self.horizon, self.width)
        hidden = self.decoder(queries, self.decoder_pos_embed.weight, encoded, positions)
        actions: Tensor = self.action_head(hidden).float()
        return actions

    def _places(self, height: int, width: int, device: torch.device) -> Tensor:
        """Positions of a map's places, row by row, [h w, width]: of rows and columns, each from above 0 to 2 pi."""
        rows, columns = (
            waves(torch.arange(1, count + 1, device=device) / (count + 1e-6) * 2.0 * math.pi, self.width // 2)
            for count in (height, width)
        )
        return torch.cat([rows.repeat_interleave(width, 0), columns.repeat(height, 1)], 1)
