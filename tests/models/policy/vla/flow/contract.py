"""Tiny pi0, pi0.5 and pi0-FAST for what every policy promises to trainers."""

from pathlib import Path

from examples.tiny_checkpoints import write_tiny_fast
from examples.tiny_checkpoints import write_tiny_flow as write_tiny
from tests.models.policy.contract import Instance

_RUN = {"image": [32, 28, 6], "state_size": 8, "action_size": 7, "chunk": 2, "embodiment": "libero", "steps": 2,
        "critic_hidden": [16]}  # fmt: skip


def pi0(directory: Path) -> Instance:
    write_tiny(directory, "pi0")
    return Instance({"type": "pi0", **_RUN}, directory, instructions=("push", "pull it"))


def pi05(directory: Path) -> Instance:
    write_tiny(directory, "pi05")
    return Instance({"type": "pi05", **_RUN, "method": "flow_noise"}, directory, instructions=("push", "pull it"))


def pi0_fast(directory: Path) -> Instance:
    write_tiny_fast(directory)
    given = {"type": "pi0_fast", "image": [32, 28, 3], "state_size": 7, "action_size": 7, "chunk": 2}
    return Instance({**given, "critic_hidden": [16]}, directory, instructions=("push", "pull it"))


def pi0_lora(directory: Path) -> Instance:
    known = pi0(directory)
    training = {"lora": {"r": 2, "alpha": 4, "target_modules": "auto"}}
    # of the last layer of words only keys and values are read
    last = "paligemma_with_expert.paligemma.model.language_model.layers.1."
    unused = (f"{last}*.q_proj.*", f"{last}*.o_proj.*", f"{last}mlp.*")
    return Instance(known.config, known.path, training=training, unused=unused, instructions=known.instructions)
