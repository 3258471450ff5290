"""The roles of runs that learn from a replay buffer or from an expert.

In: an `EmbodiedConfig` whose algorithm is sac, crossq, iql or dagger. Out: the policy that acts and the trainer, ready
to be started.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from rlinf.actors.embodied.dagger import DaggerPolicy, DaggerTrainer
from rlinf.actors.embodied.policy import PolicyActor
from rlinf.actors.embodied.sac_trainer import SacTrainer
from rlinf.config.embodied import DAGGER, EmbodiedConfig
from rlinf.job.embodied.keys import READ_BY
from rlinf.job.roles.running import Role

_SCHEDULE = ("schedule", "warmup_steps", "min_lr_ratio")
"""Of the optimizer's settings those that these trainers do not have."""


def remembering(
    config: EmbodiedConfig,
    policy: Mapping[str, Any],
    held: Mapping[str, tuple[int, int]],
    optimizer: Mapping[str, Any],
) -> dict[str, Role]:
    """The policy that acts, and its trainer.

    Args:
        config: of the run.
        policy: what both are made with: the policy's configuration and path.
        held: bytes that each role holds, active and parked.
        optimizer: settings of the optimizer.
    """
    name = config.algorithm.name
    settings = {key: value for key, value in asdict(config.off_policy).items() if name in READ_BY[key]}
    settings.pop("offline_steps", None)  # the loop's
    rates = {key: value for key, value in optimizer.items() if key not in _SCHEDULE}
    made = {"seed": config.seed, **policy, **rates, **settings}
    if name == DAGGER:
        expert = asdict(config.dagger)
        updates = expert.pop("updates")
        return {
            "policy": Role(DaggerPolicy, {**policy, **expert}, held["policy"]),
            "trainer": Role(DaggerTrainer, {**made, "updates": updates}, held["trainer"]),
        }
    made.pop("weight_decay", None)  # it has none
    return {
        "policy": Role(PolicyActor, {**policy, "keep_following": True}, held["policy"]),
        "trainer": Role(SacTrainer, {**made, "algorithm": name}, held["trainer"]),
    }
