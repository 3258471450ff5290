"""Moves the roles of a running job to a faster placement, and predicts which change of a run's keys would help.

In: the seconds of every step. Out: roles that have moved, lines for whoever watches, `profile.json` and `plan.yaml` in
the run's directory. Nobody is woken; the run waits while roles move.

`Changes` takes a cause of waiting that was measured, the run's configuration and what its steps cost so far, and
returns the clause that says what to change and how many seconds of a step that saves. Where the planner knows (which
devices, how much staleness), it is asked, at most as long as a hundredth of the run.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import time
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from rlinf.config.common import Placing
from rlinf.config.embodied import EmbodiedConfig, EnvConfig
from rlinf.config.learning import SUPERVISED
from rlinf.config.text import RunConfig
from rlinf.metrics.explain import Cause, Change
from rlinf.metrics.machine import machine
from rlinf.placement.auto import WORTH, AutoPlacement, choose
from rlinf.placement.costs import Ledger, MeasuredRun
from rlinf.placement.grammar import PlacementError
from rlinf.placement.hardware import Fleet
from rlinf.placement.plan import Mode, Plan, RolePlan
from rlinf.placement.plan import save as save_plan
from rlinf.placement.profile import Profile
from rlinf.placement.seats import Placed, RoleKind, placed_by, spread
from rlinf.runs.callbacks import RunState
from rlinf.runs.dry_run.transformer import device_kind
from rlinf.runs.prepare import RunPlan
from rlinf.runs.roles import restore_own, save_own
from rlinf.runtime.base.tasks import all_or_none
from rlinf.runtime.system.handles import ActorGroup
from rlinf.runtime.system.system import ActorSystem
from rlinf.training.checkpoint import ParkedState, park

AHEAD = {
    "rlinf.flows.grpo": "rlinf.flows.grpo_async",
    "rlinf.flows.ppo": "rlinf.flows.ppo_async",
    "rlinf.flows.agentic": "rlinf.flows.agentic.agentic_async",
}
"""Asynchronous flow that begins work early, for each of our synchronous flows that has one."""
LEAST = 0.05
"""Seconds of a step; what costs less is not worth another key."""
MANY_FAILED = 0.1
"""Share of answers without a reward, above which it is to be seen first why: more workers would fail as often."""
SHARE = 0.01
"""Share of the run's time that planning may take."""
_CORES = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
"""Cores of this machine, which stand for those of the machines that have the environments."""
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
        """Return the change of a key that would help against a cause; None where nothing is known.

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
        helpful = [change for change in self._plans if change is not None and change.seconds > 0]
        return max(helpful, key=lambda change: change.seconds, default=None)

    def _searched(self, step: float) -> tuple[Change | None, Change | None]:
        profile, placed = self._profile(), self._placed()
        if profile is None or not placed.fleet.counts:
            return None, None
        if self._staleness or self._given_texts:  # measured while work was begun early; placed by hand alone
            return None, None
        try:  # as `auto` does, but for rehearsals of the flow
            choice = choose(profile, placed.fleet.by_kind(placed.memory_by_kind), extrapolate=True, per_mode=1)
        except PlacementError:  # a stage that was measured on too little
            return None, None
        moved, later, first = None, None, choice.rows[0]
        if self._config.placement.mode != "auto" and first.expected <= (1 - WORTH) * step:
            moved = Change(f"set `placement.mode=auto` (planned: {first.mode})", step - first.expected)
        if self._ahead is not None and (best := choice.recommended) is not None and best.staleness:
            now, then = best.rows[0], next(row for row in best.rows if row.staleness == best.staleness)
            share = 1 - then.candidate.seconds / now.candidate.seconds
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


PLAN = "plan.yaml"
"""File name in a run directory."""
Roles = Mapping[str, ActorGroup]


class Mover(Protocol):
    """A workload as far as roles that move are concerned."""

    async def spawn(self, placed: Placed, names: Collection[str] | None = None) -> Roles:
        """Start these roles."""

    async def publish(self, roles: Any) -> None:
        """Let roles that may be new have the trainer's weights."""


class PlacementManager:
    """The placement of one run.

    Args:
        wanted: the section `placement`.
        prepared: the roles, where they are at first, and the flow.
    """

    def __init__(self, wanted: Placing, prepared: RunPlan) -> None:
        placed, kinds = prepared.placed, prepared.kinds
        self.placed, self._kinds = placed, kinds
        self._staleness, self._flow = prepared.staleness, prepared.path
        facts = MeasuredRun(
            prepared.model, machine(), prepared.path, placed.fleet.kinds, prepared.held, prepared.staleness
        )
        self.ledger = Ledger(placed.of_actors, prepared.items, facts, count=placed.gpus)
        self._auto: AutoPlacement | None = None
        if wanted.mode == "auto" and placed.devices > 1:
            self._auto = AutoPlacement(
                prepared.flow,
                placed.fleet,
                placed.memory_by_kind,
                explored=_explored(kinds, placed.fleet),
                first=wanted.profile_steps,
                replan_above=wanted.replan_above,
            )

    def changes(self, config: RunConfig | EmbodiedConfig) -> Changes:
        """Predicts which changes of the run's keys would help.

        Args:
            config: of the run.
        """
        return Changes(config, lambda: self.ledger.profile, lambda: self.placed, self._staleness, self._flow)

    async def after(
        self, seconds: float, run: RunState, workload: Mover, *, rest: Callable[[], Awaitable[Any]]
    ) -> Roles:
        """A step is over: plan and move, if it is time to.

        Args:
            seconds: that the step took.
            run: whose roles move.
            workload: starts and supplies them.
            rest: waits until nothing is under way between steps, such as a checkpoint.

        Returns:
            The roles, those that moved as they are now.
        """
        if self._auto is None or not self._auto.due(seconds) or (profile := self.ledger.profile) is None:
            return run.roles
        decision = await self._auto.decide(profile, self.placed.plan)
        run.report.line(decision.sentence)
        if decision.plan is None:
            return run.roles
        await rest()
        goal, directory = placed_by(decision.plan, self.placed, self._kinds), run.directory.path
        moving = moved(self.placed, goal)
        spawn = partial(workload.spawn, goal)
        now = await relocate(run.system, run.roles, moving, directory, spawn=spawn, publish=workload.publish)
        where = (f"{role} to host {', '.join(map(str, now[role].hosts))}" for role in now if role in moving)
        run.report.line(f"moved: {', '.join(where)}")
        self.placed, self.ledger.devices = goal, goal.of_actors
        await asyncio.to_thread(save_plan, decision.plan, directory / PLAN)
        return now


def _explored(kinds: Sequence[RoleKind], fleet: Fleet) -> list[Plan]:
    """Return the placements to measure besides all roles on all devices: roles on devices of their own, if there are
    enough. Of several kinds of device, each role on each: as many placements as kinds, where generation has one and the
    others the next."""
    names, devices = [kind.name for kind in kinds if kind.on_devices], len(fleet.kinds)
    alike = [fleet.of_kind(kind) for kind in fleet.counts]
    if len(alike) > 1:
        return [
            Plan({name: RolePlan(alike[(turn + (at > 0)) % len(alike)]) for at, name in enumerate(names)})
            for turn in range(len(alike))
        ]
    modes: tuple[Mode, ...] = ("disaggregated", "hybrid")
    for mode in modes:
        try:
            shares = spread(mode, names[0], names[1:], devices)
        except PlacementError:
            continue
        return [Plan({role: RolePlan(where) for role, where in shares.items()})]
    return []


ASIDE = "checkpoints/.moving.partial"
"""Directory, in that of the run, into which moving roles are saved whose class only knows files. If a run is killed
meanwhile, it is removed with other unfinished checkpoints when the run is resumed."""


def moved(before: Placed, after: Placed) -> frozenset[str]:
    """Names of the roles that are to be elsewhere, or to ask for their devices where they did not."""
    return frozenset(
        role
        for role in after.seats
        if (before.seats[role].hosts, before.seats[role].devices)
        != (after.seats[role].hosts, after.seats[role].devices)
        or ("devices" in before.spawning(role)) != ("devices" in after.spawning(role))
    )


async def relocate(
    system: ActorSystem,
    roles: Mapping[str, ActorGroup],
    moving: Collection[str],
    directory: Path,
    *,
    spawn: Callable[[Collection[str]], Awaitable[Mapping[str, ActorGroup]]],
    publish: Callable[[Mapping[str, ActorGroup]], Awaitable[Any]],
) -> dict[str, ActorGroup]:
    """Move some roles, one after the other gone before the first comes: a device need not hold both.

    What a role knows stays in the memory of its old hosts meanwhile, and its new ranks fetch what they need of it. A
    role that has `save` and `restore` and no `export_state` goes through a directory.

    Args:
        system: where they run.
        roles: all of them, at rest: between two steps, with no checkpoint under way.
        moving: names of those that are spawned anew.
        directory: of the run, which all hosts can read.
        spawn: starts roles in their new places.
        publish: given all roles, has weights published to whoever needs them.

    Returns:
        All roles, in the same order.

    Raises:
        Exception: what a role raised; the run cannot go on then, but from its last checkpoint.
    """
    leaving = {role: roles[role] for role in moving}
    by_file = [role for role, group in leaving.items() if "export_state" not in group.endpoints]
    aside = directory / ASIDE
    parked: list[ParkedState] = []

    async def take_along(role: str, group: ActorGroup) -> None:
        parked.append(await park(system, role, group))

    try:
        await asyncio.to_thread(_remove, aside)
        await all_or_none(
            [
                save_own(leaving, aside, by_file),
                *(take_along(role, group) for role, group in leaving.items() if role not in by_file),
            ]
        )
        ended = await asyncio.gather(*(system.kill(group) for group in leaving.values()), return_exceptions=True)
        for failure in ended:
            if isinstance(failure, BaseException):
                raise failure
        come = await spawn(moving)
        now = {role: come.get(role, group) for role, group in roles.items()}
        await all_or_none(
            [restore_own(now, aside, by_file), *(now[state.role].import_state(state) for state in parked)]
        )
    finally:
        await asyncio.gather(*(system.kill(state.keepers) for state in parked))
    await publish(now)
    await asyncio.to_thread(_remove, aside)
    return now


def _remove(directory: Path) -> None:
    shutil.rmtree(directory, ignore_errors=True)
