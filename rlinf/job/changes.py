"""Which change of a run's keys would help against what its steps wait for, and by how many seconds of a step.

In: a cause that was measured, the run's configuration, and what its steps cost so far. Out: a sentence's second half.
Where the planner knows (which devices, how much staleness), it is asked, at most as long as a hundredth of the run.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable

from rlinf.config.embodied import EmbodiedConfig, EnvConfig
from rlinf.config.supervised import SUPERVISED
from rlinf.config.text import RunConfig
from rlinf.job.checks.by_kind import device_kind
from rlinf.metrics.explain.causes import Cause
from rlinf.metrics.explain.explainer import Change
from rlinf.placement.auto.auto import WORTH
from rlinf.placement.auto.choose import choose
from rlinf.placement.grammar import PlacementError
from rlinf.placement.profiling.profile import Profile
from rlinf.placement.seats import Placed

AHEAD = {
    "rlinf.flows.grpo": "rlinf.flows.grpo_async",
    "rlinf.flows.ppo": "rlinf.flows.ppo_async",
    "rlinf.flows.agentic": "rlinf.flows.agentic.agentic_async",
}
"""Of our synchronous flows, those that begin work early."""
LEAST = 0.05
"""Seconds of a step; what costs less is not worth another key."""
MANY_FAILED = 0.1
"""Share of answers without a reward, above which it is to be seen first why: more workers would fail as often."""
SHARE = 0.01
"""Of the run's time that planning may take."""
_CORES = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
"""Of this machine, as of those that have the environments, as far as is known."""
_WARM = 3
"""Steps before the planner is asked: the first costs more than it will."""


class Changes:
    """Knows what would help.

    Args:
        config: of the run.
        profile: what its steps cost so far; None before the first.
        placed: where its roles are now.
        staleness: steps that its flow begins work early.
        flow: its path.
    """

    def __init__(
        self,
        config: RunConfig | EmbodiedConfig,
        profile: Callable[[], Profile | None],
        placed: Callable[[], Placed],
        staleness: int = 0,
        flow: str = "",
    ) -> None:
        self._config, self._profile, self._placed, self._staleness = config, profile, placed, staleness
        self._ahead = AHEAD.get(flow)
        self._steps, self._ran, self._planned = 0, 0.0, 0.0
        self._plans: tuple[Change | None, Change | None] = (None, None)

    def change(self, cause: Cause, step: float) -> Change | None:
        """What would help against a cause; None where nothing is known.

        Args:
            cause: of a step.
            step: seconds that it took.
        """
        self._steps, self._ran = self._steps + 1, self._ran + step
        config = self._config
        if cause.seconds < LEAST:
            return None
        if isinstance(config, RunConfig):
            if cause.name in ("reward", "weights", "small micro-batches"):
                return _of_texts(config, cause)
        elif cause.name == "environment":
            return _of_environments(config.env, cause)
        if cause.name == "slow host":
            return Change(f"look at where {cause.who} runs", 0.0)
        if cause.name in ("tail", "waiting", "switching", "bound on staleness"):
            return self._of_plans(step)
        return None

    @property
    def _given_texts(self) -> bool:
        return isinstance(self._config, RunConfig) and self._config.algorithm.name in SUPERVISED

    def _of_plans(self, step: float) -> Change | None:
        """The better of other devices and more staleness."""
        if self._steps > _WARM and self._planned <= SHARE * self._ran:
            began = time.perf_counter()
            self._plans = self._searched(step)
            self._planned += time.perf_counter() - began
        known = [change for change in self._plans if change is not None and change.seconds > 0]
        return max(known, key=lambda change: change.seconds, default=None)

    def _searched(self, step: float) -> tuple[Change | None, Change | None]:
        profile, placed = self._profile(), self._placed()
        if profile is None or not placed.fleet.counts:
            return None, None
        if self._staleness or self._given_texts:  # measured while work was begun early; placed by hand alone
            return None, None
        fleet = placed.fleet
        try:  # as `auto` does, but for rehearsals of the flow
            chosen = choose(
                profile, fleet.counts, placed.memory_by_kind, extrapolate=True, per_mode=1, hardware=fleet.hardware,
            )  # fmt: skip
        except PlacementError:  # a stage that was measured on too little
            return None, None
        moved, later, first = None, None, chosen.rows[0]
        if self._config.placement.mode != "auto" and first.expected <= (1 - WORTH) * step:
            moved = Change(f"set `placement.mode=auto` (planned: {first.mode})", step - first.expected)
        if self._ahead is not None and (best := chosen.recommended) is not None and best.staleness:
            now, then = best.rows[0], next(row for row in best.rows if row.staleness == best.staleness)
            share = 1 - then.found.seconds / now.found.seconds
            later = Change(f"set `staleness.max={best.staleness}` with `flow={self._ahead}`", share * step)
        return moved, later


def _of_texts(config: RunConfig, cause: Cause) -> Change | None:
    """Keys of a run on texts that make what is slow quicker, where they can."""
    if cause.name == "reward" and cause.who == "judge":
        if cause.failed >= MANY_FAILED:
            return Change("see first why answers are not scored (`alarms.jsonl` has the first reason)", 0.0)
        workers = config.reward.workers
        more = "set `reward.workers` to more" if workers is None else f"set `reward.workers={2 * workers}`"
        return Change(more, cause.seconds / 2)
    if cause.name == "weights" and config.rollout.dtype == "float32" and device_kind(config.placement) == "cuda":
        return Change("set `rollout.dtype=bfloat16` (half the bytes)", cause.seconds / 2)
    if cause.name == "small micro-batches" and (tokens := config.trainer.micro_batch_tokens):
        return Change(f"set `trainer.micro_batch_tokens={2 * tokens}`", cause.seconds / 2)
    return None


def _of_environments(env: EnvConfig, cause: Cause) -> Change | None:
    """More workers where there are cores for them, or slices that act by turns; of these nothing is promised: what a
    decision costs in messages, and a policy that computes half as many rows at a time, is not known before it is tried.
    """
    if env.workers and 2 * env.workers <= min(_CORES, env.num_envs):
        return Change(f"set `env.workers={2 * env.workers}`", cause.seconds / 2)
    if env.workers and env.slices == 1 and env.num_envs % (2 * env.workers * env.group_size) == 0:
        return Change("try `env.slices=2` (one half acts while the other is simulated)", 0.0)
    return None
