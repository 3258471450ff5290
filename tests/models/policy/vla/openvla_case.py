"""Tiny checkpoints and observations that the tests of OpenVLA share."""

import torch

from examples.tiny_checkpoints import write_tiny_openvla as write_tiny
from rlinf.models.policy.build import make_policy
from tests.models.policy.contract import Instance

CPU = torch.device("cpu")
TEXTS = ("push", "pick up the red cube", "go left", "open the drawer")


def loaded(directory, kind, **settings):
    """A tiny policy of two actions of three numbers, with all of its weights but the vocabulary's moved."""
    given = {"embodiment": "plain", "image": (32, 40, 3), "action_size": 3, "chunk": 2, "prompt_length": 40}
    return make_policy({"type": kind, **given, **settings}, str(directory), CPU)


def instance_of(directory, kind, training=None, unused=(), **settings):
    """An instance for `tests/models/policy/contract.py`."""
    given = {"embodiment": "plain", "image": (28, 28, 3), "action_size": 3, "chunk": 2, "prompt_length": 24}
    write_tiny(directory, kind, action_size=3)
    return Instance(
        {"type": kind, **given, **settings},
        directory,
        training or {},
        unused,
        instructions=("push", "pick up the bowl"),
    )


def openvla(directory):
    return instance_of(directory, "openvla")


def oft(directory):
    return instance_of(directory, "openvla-oft", value_level="action")


def continuous(directory):
    return instance_of(directory, "openvla-oft", value_level="action", variant="official", head="l1", state_size=5)


def adapted(directory):
    lora = {"r": 2, "alpha": 2, "target_modules": ["auto"]}
    # adapters go to all layers of a name, those of blocks that nothing reads too, as in the published ones
    unread = ("*.featurizer.blocks.2.*", "*.fused_featurizer.blocks.1.*", "*.attn_pool.*")
    return instance_of(directory, "openvla-oft", {"lora": lora}, unread, value_level="action")


def seen(rows=4, channels=3, seed=0):
    """An observation."""
    random = torch.Generator().manual_seed(seed)
    return {
        "rgb": torch.randint(0, 256, (rows, 32, 40, channels), generator=random, dtype=torch.uint8),
        "state": torch.randn(rows, 5, generator=random),
    }


def told(rows=4):
    """Instructions of different lengths."""
    return [TEXTS[row % len(TEXTS)] for row in range(rows)]


def shaken(policy, scale=0.2):
    """The policy with its weights moved, so that what it says depends on all that it reads."""
    random = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in policy.parameters():
            noise = torch.randn(parameter.shape, generator=random)
            parameter.add_(noise, alpha=scale * max(parameter.shape[-1], 1) ** -0.5)
    return policy
