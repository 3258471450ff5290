"""GR00T's action head: the velocity of noisy actions, from the robot's state and what the vision-language model says.

In: tokens of the backbone, state, noisy actions, time. Out: actions minus noise. What is particular to a robot has
weights of its own per robot, chosen by the number of its embodiment. Names and shapes are the published tensors'.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from rlinf.models.policy.vla.gr00t.transformer import DiffusionTransformer, SelfAttention

_BUILT: Mapping[str, Mapping[str, Any]] = {
    "": {"add_pos_embed": True, "use_vlln": True},
    "diffusion_model_cfg": {"interleave_self_attention": True, "norm_type": "ada_norm", "positional_embeddings": None},
    "vl_self_attention_cfg": {"positional_embeddings": None},
}
"""Keys of `action_head_cfg` that could say another network than this one, and what they must say."""


class RobotLinear(nn.Module):
    """A linear layer with weights for each of several robots.

    Args:
        robots: how many.
        inputs, outputs: widths.
    """

    def __init__(self, robots: int, inputs: int, outputs: int):
        super().__init__()
        self.W = nn.Parameter(0.02 * torch.randn(robots, inputs, outputs))
        self.b = nn.Parameter(torch.zeros(robots, outputs))

    def forward(self, x: Tensor, robot: int) -> Tensor:
        """[N, S, outputs] of [N, S, inputs], for one robot."""
        return x @ self.W[robot] + self.b[robot]


class RobotLayers(nn.Module):
    """Two layers with ReLU between them, for each robot."""

    def __init__(self, robots: int, inputs: int, hidden: int, outputs: int):
        super().__init__()
        self.layer1 = RobotLinear(robots, inputs, hidden)
        self.layer2 = RobotLinear(robots, hidden, outputs)

    def forward(self, x: Tensor, robot: int) -> Tensor:
        """[N, S, outputs] of [N, S, inputs], for one robot."""
        out: Tensor = self.layer2(functional.relu(self.layer1(x, robot)), robot)
        return out


class ActionEncoder(nn.Module):
    """Noisy actions and their time as tokens, for each robot."""

    def __init__(self, robots: int, numbers: int, width: int):
        super().__init__()
        self.width = width
        self.W1 = RobotLinear(robots, numbers, width)
        self.W2 = RobotLinear(robots, 2 * width, width)
        self.W3 = RobotLinear(robots, width, width)

    def forward(self, actions: Tensor, bucket: Tensor, robot: int) -> Tensor:
        """[N, H, width] of actions [N, H, numbers] and bucket int64 [N]."""
        half = self.width // 2
        exponent = torch.arange(half, device=bucket.device, dtype=torch.float32) / half
        angles = bucket.float()[:, None] * torch.exp(-math.log(10_000.0) * exponent)
        waves = torch.cat([angles.sin(), angles.cos()], -1).to(actions.dtype)
        seen = torch.cat([self.W1(actions, robot), waves[:, None].expand(-1, actions.shape[1], -1)], -1)
        out: Tensor = self.W3(functional.silu(self.W2(seen, robot)), robot)
        return out


class ActionHead(nn.Module):
    """The velocity field on top of the backbone.

    Args:
        config: the authors' `action_head_cfg`.
    """

    def __init__(self, config: Mapping[str, Any]):
        super().__init__()
        dit, attention = config["diffusion_model_cfg"], config["vl_self_attention_cfg"]
        width, context, hidden = (
            config["input_embedding_dim"], config["backbone_embedding_dim"], config["hidden_size"]
        )  # fmt: skip
        if dit["num_attention_heads"] * dit["attention_head_dim"] != width or dit["output_dim"] != hidden:
            raise ValueError(
                f"policy gr00t: action_head_cfg has heads of {dit['num_attention_heads']} x "
                f"{dit['attention_head_dim']} that must be input_embedding_dim={width}, and output_dim="
                f"{dit['output_dim']} that must be hidden_size={hidden}"
            )
        for part, built in _BUILT.items():
            given = config if not part else config[part]
            if odd := [key for key, value in built.items() if given.get(key, value) != value]:
                where = ".".join(filter(None, ("action_head_cfg", part, odd[0])))
                raise ValueError(
                    f"policy gr00t: {where}={given[odd[0]]!r} is of another network than this, GR00T N1.5's, whose is "
                    f"{built[odd[0]]!r}"
                )
        robots = config.get("max_num_embodiments", 32)
        self.buckets = config.get("num_timestep_buckets", 1000)
        self.horizon, self.numbers = config["action_horizon"], config["action_dim"]
        self.model = DiffusionTransformer(
            layers=dit["num_layers"], heads=dit["num_attention_heads"], head_dim=dit["attention_head_dim"],
            context=context, outputs=hidden,
        )  # fmt: skip
        self.state_encoder = RobotLayers(robots, config["max_state_dim"], hidden, width)
        self.action_encoder = ActionEncoder(robots, self.numbers, width)
        self.action_decoder = RobotLayers(robots, hidden, hidden, self.numbers)
        self.future_tokens = nn.Embedding(config.get("num_target_vision_tokens", 32), width)
        self.position_embedding = nn.Embedding(config.get("max_seq_len", 1024), width)
        for table in (self.future_tokens, self.position_embedding):
            nn.init.normal_(table.weight, std=0.02)
        self.vlln = nn.LayerNorm(context)
        self.vl_self_attention = SelfAttention(
            layers=attention["num_layers"], heads=attention["num_attention_heads"],
            head_dim=attention["attention_head_dim"],
        )  # fmt: skip

    def read(self, backbone: Tensor) -> Tensor:
        """What the backbone says, ready to be attended to, [N, L, context] of the same."""
        out: Tensor = self.vl_self_attention(self.vlln(backbone))
        return out

    def tokens(self, state: Tensor, robot: int) -> Tensor:
        """What stands before the actions, [N, 1 + future tokens, width].

        Args:
            state: [N, max_state_dim], on the model's scale.
            robot: number of the embodiment.
        """
        future = self.future_tokens.weight.expand(len(state), -1, -1)
        return torch.cat([self.state_encoder(state[:, None], robot), future], 1)

    def forward(self, context: Tensor, before: Tensor, actions: Tensor, t: Tensor, robot: int) -> tuple[Tensor, Tensor]:
        """Velocity, and the hidden states that it is decoded from.

        Args:
            context: of `read`, [N, L, context].
            before: of `tokens`.
            actions: noisy, [N, H, numbers].
            t: 0 for noise, 1 for actions, float [N].
            robot: number of the embodiment.

        Returns:
            actions - noise, [N, H, numbers]; [N, H, hidden_size].
        """
        bucket = (t.double() * self.buckets + 1e-3).long()  # a time such as 0.7 is stored a little below itself
        places = self.position_embedding.weight[: actions.shape[1]]
        tokens = torch.cat([before, self.action_encoder(actions, bucket, robot) + places], 1)
        hidden = self.model(tokens, context, bucket)[:, -actions.shape[1] :]
        return self.action_decoder(hidden, robot), hidden
