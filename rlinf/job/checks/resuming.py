"""What becomes of a key that was changed between a checkpoint and the run that goes on from it.

In: a key, and whether the run is on text or embodied. Out: applied, ignored, or refused, with the reason. A checkpoint
brings weights, the optimizer's state, and the position in the data; all else follows the configuration of the run that
goes on. A key that stands nowhere here counts as applied; a test sees to it that every key stands here, by itself or
by its section.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from rlinf.config.embodied import EmbodiedConfig
from rlinf.config.text import RunConfig

Effect = Literal["applied", "ignored", "refused"]
WEIGHTS = "the weights are the checkpoint's"
ORDER = "the checkpoint's position in the data would mean other problems"
OVER = "the warm-up is over"


@dataclass(frozen=True, slots=True)
class Resumed:
    """What becomes of a changed key."""

    effect: Effect
    """It is used from here on; the checkpoint's value stays; the run does not start."""
    why: str = ""
    """Unless it is applied."""


_COMMON = (
    *("name", "output_dir", "steps", "log_every", "trace", "flow", "system", "callbacks", "keep_previous"),
    *("optimizer", "checkpoint", "metrics", "placement", "algorithm"),
)
TEXT: Mapping[str, Resumed] = {
    **dict.fromkeys(_COMMON, Resumed("applied")),
    **dict.fromkeys(
        (
            "agent",
            "staleness",
            "data",
            "reward",
            "reward_model",
            "rollout",
            "trainer",
            "evaluation",
            "critic",
            "supervised",
        ),
        Resumed("applied"),
    ),
    **dict.fromkeys(
        ("reference", "teacher", "teachers", "roles", "model.tokenizer", "model.lora.alpha"), Resumed("applied")
    ),
    "seed": Resumed("refused", ORDER),
    "data.shuffle": Resumed("refused", ORDER),
    "task": Resumed("refused", ORDER),
    "model.path": Resumed("ignored", WEIGHTS),
    "model.config": Resumed("refused", WEIGHTS),
    "model.freeze": Resumed("refused", "the optimizer's state is that of the weights that learned"),
    "model.lora.r": Resumed("refused", WEIGHTS),
    "model.lora.target_modules": Resumed("refused", WEIGHTS),
    "model.lora.path": Resumed("ignored", WEIGHTS),
    "critic.model": Resumed("ignored", WEIGHTS),
    "reference.adapter": Resumed("ignored", WEIGHTS),
    "teacher.adapter": Resumed("ignored", WEIGHTS),
    "reference.model": Resumed("ignored", "the run's reference stays; start a new run for another"),
    "sft": Resumed("ignored", OVER),
}
"""Keys of runs on text. The longest one that a key is, or lies below, holds."""
EMBODIED: Mapping[str, Resumed] = {
    **dict.fromkeys(_COMMON, Resumed("applied")),
    **dict.fromkeys(("seed", "env", "policy.horizon", "off_policy", "dagger", "trials"), Resumed("applied")),
    **dict.fromkeys(("policy.gradient_checkpointing", "policy.sharding", "policy.lora.alpha"), Resumed("applied")),
    "policy.dtype": Resumed("refused", "the checkpoint's parameters and their optimizer are grouped by it"),
    "policy.train": Resumed("refused", "the optimizer's state is of other parameters"),
    "policy.lora.r": Resumed("refused", WEIGHTS),
    "policy.lora.target_modules": Resumed("refused", WEIGHTS),
    "policy.lora.path": Resumed("ignored", WEIGHTS),
    "policy.type": Resumed("refused", WEIGHTS),
    "policy.settings": Resumed("refused", WEIGHTS),
    "policy.path": Resumed("ignored", WEIGHTS),
    "off_policy.alpha": Resumed("ignored", "the temperature is the checkpoint's"),
    "imitation.statistics": Resumed("refused", WEIGHTS),
    "imitation": Resumed("applied"),  # by runs of imitation; a warm-up that is over is not done again
}
"""The same of embodied runs."""


def on_resume(schema: type[RunConfig | EmbodiedConfig], key: str, *, kept_reference: bool = True) -> Resumed:
    """What becomes of a key that was changed since the checkpoint was written.

    Args:
        schema: `RunConfig` or `EmbodiedConfig`.
        key: such as `optimizer.lr`, or `model.config.hidden_size`, which lies in a mapping.
        kept_reference: checkpoint or run hold the reference policy, as they do after a warm-up.
    """
    if key == "reference.model" and not kept_reference:
        return Resumed("applied")
    entry = entry_of(schema, key)
    return Resumed("applied") if entry is None else _table(schema)[entry]


def entry_of(schema: type[RunConfig | EmbodiedConfig], key: str) -> str | None:
    """The entry that holds for a key; None if there is none."""
    parts, table = key.split("."), _table(schema)
    above = (".".join(parts[:count]) for count in range(len(parts), 0, -1))
    return next((name for name in above if name in table), None)


def _table(schema: type[RunConfig | EmbodiedConfig]) -> Mapping[str, Resumed]:
    return TEXT if schema is RunConfig else EMBODIED
