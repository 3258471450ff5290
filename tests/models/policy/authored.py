"""A small policy with all that large ones have: a published form, blocks, units of the robot, parts kept in float32."""

import json
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional

from rlinf.data.safetensors_io import write_tensors
from rlinf.models.policy.actor_critic import Normal, perceptron
from rlinf.models.policy.base import Drawn, Evaluated, Policy, PolicyConfig, looked_at, normals
from rlinf.models.policy.published import to_be_read

AUTHORED = {"type": "tests.models.policy.authored.AuthoredPolicy", "state_size": 5, "action_size": 3, "width": 16}


@dataclass(frozen=True, slots=True, kw_only=True)
class AuthoredConfig(PolicyConfig):
    state_size: int
    width: int = 32
    layers: int = 2
    action_low: tuple[float, ...] = ()
    action_high: tuple[float, ...] = ()


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x):
        seen = functional.layer_norm(x.float(), x.shape[-1:], self.norm.weight, self.norm.bias).to(x.dtype)
        return x + self.down(functional.gelu(self.up(seen)))


class AuthoredPolicy(Policy):
    Config = AuthoredConfig
    published = ("config.json", "*.safetensors")
    small_files = ("words.txt",)
    own = ("critic.*", "log_std")
    float32 = ("critic.*", "log_std", "*.norm.*")
    lora_targets = ("up", "down")

    def __init__(self, config):
        super().__init__(config)
        with to_be_read():
            self.entry = nn.Linear(config.state_size, config.width)
            self.body = nn.ModuleList(Block(config.width) for _ in range(config.layers))
            self.exit = nn.Linear(config.width, config.chunk * config.action_size)
        self.log_std = nn.Parameter(torch.full((config.chunk, config.action_size), -0.5))
        self.critic = None
        if config.value_level is not None:
            self.critic = perceptron(config.width, [8], 1, gain=0.5, activation=nn.GELU)
        self.words = ""

    @classmethod
    def published_settings(cls, directory):
        return {"width": json.loads((directory / "config.json").read_text())["hidden_size"]}

    def open_published(self, directory):
        self.words = self.files["words.txt"].decode()

    def published_name(self, name):
        return "model." + name.replace("body.", "layers.")

    def write_published(self, directory, state):
        (directory / "config.json").write_text(json.dumps({"hidden_size": self.config.width}))
        super().write_published(directory, state)

    def blocks(self):
        return list(self.body)

    def inputs(self, observation, instructions=None):
        return {"state": looked_at(observation, "state", (self.config.state_size,), "authored policy").float()}

    def encode(self, actions, inputs):
        return actions

    def draw(self, inputs, noise):
        mean, values = self._heads(inputs)
        drawn = mean if noise is None else mean + self.log_std.exp() * normals(noise).view_as(mean)
        return Drawn(drawn.clamp(-1, 1), drawn, Normal(mean, self.log_std).logprobs(drawn), values)

    def score(self, stored):
        mean, values = self._heads(stored)
        entropy = (self.log_std + 1.4189385).expand_as(mean)
        return Evaluated(Normal(mean, self.log_std).logprobs(stored["actions"]), entropy, values)

    @torch.no_grad()
    def value(self, observation, instructions=None):
        return self._heads(self.inputs(observation))[1]

    def _heads(self, inputs):
        x = self.entry(inputs["state"].to(self.entry.weight.dtype))
        for block in self.body:
            x = block(x)
        values = None if self.critic is None else self.critic(x.float())[:, 0]
        return self.exit(x).float().view(-1, self.config.chunk, self.config.action_size), values


def publish_as_authors(directory, seed=0, width=16, layers=2, state_size=5, numbers=3, dtype=torch.float32):
    """Write a directory as the authors of `AuthoredPolicy` would; the tensors, by their names."""
    random = torch.Generator().manual_seed(seed)
    shapes = {"model.entry.weight": (width, state_size), "model.entry.bias": (width,),
              "model.exit.weight": (numbers, width), "model.exit.bias": (numbers,)}  # fmt: skip
    for number in range(layers):
        of = f"model.layers.{number}"
        shapes |= {f"{of}.norm.weight": (width,), f"{of}.norm.bias": (width,), f"{of}.up.weight": (2 * width, width),
                   f"{of}.up.bias": (2 * width,), f"{of}.down.weight": (width, 2 * width),
                   f"{of}.down.bias": (width,)}  # fmt: skip
    named = {name: (torch.randn(shape, generator=random) * 0.3).to(dtype) for name, shape in shapes.items()}
    directory.mkdir(parents=True, exist_ok=True)
    write_tensors(directory / "model.safetensors", named)
    (directory / "config.json").write_text(json.dumps({"hidden_size": width}))
    (directory / "words.txt").write_text("grasp\n")
    return named
