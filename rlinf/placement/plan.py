"""A plan: per role its devices and what stays on them, per edge its granularity. Its mode is derived, never stated.

Flows in: what the planner chose, or a file that a person edited (`from_yaml`). Flows out: the mode, the bytes of each
device in each phase, and every reason why a cluster could not run it.

`plan.yaml`: a plan that people read, edit and load again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from difflib import get_close_matches
from itertools import combinations
from pathlib import Path
from typing import Any, Literal

import yaml

from rlinf.placement.devices import Cluster
from rlinf.placement.grammar import PlacementError, parse

Mode = Literal["collocated", "disaggregated", "hybrid"]
GB = 1e9


@dataclass(frozen=True, slots=True)
class RolePlan:
    """Where one role runs and when it owns its devices."""

    devices: tuple[int, ...]
    """Numbers of its devices, ascending."""
    phases: tuple[int, ...] = (0,)
    """When it works. Roles of one phase work at the same time, on devices of their own; phases follow each other."""
    resident: bool = True
    """Stays on its devices for the whole step; otherwise it is parked (offloaded) outside its phases."""
    items: int | None = None
    """Items it takes at a time; None: whatever is at hand."""
    lease_items: int | None = None
    """Items after which it offers its lease to others; None: it keeps the lease for its whole phase."""
    active_bytes: int = 0
    """On each of its devices while it is loaded, the peak of its work included."""
    parked_bytes: int = 0
    """On each of its devices while it is parked."""


@dataclass(frozen=True, slots=True)
class EdgePlan:
    """How data travel from one role to another."""

    items: int | None = None
    """Items that travel together; None: each as soon as it is ready."""
    barrier: bool = False
    """Nothing is taken before everything is there."""


@dataclass(frozen=True, slots=True)
class Prediction:
    """The planner's prediction for the plan, in seconds of one step."""

    step_seconds: float
    """Seconds of the whole step, weight synchronisation included."""
    bound_seconds: float
    """Lower bound that no plan could beat."""

    @property
    def efficiency(self) -> float:
        """bound / step, at most 1."""
        return self.bound_seconds / self.step_seconds if self.step_seconds else 1.0


@dataclass(frozen=True, slots=True)
class Plan:
    """Placement, order and granularity of one flow."""

    roles: Mapping[str, RolePlan]
    """By name of the role."""
    edges: Mapping[tuple[str, str], EdgePlan] = field(default_factory=dict)
    """By producer and consumer."""
    predicted: Prediction | None = None
    """None for a plan that a person wrote."""
    reason: str = ""
    """One sentence: why this one."""

    @property
    def mode(self) -> Mode:
        """Name of the placement's kind: all roles that have devices on the same ones, on disjoint ones, or a
        mixture."""
        sets = [frozenset(role.devices) for role in self.roles.values() if role.devices]
        if len(set(sets)) <= 1:
            return "collocated"
        if all(first.isdisjoint(second) for first, second in combinations(sets, 2)):
            return "disaggregated"
        return "hybrid"

    @property
    def devices(self) -> tuple[int, ...]:
        """All devices that some role uses, ascending."""
        return tuple(sorted({number for role in self.roles.values() for number in role.devices}))

    @property
    def phases(self) -> tuple[int, ...]:
        """All phases, ascending."""
        return tuple(sorted({phase for role in self.roles.values() for phase in role.phases}))

    def bytes_on(self, device: int, phase: int) -> dict[str, int]:
        """Return the bytes that each role holds on a device in a phase."""
        return {
            name: role.active_bytes if role.resident or phase in role.phases else role.parked_bytes
            for name, role in self.roles.items()
            if device in role.devices
        }

    def peak(self, device: int) -> int:
        """Return the most bytes that the device holds in any phase."""
        return max((sum(self.bytes_on(device, phase).values()) for phase in self.phases), default=0)


def complaints(plan: Plan, cluster: Cluster) -> tuple[str, ...]:
    """Return every reason why the cluster cannot run the plan, with the smallest fix; none if it can."""
    return (*_impossible(plan, cluster), *_crowded(plan), *_overfull(plan, cluster))


def _impossible(plan: Plan, cluster: Cluster) -> Iterator[str]:
    count = len(cluster.devices)
    for name, role in plan.roles.items():
        if missing := [number for number in role.devices if number >= count]:
            yield (
                f"roles.{name}.devices: device {missing[0]} does not exist, there are {count} (0-{count - 1}): "
                "name others, or start more processes"
            )
    for source, target in plan.edges:
        for name in (source, target):
            if name not in plan.roles:
                yield f"edges: {source} -> {target}: there is no role {name!r} in the plan: place it under `roles`"
        if source in plan.roles and target in plan.roles:
            first, second = plan.roles[source], plan.roles[target]
            if min(second.phases) < min(first.phases):
                yield (
                    f"roles.{target}.phases: begins in phase {min(second.phases)}, before {source}, which feeds it, "
                    f"in phase {min(first.phases)}: write {min(first.phases)} or later"
                )


def _crowded(plan: Plan) -> Iterator[str]:
    for (first, one), (second, other) in combinations(plan.roles.items(), 2):
        both = set(one.devices) & set(other.devices)
        at_once = set(one.phases) & set(other.phases)
        takes_turns = one.lease_items is not None and other.lease_items is not None
        if both and at_once and not takes_turns:
            yield (
                f"roles.{second}.phases: works in phase {min(at_once)} on device {min(both)}, as {first} does: "
                f"give it another phase or other devices, or both `lease_items`, so that they take turns"
            )


def _overfull(plan: Plan, cluster: Cluster) -> Iterator[str]:
    reported: set[frozenset[tuple[str, int]]] = set()
    for device in cluster.devices:
        if device.memory is None:
            continue
        for phase in plan.phases:
            bytes_by_role = plan.bytes_on(device.number, phase)
            excess = sum(bytes_by_role.values()) - device.memory
            alike = frozenset(bytes_by_role.items())
            if excess <= 0 or alike in reported:  # hundreds of devices overflow for one reason: say it once
                continue
            reported.add(alike)
            parts = ", ".join(f"{name} {count / GB:.1f}" for name, count in bytes_by_role.items())
            yield (
                f"device {device.number} would hold {(excess + device.memory) / GB:.1f} GB of {device.memory / GB:.1f} "
                f"in phase {phase} ({parts}): {_relief(plan, bytes_by_role, phase, excess)}"
            )


def _relief(plan: Plan, bytes_by_role: Mapping[str, int], phase: int, excess: int) -> str:
    """The one change that frees enough with the least to move; or how much has to go."""
    savings = {
        name: plan.roles[name].active_bytes - plan.roles[name].parked_bytes
        for name in bytes_by_role
        if plan.roles[name].resident and phase not in plan.roles[name].phases
    }
    if enough := {name: saved for name, saved in savings.items() if saved >= excess}:
        name = min(enough, key=lambda name: enough[name])
        return f"set roles.{name}.resident to false, which frees {enough[name] / GB:.1f} GB"
    if sum(savings.values()) >= excess:
        return f"set `resident` to false for {' and '.join(savings)}"
    fits = [name for name, count in bytes_by_role.items() if count >= excess]
    if len(bytes_by_role) > 1 and fits:
        name = min(fits, key=lambda name: bytes_by_role[name])
        return f"move {name} to other devices, or make it {excess / GB:.1f} GB smaller (more devices, a smaller batch)"
    return f"{excess / GB:.1f} GB have to go: more devices, a smaller batch or a smaller model"


_ARROW = " -> "
_NO_DEVICES = "none"
"""For a role that runs beside the devices, such as scoring on spare cores."""
_HIGHEST = 1_000_000
"""Device numbers of a file are checked against the cluster later; until then only nonsense is refused."""


def to_yaml(plan: Plan) -> str:
    """Write the plan as text that `from_yaml` reads back as an equal plan."""
    head = [
        f"# {plan.mode}: {len(plan.roles)} roles on {len(plan.devices)} devices. Edit it as you like: it is checked."
    ]
    body: dict[str, Any] = {}
    if plan.reason:
        body["reason"] = plan.reason
    if plan.predicted:
        head.append(f"# Predicted, not measured; efficiency is bound / step = {plan.predicted.efficiency:.2f}.")
        body["predicted"] = {
            "step_seconds": float(plan.predicted.step_seconds),
            "bound_seconds": float(plan.predicted.bound_seconds),
        }
    body["roles"] = {name: _role_out(role) for name, role in plan.roles.items()}
    if plan.edges:
        body["edges"] = {f"{source}{_ARROW}{target}": _edge_out(edge) for (source, target), edge in plan.edges.items()}
    return "\n".join(head) + "\n" + yaml.safe_dump(body, sort_keys=False, allow_unicode=True, width=120)


def from_yaml(text: str, *, where: str = "plan.yaml") -> Plan:
    """Read a plan.

    Args:
        text: of the file.
        where: name of the file, for messages.

    Raises:
        PlacementError: with everything that is wrong.
    """
    try:
        body = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise PlacementError([f"{where}: not YAML: {error}"]) from None
    reader = _Reader(where)
    top = reader.section("", body, ("roles", "edges", "predicted", "reason"))
    roles = {str(name): reader.role(str(name), entry) for name, entry in reader.mapping("roles", top).items()}
    if not roles and not reader.complaints:
        reader.complain("roles", "is missing: name at least one role and its devices")
    edges = dict(reader.edge(str(name), entry) for name, entry in reader.mapping("edges", top).items())
    predicted = reader.prediction(top["predicted"]) if top.get("predicted") is not None else None
    reason = reader.value("reason", top, "reason", str, "") or ""
    if reader.complaints:
        raise PlacementError(reader.complaints)
    return Plan(roles, edges, predicted, reason)


def save(plan: Plan, path: Path) -> None:
    """Write the plan to a file."""
    path.write_text(to_yaml(plan), encoding="utf-8")


def load(path: Path) -> Plan:
    """Read the plan of a file.

    Raises:
        PlacementError: with everything that is wrong.
        OSError: it cannot be read.
    """
    return from_yaml(path.read_text(encoding="utf-8"), where=str(path))


def _role_out(role: RolePlan) -> dict[str, Any]:
    entry: dict[str, Any] = {"devices": _ranges(role.devices), "phases": list(role.phases), "resident": role.resident}
    for name in ("items", "lease_items"):
        if getattr(role, name) is not None:
            entry[name] = getattr(role, name)
    if role.active_bytes or role.parked_bytes:
        entry |= {"active_bytes": role.active_bytes, "parked_bytes": role.parked_bytes}
    return entry


def _edge_out(edge: EdgePlan) -> dict[str, Any]:
    return ({} if edge.items is None else {"items": edge.items}) | ({"barrier": True} if edge.barrier else {})


def _ranges(numbers: tuple[int, ...]) -> str:
    if not numbers:
        return _NO_DEVICES
    parts: list[str] = []
    first = last = numbers[0]
    for number in (*numbers[1:], -1):
        if number == last + 1:
            last = number
            continue
        parts.append(str(first) if first == last else f"{first}-{last}")
        first = last = number
    return ",".join(parts)


class _Reader:
    """Reads parts of the file and gathers complaints instead of stopping at the first."""

    def __init__(self, where: str) -> None:
        self.where = where
        self.complaints: list[str] = []

    def complain(self, key: str, message: str) -> None:
        self.complaints.append(f"{self.where}: {key} {message}" if key else f"{self.where}: {message}")

    def section(self, key: str, entry: Any, keys: tuple[str, ...]) -> dict[str, Any]:
        if entry is None:
            return {}
        if not isinstance(entry, Mapping):
            self.complain(key, f"is {entry!r}, not a mapping: write {', '.join(keys)} under it")
            return {}
        for name in entry:
            if name not in keys:
                near = get_close_matches(str(name), keys, 1)
                hint = f"did you mean {near[0]!r}?" if near else f"there are: {', '.join(keys)}"
                self.complain(f"{key}.{name}" if key else str(name), f"is not a key of a plan; {hint}")
        return dict(entry)

    def mapping(self, key: str, top: Mapping[str, Any]) -> dict[str, Any]:
        entry = top.get(key)
        if entry is not None and not isinstance(entry, Mapping):
            self.complain(key, f"is {entry!r}, not a mapping from names")
            return {}
        return dict(entry or {})

    def value(self, key: str, entry: Mapping[str, Any], name: str, kind: type, default: Any, least: int = 0) -> Any:
        setting = entry.get(name)
        if setting is None:
            return default
        right = isinstance(setting, kind) and (kind is bool or not isinstance(setting, bool))
        if not right or (kind is int and setting < least):
            what = {int: f"a whole number, at least {least}", bool: "true or false", str: "text"}[kind]
            self.complain(key, f"is {setting!r}: write {what}")
            return default
        return setting

    def role(self, name: str, entry: Any) -> RolePlan:
        key = f"roles.{name}"
        keys = ("devices", "phases", "resident", "items", "lease_items", "active_bytes", "parked_bytes")
        entry = self.section(key, {} if entry is None else entry, keys)

        def number(field: str, default: int | None, least: int) -> Any:
            return self.value(f"{key}.{field}", entry, field, int, default, least)

        role = RolePlan(
            devices=self.devices(f"{key}.devices", entry.get("devices")),
            phases=self.phases(f"{key}.phases", entry.get("phases", [0])),
            resident=self.value(f"{key}.resident", entry, "resident", bool, True),
            items=number("items", None, 1),
            lease_items=number("lease_items", None, 1),
            active_bytes=number("active_bytes", 0, 0),
            parked_bytes=number("parked_bytes", 0, 0),
        )
        if role.parked_bytes > role.active_bytes:
            self.complain(f"{key}.parked_bytes", f"is more than its active_bytes, {role.active_bytes}: write less")
        return role

    def devices(self, key: str, text: Any) -> tuple[int, ...]:
        if isinstance(text, bool) or not isinstance(text, (str, int)):
            self.complain(key, f"is {text!r}: write device numbers such as 0-3,6")
            return ()
        if text == _NO_DEVICES:
            return ()
        if ":" in str(text) or "all" in str(text):
            self.complain(key, f"is {text!r}: a plan names devices alone, such as 0-3,6")
            return ()
        try:
            processes = parse(str(text), _HIGHEST, key=f"{self.where}: {key}")
        except PlacementError as error:
            self.complaints += error.complaints
            return ()
        return tuple(sorted(process[0] for process in processes))

    def phases(self, key: str, entry: Any) -> tuple[int, ...]:
        entries = entry if isinstance(entry, list) else [entry]
        if not entries or any(isinstance(one, bool) or not isinstance(one, int) or one < 0 for one in entries):
            self.complain(key, f"is {entry!r}: write a list of whole numbers, such as [0] or [0, 2]")
            return (0,)
        return tuple(sorted(set(entries)))

    def edge(self, name: str, entry: Any) -> tuple[tuple[str, str], EdgePlan]:
        key = f"edges.{name}"
        entry = self.section(key, entry, ("items", "barrier"))
        source, arrow, target = (part.strip() for part in name.partition(_ARROW.strip()))
        if not (source and arrow and target):
            self.complain(key, "is not an edge: write producer -> consumer, such as rollout -> trainer")
        items = self.value(f"{key}.items", entry, "items", int, None, 1)
        return (source, target), EdgePlan(items, self.value(f"{key}.barrier", entry, "barrier", bool, False))

    def prediction(self, entry: Any) -> Prediction:
        names = ("step_seconds", "bound_seconds")
        section = self.section("predicted", entry, names)
        seconds: Callable[[str], Any] = section.get
        for name in names:
            value = seconds(name)
            if isinstance(value, bool) or not isinstance(value, (int, float)) or value < 0:
                self.complain(f"predicted.{name}", f"is {value!r}: write seconds, or leave `predicted` out")
                return Prediction(0.0, 0.0)
        return Prediction(float(seconds(names[0])), float(seconds(names[1])))
