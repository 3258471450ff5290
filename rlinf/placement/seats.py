"""From the keys of `placement` to seats: on which host and which devices each process of each role is.

In: the section `placement`, the roles of the run, the size of the job. Out: a `Placed`, or one error with every
mistake. No process or device is touched, and torch is not imported.

Devices of each role for a placement mode when nothing was measured: rules of thumb.

A planner with a profile does better; these rules fit any flow and are easy to predict.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from rlinf.config.common import Placing
from rlinf.placement.devices import Cluster, first_on_same, refused
from rlinf.placement.grammar import Assignment, PlacementError, TooFewGpus, assign
from rlinf.placement.hardware import KIND, Fleet, cluster_of, fleet_of, least
from rlinf.placement.plan import GB, Mode, Plan, RolePlan, complaints
from rlinf.placement.plan import load as load_plan


def spread(mode: Mode, source: str, others: Sequence[str], devices: int) -> dict[str, tuple[int, ...]]:
    """Return the devices of each role.

    Args:
        mode: collocated: everybody on all; disaggregated: even shares; hybrid: the source on the first half, the others
            in turns on the rest.
        source: the role that the others wait for: it generates, or acts.
        others: in order of their work; the last one gets what is left over.
        devices: how many there are.

    Raises:
        PlacementError: there are too few.
    """
    names = (source, *others)
    everything = tuple(range(devices))
    if mode == "collocated":
        return dict.fromkeys(names, everything)
    if mode == "hybrid":
        if devices < 2:
            raise PlacementError([_too_few("hybrid", 2, devices, f"one for {source}, one for {', '.join(others)}")])
        middle = devices // 2
        return {source: everything[:middle], **dict.fromkeys(others, everything[middle:])}
    if devices < len(names):
        raise PlacementError([_too_few("disaggregated", len(names), devices, f"one for each of {', '.join(names)}")])
    ranges, first = {}, 0
    for number, name in enumerate(names):
        last = devices if number == len(others) else first + max(1, (devices - first) // (len(names) - number))
        ranges[name] = everything[first:last]
        first = last
    return ranges


def _too_few(mode: str, needed: int, devices: int, why: str) -> str:
    return (
        f"placement.mode: {mode} needs {needed} devices, {why}, and this job has {devices}: start {needed} processes "
        f"(torchrun --nproc-per-node {needed}), or take collocated"
    )


_MISSING = re.compile(r"resource (\d+) does not exist")
_ANY = 4096
"""Devices that are taken to exist while it is not known how many do: enough to read a placement string by."""


@dataclass(frozen=True, slots=True)
class RoleKind:
    """Facts about a role that are needed to place it."""

    name: str
    """Name of the role."""
    on_devices: bool = True
    """It computes on devices; otherwise beside them, on cores or in processes of its own."""
    learns: bool = False
    """Its processes compute together, so each has a device of its own."""
    like: str | None = None
    """The role whose place it takes where it is given none; None: host 0."""
    at: Any = None
    """Where it is, if not a key of `placement` says so but the section that it comes from."""
    section: str = "placement"
    """The section that says where it is."""


TEXT = (
    RoleKind("rollout"),
    RoleKind("judge", on_devices=False),
    RoleKind("reward_model", like="trainer"),
    RoleKind("reference", like="trainer"),
    RoleKind("teacher", like="trainer"),
    RoleKind("critic", learns=True, like="trainer"),
    RoleKind("trainer", learns=True),
)
"""The roles of runs on text, in order of their work."""
CONTROL = (RoleKind("env", on_devices=False), RoleKind("policy"), RoleKind("trainer", learns=True))
"""The roles of runs of a policy that acts."""
INSIDE = (
    *CONTROL[:2],
    RoleKind("world_trainer", learns=True, like="trainer"),
    RoleKind("world", like="policy"),
    CONTROL[2],
)
"""Those of runs with a world model that the policy learns in."""


def own_kinds(roles: Mapping[str, Any]) -> tuple[RoleKind, ...]:
    """Roles of a user's own.

    Args:
        roles: the section `roles`; entries that are no mappings are passed over.
    """
    return tuple(
        RoleKind(name, "devices" in entry, at=entry.get("devices", entry.get("hosts")), section="roles")
        for name, entry in roles.items()
        if isinstance(entry, Mapping)
    )


def teacher_kinds(teachers: Mapping[str, Any]) -> tuple[RoleKind, ...]:
    """Several teachers, by the names of their roles; they are where `placement.teacher` says unless they say it.

    Args:
        teachers: the section `teachers`; entries that are no mappings are passed over.
    """
    return tuple(
        RoleKind(f"teacher_{name}", like="trainer", at=entry.get("devices"), section="teachers")
        for name, entry in teachers.items()
        if isinstance(entry, Mapping)
    )


@dataclass(frozen=True, slots=True)
class Seat:
    """Where the processes of one role are."""

    hosts: tuple[int, ...]
    """Of each process."""
    devices: tuple[frozenset[int], ...]
    """Of each process; empty sets for a role beside the devices."""
    items: int | None = None
    """Items it takes at a time; None: whatever is at hand."""
    lease_items: int | None = None
    """Items after which it offers its devices to others; None: the runtime's own rule."""


@dataclass(frozen=True)
class Placed:
    """Where all roles are."""

    seats: Mapping[str, Seat]
    """By role."""
    devices: int
    """Of the job."""
    turns: bool
    """Roles that share a device take turns on it; otherwise they compute side by side, as threads do."""
    memory: int | None = None
    """Bytes of a device that may be filled, of the smallest where they differ; None: no limit."""
    plan: Plan = field(default_factory=lambda: Plan({}))
    """The same as a plan."""
    first: tuple[int, ...] = ()
    """Of each process the first one on the same GPU, if some share one; see `first_on_same`."""
    fleet: Fleet = Fleet(())
    """The kinds of the devices; empty: all are alike and nothing is known of them."""

    def memory_on(self, device: int) -> int | None:
        """Bytes of a device that may be filled; None: no limit."""
        kinds = self.fleet.kinds
        own = self.fleet.hardware.get(kinds[device]) if device < len(kinds) else None
        return self.memory if own is None or own.memory is None else own.memory

    @property
    def memory_by_kind(self) -> dict[str, int] | None:
        """Bytes that may be filled of a device of each kind that has a limit; None: none has."""
        memory = {kind: self.memory_on(self.fleet.of_kind(kind)[0]) for kind in self.fleet.counts}
        return {kind: own for kind, own in memory.items() if own is not None} or None

    def room(self, role: str) -> int | None:
        """Bytes that may be filled of the smallest device that a role has; None: no limit."""
        numbers = frozenset[int]().union(*self.seats[role].devices)
        return least([self.memory_on(number) for number in numbers or {*self.seats[role].hosts}])

    @cached_property
    def of_actors(self) -> dict[str, frozenset[int]]:
        """The devices of every actor, such as `{"trainer[0]": {1}}`; of those beside the devices nothing."""
        return {
            f"{role}[{rank}]": self._by_gpu(devices)
            for role, seat in self.seats.items()
            for rank, devices in enumerate(seat.devices)
            if devices
        }

    @property
    def idle(self) -> list[int]:
        """The processes that no role has, neither as a host nor as a device."""
        used = {host for seat in self.seats.values() for host in (*seat.hosts, *frozenset().union(*seat.devices))}
        return sorted(set(range(self.devices)) - used)

    @property
    def gpus(self) -> int:
        """Devices of the job; what processes share counts once."""
        return len(set(self.first)) or self.devices

    def memory_of(self, hosts: int) -> dict[int, int] | None:
        """Bytes of each device of so many processes; None: no limit."""
        memory = {number: self.memory_on(number) for number in range(hosts)}
        return {number: own for number, own in memory.items() if own is not None} or None

    def spawning(self, role: str, active_bytes: int = 0, parked_bytes: int = 0) -> dict[str, Any]:
        """Return the arguments of `system.spawn` that put a role where it belongs.

        Args:
            role: its name.
            active_bytes, parked_bytes: of each process on each of its devices, while loaded and while parked.
        """
        seat = self.seats[role]
        arguments: dict[str, Any] = {"hosts": list(seat.hosts)}
        if self.turns and self._shares(role):
            arguments |= {"devices": seat.devices, "resident_bytes": active_bytes, "parked_bytes": parked_bytes}
            grain = {"items": seat.items, "lease_items": seat.lease_items}
            arguments |= {name: count for name, count in grain.items() if count is not None}
        return arguments

    def _shares(self, role: str) -> bool:
        """True if another role has one of its devices; alone there, it need not ask for them."""
        mine = self._by_gpu(*self.seats[role].devices)
        return any(mine & self._by_gpu(*seat.devices) for name, seat in self.seats.items() if name != role)

    def _by_gpu(self, *devices: frozenset[int]) -> frozenset[int]:
        """Devices, each that processes share by one number."""
        numbers = frozenset[int]().union(*devices)
        return frozenset(self.first[number] for number in numbers) if self.first else numbers


def place(
    wanted: Placing, kinds: Sequence[RoleKind], hosts: int, *, gpu_memory: int | None = None, gpus: int = 0
) -> Placed:
    """Place the roles of a run.

    Args:
        wanted: the section `placement`.
        kinds: the roles that there are, in order of their work; the first on devices feeds the others.
        hosts: number of processes of the job.
        gpu_memory: bytes of each GPU; None where there is none.
        gpus: of this machine.

    Raises:
        PlacementError: with every mistake; each begins with its key.
    """
    cluster = cluster_of(wanted, hosts)
    by_hand = _by_hand(wanted, kinds, cluster if hosts > 1 else None)
    on_devices = [kind for kind in kinds if kind.on_devices]
    fleet = fleet_of(wanted, hosts)
    limit = gpu_memory if wanted.device_memory_gb is None else int(min(wanted.device_memory_gb, 1e9) * GB)
    memory = least(fleet.memories(limit))
    plans: dict[str, RolePlan] = {}
    plan = None
    if wanted.plan is not None:
        deviceless = [kind.name for kind in kinds if not kind.on_devices]
        plan = read_plan(wanted.plan, [kind.name for kind in on_devices], cluster, deviceless)
        plans = by_role(plan)
    elif wanted.mode is not None and hosts > 1:
        mode = "collocated" if wanted.mode == "auto" else wanted.mode
        names = [kind.name for kind in on_devices]
        plans = {role: RolePlan(where) for role, where in spread(mode, names[0], names[1:], hosts).items()}
    seats = {kind.name: _seat(kind, by_hand[kind.name], plans.get(kind.name)) for kind in kinds}
    first = first_on_same(hosts, gpus)
    together = {kind.name: seats[kind.name].hosts for kind in kinds if kind.learns}
    if problems := [*_doubled(seats, kinds)]:
        raise PlacementError(problems)
    if problems := [*refused(wanted, together, first, gpus)]:
        raise TooFewGpus(problems[:1])  # there is one way out of all of them
    turns = memory is not None or wanted.mode is not None or wanted.plan is not None
    return Placed(seats, hosts, turns, memory, plan or _as_plan(seats, kinds), first, fleet)


def placed_by(plan: Plan, before: Placed, kinds: Sequence[RoleKind]) -> Placed:
    """Return the same roles placed where a plan wants them; those beside the devices stay."""
    plans = by_role(plan)
    seats = {kind.name: _seat(kind, before.seats[kind.name], plans.get(kind.name)) for kind in kinds}
    return Placed(seats, before.devices, True, before.memory, plan, before.first, before.fleet)


def by_role(plan: Plan) -> dict[str, RolePlan]:
    """A plan's entries by single role: those of a loop, "env+policy", count for each of its members. A role that does
    not say how many items it takes at a time takes as many as travel to it together."""
    arriving: dict[str, int | None] = {}
    for (_, target), edge in plan.edges.items():
        arriving[target] = edge.items if arriving.get(target) is None else arriving[target]
    return {
        member: replace(entry, items=entry.items if entry.items is not None else arriving.get(name))
        for name, entry in plan.roles.items()
        for member in name.split("+")
    }


def read_plan(path: str, roles: Sequence[str], cluster: Cluster, deviceless: Sequence[str] = ()) -> Plan:
    """Read a plan, and see that this job can follow it.

    Args:
        path: of the file.
        roles: that compute on devices here.
        deviceless: those that do not; what a plan says of them is passed over.
        cluster: the devices.

    Raises:
        PlacementError: it cannot be read, lacks a role, has one that there is not, or cannot work.
    """
    try:
        plan = load_plan(Path(path).expanduser())
    except OSError as error:
        raise PlacementError([f"placement.plan: it cannot be read: {error.strerror or error}"]) from None
    except PlacementError as error:
        raise PlacementError([f"placement.plan: {complaint}" for complaint in error.complaints]) from None
    entries = by_role(plan)
    problems = [
        f"placement.plan: it says nothing of {role}: write `{role}: {{devices: 0}}` under `roles`"
        for role in roles
        if role not in entries or not entries[role].devices
    ]
    names = {*roles, *(name for name, role in entries.items() if not role.devices), *deviceless}
    problems += [
        f"placement.plan: it places {role}, which this run has not on a device: remove it; there are {', '.join(roles)}"
        for role in entries
        if role not in names
    ]
    problems += [f"placement.plan: {complaint}" for complaint in complaints(plan, cluster)]
    if problems:
        raise PlacementError(problems)
    return plan


def mistakes_in(wanted: Placing, kinds: Sequence[RoleKind], hosts: int | None) -> Iterator[tuple[str, str]]:
    """(key, advice) for every mistake that can be told before it is known which roles the algorithm has.

    Args:
        wanted: the section `placement`.
        kinds: all roles that there may be.
        hosts: number of processes; None where that is not known yet.
    """
    try:
        if hosts is None:
            _by_hand(wanted, kinds, cluster_of(wanted, _ANY, width=_ANY // 512))
        else:
            cluster = cluster_of(wanted, hosts)
            by_hand = _by_hand(wanted, kinds, cluster if hosts > 1 else None)
            if wanted.mode is None and wanted.plan is None:
                placed = [kind for kind in kinds if _entry(wanted, kind) is not None]
                if problems := list(_doubled(by_hand, placed)):
                    raise PlacementError(problems)
    except PlacementError as error:
        for complaint in error.complaints:
            yield split_complaint(complaint)


def split_complaint(complaint: str) -> tuple[str, str]:
    """A complaint's key, and the rest of it on one line: what was written is shown by whoever reports it."""
    key, _, advice = complaint.partition(": ")
    advice = advice.splitlines()[-1].strip()
    if (missing := _MISSING.search(advice)) is not None:
        advice += f", or start {int(missing[1]) + 1} processes (torchrun --nproc-per-node)"
    return key, advice


def _by_hand(wanted: Placing, kinds: Sequence[RoleKind], cluster: Cluster | None) -> dict[str, Seat]:
    """Where roles are by their own keys; without a cluster, all on the only host there is."""
    assigned: dict[str, Assignment] = {}
    for section in dict.fromkeys(kind.section for kind in kinds):
        of_it = [kind for kind in kinds if kind.section == section]
        values = {kind.name: value for kind in of_it if (value := _entry(wanted, kind)) is not None}
        if cluster is not None:
            assigned |= assign(values, cluster, key=section)
        else:  # one process for all of them: that they can be read is enough
            texts = {
                role: each.get("placement") if isinstance(each, Mapping) else each for role, each in values.items()
            }
            assign(texts, Cluster.declared([{KIND: _ANY}]), key=section)
    seats: dict[str, Seat] = {}
    for kind in sorted(kinds, key=lambda kind: kind.like is not None):  # whoever sits like another, after that one
        if kind.name in assigned:
            seats[kind.name] = _seat_of(assigned[kind.name], kind, cluster)
        elif kind.like in seats:  # an evaluation has no trainer to sit like
            seats[kind.name] = seats[kind.like]
        else:
            seats[kind.name] = Seat((0,), (frozenset([0]) if kind.on_devices else frozenset(),))
    return seats


def _entry(wanted: Placing, kind: RoleKind) -> Any:
    """Where a role is said to be; None if nobody says."""
    if kind.at is None and kind.section == "teachers":
        return getattr(wanted, "teacher", None)
    return getattr(wanted, kind.name) if kind.section == "placement" else kind.at


def _seat_of(assignment: Assignment, kind: RoleKind, cluster: Cluster | None) -> Seat:
    """A process lives on the host of its first device, or on the first host of its node."""
    hosts, devices = [], []
    for process in assignment.processes:
        numbers = [part.device for part in process if part.device is not None]
        if not numbers and cluster is not None:
            numbers = [device.number for device in cluster.nodes[process[0].node].devices][:1]
        hosts.append(numbers[0])
        devices.append(frozenset(numbers) if kind.on_devices else frozenset[int]())
    return Seat(tuple(hosts), tuple(devices))


def _seat(kind: RoleKind, by_hand: Seat, planned: RolePlan | None) -> Seat:
    """A role's seat, by a plan if that says something of it: a process per device."""
    if planned is None or not planned.devices or not kind.on_devices:
        return by_hand
    devices = tuple(frozenset([number]) for number in planned.devices)
    return Seat(planned.devices, devices, planned.items, planned.lease_items)


def _doubled(seats: Mapping[str, Seat], kinds: Sequence[RoleKind]) -> Iterator[str]:
    for kind in kinds:
        hosts = seats[kind.name].hosts
        if kind.learns and (twice := [host for host in hosts if hosts.count(host) > 1]):
            yield (
                f"placement.{kind.name}: two of its processes are on device {twice[0]}, and it computes on all of them "
                "together: give each a device of its own"
            )
        elif kind.learns and any(len(devices) > 1 for devices in seats[kind.name].devices):
            yield f"placement.{kind.name}: a process of it has one device: name as many processes as devices"


def _as_plan(seats: Mapping[str, Seat], kinds: Sequence[RoleKind]) -> Plan:
    everywhere = {kind.name: frozenset[int]().union(*seats[kind.name].devices) for kind in kinds if kind.on_devices}
    return Plan({role: RolePlan(tuple(sorted(devices))) for role, devices in everywhere.items()})
