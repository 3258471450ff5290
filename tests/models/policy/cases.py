"""Small policies of every kind, and observations for them."""

import torch

MLP = {"type": "mlp", "state_size": 5, "action_size": 3, "hidden": [16, 16]}
CHOOSING = {**MLP, "choices": [2, 4, 3], "chunk": 2}
CNN = {"type": "cnn", "image": [16, 16, 3], "action_size": 2, "hidden": [16], "channels": [4, 8],
       "picture_features": 12}  # fmt: skip
VLA = {
    "type": "vla", "image": [16, 16, 3], "patch_size": 8, "action_size": 2, "bins": 16, "text_length": 12,
    "vision": {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2},
    "decoder": {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2},
}  # fmt: skip

CONFIGS = {
    "mlp": MLP,
    "mlp, shared, chunks": {**MLP, "shared": True, "chunk": 3, "level": "token", "value_level": "action"},
    "mlp, no critic": {**MLP, "chunk": 2, "level": "chunk", "value_level": None, "normalise": False},
    "mlp, choices": CHOOSING,
    "cnn": CNN,
    "cnn, state, chunks": {**CNN, "state_size": 5, "chunk": 2, "level": "action", "value_level": "action"},
    "vla": VLA,
    "vla, two cameras, state, chunks": {
        **VLA, "image": [16, 16, 6], "state_size": 5, "chunk": 3, "level": "action", "value_level": "action",
    },
    "vla, dinov2, qwen2, no critic": {
        **VLA, "value_level": None, "temperature": 0.7, "vision": {**VLA["vision"], "model_type": "dinov2"},
        "decoder": {**VLA["decoder"], "model_type": "qwen2"},
    },
}  # fmt: skip


def observed(config, rows=6, seed=0):
    """An observation with all that any policy looks at."""
    random = torch.Generator().manual_seed(seed)
    picture = config.get("image", [16, 16, 3])
    return {
        "state": torch.randn(rows, 5, generator=random),
        "rgb": torch.randint(0, 256, (rows, *picture), generator=random, dtype=torch.uint8),
    }


def instructed(config, rows=6):
    """Instructions of different lengths, for policies that read."""
    return [("push", "pull it")[row % 2] for row in range(rows)] if config["type"] == "vla" else None


def rough(policy, scale=0.3, seed=1, only=lambda parameter: True):
    """The policy with its weights moved, so that nothing is 0 or uniform by its first weights."""
    random = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in filter(only, policy.parameters()):
            parameter.add_(torch.randn(parameter.shape, generator=random), alpha=scale * parameter.numel() ** -0.25)
    return policy
