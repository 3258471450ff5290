"""Rehearse a plan: run the real flow with modelled actors under the virtual clock, and time one step.

Flows in: a flow function, a plan, what its roles cost. Flows out: seconds of one step, who worked when, what was moved,
the most bytes on a device. Nothing here is measured: it is a simulation, as good as the costs.

Flow, streams, leases and moves are those of a run; of the actors only the endpoints are real. So the rehearsal knows
what a formula does not: that a consumer takes items as they come, that devices change hands, that loading waits for
parking. Devices that the same processes hold are one to the leases, which changes nothing and saves time.

It needs a thread without a running event loop: `await asyncio.to_thread(rehearse, ...)` from a coroutine.
"""

from __future__ import annotations

import asyncio
import contextvars
import inspect
import itertools
from collections import defaultdict
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from rlinf.data.in_flight import InFlight, Rules
from rlinf.data.step import EmbodiedStep, Step, works_ahead
from rlinf.placement.grammar import PlacementError
from rlinf.placement.plan import Plan
from rlinf.placement.simulated_actors import Demand, Item, RoleModel, endpoints_of, model_class
from rlinf.placement.simulated_costs import RoleCost, costs_of, members
from rlinf.placement.workload import Workload
from rlinf.runtime.actor.actor import Actor
from rlinf.runtime.base.clock import Deadlock, run_virtual
from rlinf.runtime.streams.stream import Stream
from rlinf.runtime.system.system import ActorSystem

Flow = Callable[..., Awaitable[Any]]
"""One step: `await flow(step, **roles)`."""
TRIAL_ITEMS = 8
"""Items of the trial that shows what a flow asks of its roles: a few for every rank that may compete for them."""
WARM = 2
"""Steps, besides one per version of staleness, after which everything is begun."""
MEASURED = 2
"""Steps per batch in flight whose mean is taken: what takes turns in finishing early and late has done so by then."""
SETTLED = 0.01
"""Share by which two rounds of steps, one per batch in flight, may differ in the long run."""
LONGEST = 24
"""Rounds after which a rehearsal ends, settled or not. How many answers begin early is learned from rows of steps, each
twice as long as the one before."""
TURNS = 8
"""Decisions of a rehearsed episode. The time of a loop is divided by its turns, so their number does not matter."""


@dataclass(frozen=True, slots=True)
class ActorWork:
    """When a modelled actor was at work with one endpoint."""

    actor: str
    """Such as "trainer[0]"."""
    endpoint: str
    """Such as "train"."""
    intervals: tuple[tuple[float, float], ...]
    """In order, apart from each other; virtual seconds from the start of the step."""


@dataclass(frozen=True, slots=True)
class ActorMove:
    """A modelled actor was loaded or parked."""

    actor: str
    """Such as "trainer[0]"."""
    what: str
    """"onload" or "offload"."""
    start: float
    """Virtual seconds from the start of the step."""
    end: float
    """The same."""


@dataclass(frozen=True, slots=True)
class Rehearsal:
    """One simulated step."""

    seconds: float
    """Of the step, virtual; with work in flight between steps, the mean of several."""
    work: tuple[ActorWork, ...]
    """Work of actors, each with its times."""
    moves: tuple[ActorMove, ...]
    """Loads and parks of actors."""
    peak_bytes: int
    """The most that a device held."""


@dataclass(frozen=True, slots=True)
class Cast:
    """The calls that a flow makes to its roles, found by a trial that takes no time; the same for every plan."""

    flow: Flow
    """The real one."""
    demands: Mapping[str, Demand]
    """By role."""
    actors: Mapping[str, type[Actor]]
    """Classes of roles that do not come with this package."""
    per_rank: bool
    """Some role is asked call by call and not item by item, so what it is asked depends on how many ranks there are."""


def rehearse(
    flow: Flow,
    plan: Plan,
    workload: Workload,
    *,
    items: int,
    rehearsed_items: int | None = None,
    devices_per_rank: int | None = None,
    cast: Cast | None = None,
    staleness: int = 0,
) -> Rehearsal:
    """Run one step of a flow with modelled roles; or, if it works ahead, as many as show what a step takes in the long
    run.

    Where roles do not all fit at once, it is the second of two steps: the first finds nothing loaded. Where they do,
    nothing is ever parked, and that they are loaded once counts for nothing.

    Args:
        flow: `async (step, **roles)`; roles are given by the names of its parameters.
        plan: devices, phases and granularity of its roles.
        workload: what the roles cost, by the names of the plan.
        items: of one step, in which the plan counts.
        rehearsed_items: let so many stand for all of them, to save time; it should be a multiple of the plan's chunks.
        devices_per_rank: devices of one process; None: a role is one process with all of them.
        cast: of `trial`, where many plans of one flow are rehearsed, or roles do not come with this package.
        staleness: versions by which weights that generate may be behind, for a flow that is marked by `ahead`.

    Raises:
        PlacementError: plan, workload and flow do not fit together, or the step comes to a standstill.
    """
    items_now = rehearsed_items or items
    costs = costs_of(plan, workload, items)
    memory = _memory(plan, workload)
    cast = cast or trial(flow, list(costs))
    if cast.per_rank and devices_per_rank is not None:
        zero = {name: replace(cost, points=(), transfers={}) for name, cost in costs.items()}
        few = {name: RoleModel(cost, _ranks(cost, devices_per_rank), TRIAL_ITEMS, None) for name, cost in zero.items()}
        _stage(flow, few, {}, cast.actors, devices_per_rank)
        cast = replace(cast, demands={name: model.demand for name, model in few.items()})
    models = {
        name: RoleModel(cost, _ranks(cost, devices_per_rank), items_now, cast.demands[name], TRIAL_ITEMS)
        for name, cost in costs.items()
    }
    return _stage(flow, models, memory, cast.actors, devices_per_rank, staleness)


def trial(flow: Flow, roles: Sequence[str], *, actors: Mapping[str, type[Actor]] | None = None) -> Cast:
    """See what a flow asks of its roles, by one step of a few items in no time.

    Args:
        flow: one step.
        roles: by the names of its parameters.
        actors: by role, the class whose endpoints the flow calls, for roles that do not come with this package.

    Raises:
        PlacementError: the flow does not take these roles, or looks into what a rehearsal cannot know.
    """
    roles = [role for stage in roles for role in members(stage)]
    _check(flow, roles)
    models = {name: RoleModel(RoleCost(name, (number,)), 1, TRIAL_ITEMS, None) for number, name in enumerate(roles)}
    _stage(flow, models, {}, actors or {}, None)
    per_rank = any(model.demand.items.total() == 0 and model.demand.calls for model in models.values())
    return Cast(flow, {name: model.demand for name, model in models.items()}, actors or {}, per_rank)


def _check(flow: Flow, roles: Sequence[str]) -> None:
    named = inspect.signature(flow).parameters
    flow_name = getattr(flow, "__qualname__", str(flow))
    if extra := [name for name in roles if name not in named]:
        raise PlacementError(
            [f"flow {flow_name} has no role {extra[0]!r}; it takes: {', '.join(n for n in named if n != 'step')}"]
        )
    if missing := [
        name for name, one in named.items() if one.default is one.empty and name not in roles and name != "step"
    ]:
        raise PlacementError(
            [f"flow {flow_name} takes {missing[0]!r}, which was not profiled; there are: {', '.join(roles)}"]
        )


def _stage(
    flow: Flow,
    models: Mapping[str, RoleModel],
    memory: Mapping[int, int],
    actors: Mapping[str, type[Actor]],
    per_rank: int | None,
    staleness: int = 0,
) -> Rehearsal:
    """Run the flow on a virtual clock, apart from whatever this thread is doing otherwise."""
    seats = _Seats(models, per_rank)
    capacity = {seats.place[device]: size for device, size in memory.items()}
    performance = _perform(flow, models, seats, capacity, actors, staleness)
    try:
        return contextvars.Context().run(run_virtual, performance)[0]
    except Deadlock as error:
        raise PlacementError([f"the rehearsed step came to a standstill: {error}"]) from error
    except (AttributeError, TypeError) as error:
        name = getattr(flow, "__qualname__", str(flow))
        raise PlacementError(
            [
                f"flow {name} cannot be rehearsed: {error}. Modelled roles pass on items that carry only an id; for a "
                "role of your own, name its class, so that its endpoints are known"
            ]
        ) from error


class _Seats:
    """Which devices each rank of each role has, and the few that stand for all of them."""

    def __init__(self, models: Mapping[str, RoleModel], per_rank: int | None):
        self.ranks = {
            name: [_part(model.cost.devices, rank, model.ranks) for rank in range(model.ranks)]
            for name, model in models.items()
        }
        holders: dict[int, list[tuple[str, int]]] = defaultdict(list)
        for name, ranks in self.ranks.items():
            for rank, devices in enumerate(ranks):
                for device in devices:
                    holders[device].append((name, rank))
        alike: dict[tuple[tuple[str, int], ...], int] = {}
        self.place = {device: alike.setdefault(tuple(who), len(alike)) for device, who in sorted(holders.items())}
        """Device to the number of its like."""
        self.shared = {name for who in alike if len(who) > 1 for name, _ in who}
        """Roles that must take turns with others somewhere."""
        self.count = max(1, len(alike))

    def crowded(self, models: Mapping[str, RoleModel], memory: Mapping[int, int]) -> set[str]:
        """Roles on devices that cannot hold all of theirs at once, so that some are loaded and parked in every step."""
        load: dict[int, int] = defaultdict(int)
        for name, model in models.items():
            for place in frozenset[int]().union(*self.devices(name)):
                load[place] += model.cost.active_bytes
        full = {place for place, count in load.items() if place in memory and count > memory[place]}
        return {name for name in models if any(part & full for part in self.devices(name))}

    def devices(self, role: str) -> list[frozenset[int]]:
        """Per rank."""
        return [frozenset(self.place[device] for device in part) for part in self.ranks[role]]


async def _perform(
    flow: Flow,
    models: Mapping[str, RoleModel],
    seats: _Seats,
    memory: Mapping[int, int],
    actors: Mapping[str, type[Actor]],
    staleness: int,
) -> Rehearsal:
    loop = asyncio.get_running_loop()
    items = next(iter(models.values())).items
    crowded = seats.crowded(models, memory)
    async with ActorSystem.local(seats.count, trace=False, device_memory=memory or None, computes=False) as system:
        roles = {
            name: await _spawn(system, model, seats, actors, parks=name in crowded, company=staleness > 0)
            for name, model in models.items()
        }
        in_flight = _in_flight(flow, items, staleness)
        ends = [loop.time()]
        backlog: list[tuple[float, float]] = []
        for index in range(WARM + staleness + LONGEST * (staleness + 1) if staleness else 1 + bool(crowded)):
            for model in models.values():
                model.forget()
            metrics = await flow(_step(flow, index, items, in_flight), **roles)
            ends.append(loop.time())
            backlog.append(_backlog(metrics))
            if staleness and _settled(ends, backlog, staleness + 1, items):
                break
        rehearsal = _rehearsal(models, ends[-2], ends[-1] - ends[-2], _peak(models, seats, system))
        await in_flight.close()
        measured = MEASURED * (staleness + 1) if staleness else 1
        return replace(rehearsal, seconds=(ends[-1] - ends[-1 - measured]) / measured)


def _backlog(metrics: Any) -> tuple[float, float]:
    """Items in flight after a step, and those of them that are complete; a flow that does not say has none."""
    values = metrics if isinstance(metrics, Mapping) else {}
    return values.get("in_flight/prompts", 0.0), values.get("in_flight/ready", 0.0)


def _settled(ends: Sequence[float], backlog: Sequence[tuple[float, float]], size: int, items: int) -> bool:
    """True at the end of a round of steps that took as long as the one before, and left as much in flight: a step that
    uses up what was begun earlier is quick, but not in the long run.

    Args:
        ends: times at which steps ended, the first step's start before them.
        backlog: of every step, what it left.
        size: steps of a round.
        items: of a step.
    """
    since = len(backlog) - WARM - (size - 1)
    if since < MEASURED * size or since % size:
        return False
    one, other = ends[-1 - size] - ends[-1 - 2 * size], ends[-1] - ends[-1 - size]
    changed = max(abs(now - before) for now, before in zip(backlog[-1], backlog[-1 - size], strict=True))
    return abs(other - one) <= SETTLED * other and changed <= SETTLED * size * items


async def _spawn(
    system: ActorSystem,
    model: RoleModel,
    seats: _Seats,
    actors: Mapping[str, type[Actor]],
    *,
    parks: bool,
    company: bool,
) -> Any:
    cost = model.cost
    turns = cost.name in seats.shared
    devices = seats.devices(cost.name)
    actor = model_class(cost.name, endpoints_of(cost.name, actors), on_devices=bool(cost.devices))
    asking: dict[str, Any] = {}
    if turns:
        asking = {
            "devices": devices,
            "resident_bytes": cost.active_bytes,
            "parked_bytes": cost.parked_bytes,
            "items": model.at_a_time,
            "lease_items": None if cost.lease_share is None else max(1, round(cost.lease_share * model.items)),
        }
    hosts = [min(part, default=0) for part in devices]
    company = company and not turns  # who takes turns gives its devices away between batches only
    return await system.spawn(actor, hosts=hosts, name=cost.name, model=model, parks=parks, company=company, **asking)


def _in_flight(flow: Flow, items: int, staleness: int) -> InFlight:
    """Return the work in flight between the steps of a rehearsal."""
    if _acts(flow):
        return InFlight(Rules(staleness, between=True))
    number = itertools.count()

    async def draw(count: int) -> Sequence[Any]:
        return [Item(next(number)) for _ in range(count)]

    return InFlight(Rules(staleness, items), draw=draw)


def _step(flow: Flow, index: int, items: int, in_flight: InFlight) -> Any:
    """A step as the flows of this package take it."""
    if _acts(flow):
        inside = (EmbodiedStep(index, TURNS),) if "world" in inspect.signature(flow).parameters else ()
        return EmbodiedStep(index, TURNS, in_flight=in_flight, inside=inside)
    prompts: Any = () if works_ahead(flow) else Stream.of([Item(number) for number in range(items)], name="prompts")
    return Step(index, prompts, 1, items, in_flight=in_flight)


def _acts(flow: Flow) -> bool:
    return {"env", "policy"} <= set(inspect.signature(flow).parameters)


def _rehearsal(models: Mapping[str, RoleModel], start: float, took: float, peak: int) -> Rehearsal:
    work = [
        ActorWork(f"{name}[{rank}]", endpoint, tuple((a - start, b - start) for a, b in pieces))
        for name, model in models.items()
        for (rank, endpoint), pieces in model.busy.items()
    ]
    moves = [
        ActorMove(f"{name}[{rank}]", what, a - start, b - start)
        for name, model in models.items()
        for rank, what, a, b in model.moves
        if a >= start and b > a
    ]
    return Rehearsal(took, tuple(work), tuple(sorted(moves, key=lambda one: one.start)), peak)


def _peak(models: Mapping[str, RoleModel], seats: _Seats, system: ActorSystem) -> int:
    """The most bytes on a device: by the book of the leases, or what a role holds that is alone on its devices."""
    alone = [model.cost.active_bytes for name, model in models.items() if name not in seats.shared]
    return max([0, *alone, *(one.peak for one in system.service.manager.memory().values())])


def _part(devices: Sequence[int], rank: int, ranks: int) -> tuple[int, ...]:
    """The devices of one of so many ranks."""
    return tuple(devices[len(devices) * rank // ranks : len(devices) * (rank + 1) // ranks])


def _ranks(cost: RoleCost, per_rank: int | None) -> int:
    return 1 if per_rank is None or not cost.devices else -(-len(cost.devices) // per_rank)


def _memory(plan: Plan, workload: Workload) -> dict[int, int]:
    """Bytes of every device of the plan whose kind has a limit."""
    kinds = [kind for kind, count in workload.devices.items() for _ in range(count)]
    return {
        device: workload.memory[kinds[device]]
        for device in plan.devices
        if device < len(kinds) and kinds[device] in workload.memory
    }
