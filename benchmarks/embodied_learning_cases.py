"""Cases of `benchmarks.embodied_learning`: tasks, policies and algorithms, and a script that shows how it is done."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from examples.tiny_checkpoints import NETWORK
from rlinf.envs.base import Transition
from rlinf.envs.environment import EnvOutput
from rlinf.envs.toy import REACH, Reach
from rlinf.runtime.actor.actor import Actor, endpoint


class SparseReach(Reach):
    """Reach, rewarded only when it is solved: 1 for the step that solves it, 0 for every other."""

    def step(self, actions: Tensor, active: Tensor) -> Transition:
        done = super().step(actions, active)
        return replace(done, reward=done.terminated.float())


class Expert(Actor):
    """Goes straight to the target, as far as one action reaches. It is told where that is; policies must see it."""

    @endpoint
    async def act(self, key: tuple[int, int], output: EnvOutput, *, greedy: bool = False, keep: bool = True) -> Tensor:
        """See `PolicyActor.act`; actions [N, 1, A]."""
        point, target = output.observation["state"].chunk(2, 1)
        return ((target - point) / REACH).clamp(-1.0, 1.0)[:, None]


@dataclass(frozen=True, slots=True)
class Case:
    """Learning by demonstrations, then by acting."""

    task: str
    """In words, for the table."""
    simulator: str
    """Dotted path of its class."""
    options: Mapping[str, Any]
    """Arguments of the simulator."""
    policy: Mapping[str, Any]
    """Configuration of the policy; sizes come from the simulator."""
    algorithm: Mapping[str, Any]
    """Name of the recipe and `overrides`."""
    learning: Mapping[str, Any]
    """Further settings of the trainer."""
    demonstrations: int
    """Episodes of the script."""
    imitation: Mapping[str, Any]
    """Steps, batch and learning rate of supervised learning; of one part of it, where it may have several."""
    num_envs: int
    """Environments to learn in."""
    steps: int
    """Steps of reinforcement learning."""
    group_size: int = 1
    """So many neighbouring environments begin alike."""
    max_steps: int = 12
    """Steps of an episode at most; each step of the flow lasts as long."""
    parts: int = 1
    """Parts of supervised learning at most: it ends with the first after which `enough` of the trials are solved."""
    enough: float = 0.5
    """A share of the trials, which leaves a gap."""
    checkpoint: Mapping[str, Any] | None = None
    """Arguments of `write_tiny` for the published checkpoint that the policy is read from; None for a new policy."""


_LAYER = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 1}


def _flow(method: str) -> Case:
    return Case(
        task="2-D, state, distance as reward",
        simulator="rlinf.envs.toy.Reach",
        options={"dims": 2},
        policy={"type": "flow", "hidden": [64, 64], "method": method, "steps": 4, "normalise": False},
        algorithm={"name": "ppo", "overrides": {"advantage": {"gamma": 0.9, "lam": 0.95}}},
        learning={"lr": 1e-3, "epochs": 4, "minibatch": 256},
        demonstrations=12,
        imitation={"steps": 40, "batch": 64, "lr": 1e-3},
        num_envs=64,
        steps=60,
    )


_OFT = Case(
    task="2-D, pixels and words, distance as reward",
    simulator="rlinf.envs.toy.Reach",
    options={"dims": 2, "pixels": 16},
    policy={
        "type": "openvla-oft",
        "embodiment": "plain",
        "instruction": "reach the red goal",
        "prompt_length": 24,
        "chunk": 2,
    },
    algorithm={"name": "ppo", "overrides": {"advantage": {"gamma": 0.9, "lam": 0.95}}},
    learning={"lr": 3e-4, "critic_lr": 1e-3, "epochs": 2, "minibatch": 64},
    demonstrations=512,
    imitation={"steps": 1000, "batch": 64, "lr": 1e-3},
    num_envs=64,
    steps=60,
    checkpoint={
        "action_size": 2,
        "network": {
            "image_sizes": [16, 16],
            "vision_sizes": [{**each, "image": 16, "patch": 4} for each in NETWORK["vision_sizes"]],
        },
        "norm_stats": {"toy": {"action": {"q01": [-REACH] * 2, "q99": [REACH] * 2}}},
    },
)

CASES = {
    # From pictures of 16 x 16 alone: what the script is told, the policy must see.
    "vla-ppo": Case(
        task="2-D, pixels, distance as reward",
        simulator="rlinf.envs.toy.Reach",
        options={"dims": 2, "pixels": 16},
        policy={
            "type": "vla",
            "instruction": "reach",
            "text_length": 6,
            "state_size": 0,
            "bins": 9,
            "patch_size": 4,
            "vision": _LAYER,
            "decoder": _LAYER,
        },
        algorithm={"name": "ppo", "overrides": {"advantage": {"gamma": 0.9, "lam": 0.95}}},
        learning={"lr": 3e-4, "critic_lr": 1e-3, "epochs": 2, "minibatch": 128},
        demonstrations=512,
        imitation={"steps": 500, "batch": 64, "lr": 1e-3},
        num_envs=64,
        steps=60,
    ),
    # The same by OpenVLA-OFT: its true structure, tokenizer and files, and 256 bins, at sizes
    # that a core computes. Two actions are decided at a time, each with a value of its own.
    "oft-ppo": _OFT,
    # The same by its continuous head: L1, then normal distributions around its numbers, whose deviations learn.
    "oft_l1-ppo": replace(
        _OFT, policy={**_OFT.policy, "head": "l1", "variant": "official", "state_size": 0, "log_std": -1.5}
    ),
    # pi0.5 from the same pictures as the small VLA: its true structure, tokenizer and files. Every step of its chain
    # draws (Flow-Noise), with larger deviations than published, from which a tuning seed learned more. All of it
    # learns: its first weights are random, of PaliGemma's too.
    "pi05-ppo": Case(
        task="1-D, pixels and words, distance as reward",
        simulator="rlinf.envs.toy.Reach",
        options={"dims": 1, "pixels": 16},
        policy={
            "type": "pi05",
            "instruction": "reach",
            "prompt_length": 8,
            "state_size": 0,
            "method": "flow_noise",
            "steps": 3,
            "noise_std": [0.2, 0.5],
            "critic_hidden": (64, 64),
        },
        algorithm={"name": "ppo", "overrides": {"advantage": {"gamma": 0.9, "lam": 0.95}}},
        learning={
            "lr": 2e-4,
            "critic_lr": 3e-3,
            "critic_warmup": 4,  # a critic that knows nothing makes the first steps large and blind
            "epochs": 2,
            "minibatch": 128,
            "train": ["*"],
        },
        demonstrations=512,
        imitation={"steps": 100, "batch": 64, "lr": 1e-3},
        parts=20,
        enough=0.65,  # the same number leaves some seeds with nothing to learn, and others without any sight
        num_envs=64,
        steps=60,
        checkpoint={
            "horizon": 1,
            "width": 4,
            "actions": (REACH,),
            "sizes": {
                "vision": {**_LAYER, "image_size": 16, "patch_size": 4},
                "language": {**_LAYER, "num_hidden_layers": 2, "head_dim": 32},
                "expert": {**_LAYER, "num_hidden_layers": 2, "head_dim": 32},
            },
        },
    ),
    # π0-FAST from the same pictures: true structure, tokenizers and files, FAST's tokens made for straight lines. Two
    # actions are decided at a time, by as many tokens as it takes. All of it learns, as in pi05-ppo.
    "pi0_fast-ppo": Case(
        task="1-D, pixels and words, distance as reward",
        simulator="rlinf.envs.toy.Reach",
        options={"dims": 1, "pixels": 16},
        policy={
            "type": "pi0_fast",
            "instruction": "reach",
            "state_size": 0,
            "chunk": 2,
            "reads_bos": False,
            "critic_hidden": (64, 64),
        },
        algorithm={"name": "ppo", "overrides": {"advantage": {"gamma": 0.9, "lam": 0.95}}},
        learning={"lr": 2e-4, "critic_lr": 3e-3, "critic_warmup": 4, "epochs": 2, "minibatch": 128},
        demonstrations=512,
        imitation={"steps": 100, "batch": 64, "lr": 1e-3},
        parts=20,
        enough=0.65,
        num_envs=64,
        steps=60,
        checkpoint={
            "chunk": 2,
            "state": (),
            "actions": (REACH,),
            "about": {"tokenizer_max_length": 24, "max_action_tokens": 20, "max_decoding_steps": 16},
            "sizes": {
                "vision": {**_LAYER, "image_size": 16, "patch_size": 4},
                "language": {**_LAYER, "num_hidden_layers": 2, "head_dim": 32},
            },
        },
    ),
    # The small policy that denoises, once by each way to draw, from a few demonstrations.
    "flow_sde-ppo": _flow("flow_sde"),
    "flow_noise-ppo": _flow("flow_noise"),
    # Nothing says how far the target is; episodes that began alike are compared, and where all of them or none solved
    # the task there is nothing to learn.
    "mlp-grpo": Case(
        task="2-D, state, success as reward",
        simulator="benchmarks.embodied_learning_cases.SparseReach",
        options={"dims": 2},
        # The running scale of states would jump in the first steps, since a dozen episodes say little about it.
        policy={"type": "mlp", "hidden": [64, 64], "normalise": False, "value_level": None},
        algorithm={"name": "grpo", "overrides": {"aggregation": {"how": "seq-mean-token-mean"}}},
        learning={"lr": 1e-3, "epochs": 2, "minibatch": 256},
        demonstrations=12,
        imitation={"steps": 60, "batch": 64, "lr": 1e-3},
        num_envs=128,
        steps=30,
        group_size=8,
    ),
}
"""By the name of policy and algorithm."""


def shrunk(case: Case) -> Case:
    """Shorten a case to seconds, to see that it runs: it learns nothing worth the name."""
    imitation = {**case.imitation, "steps": 3}
    return replace(case, num_envs=2 * max(case.group_size, 4), steps=2, imitation=imitation, parts=min(case.parts, 2))


def parameters(counted: torch.nn.Module) -> int:
    """How many numbers a policy learns."""
    return sum(each.numel() for each in counted.parameters())
