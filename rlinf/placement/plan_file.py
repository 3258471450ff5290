"""`plan.yaml`: a plan that people read, edit and load again.

Flows in: a `Plan`, or the text of a file. Flows out: text that says what was chosen; or the plan, or one error with
everything that is wrong with the file. Nothing waits here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import yaml

from .grammar import PlacementError, parse
from .plan import EdgePlan, Plan, Prediction, RolePlan

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

    def section(self, key: str, entry: Any, known: tuple[str, ...]) -> dict[str, Any]:
        if entry is None:
            return {}
        if not isinstance(entry, Mapping):
            self.complain(key, f"is {entry!r}, not a mapping: write {', '.join(known)} under it")
            return {}
        for name in entry:
            if name not in known:
                near = get_close_matches(str(name), known, 1)
                hint = f"did you mean {near[0]!r}?" if near else f"there are: {', '.join(known)}"
                self.complain(f"{key}.{name}" if key else str(name), f"is not a key of a plan; {hint}")
        return dict(entry)

    def mapping(self, key: str, top: Mapping[str, Any]) -> dict[str, Any]:
        entry = top.get(key)
        if entry is not None and not isinstance(entry, Mapping):
            self.complain(key, f"is {entry!r}, not a mapping from names")
            return {}
        return dict(entry or {})

    def value(self, key: str, entry: Mapping[str, Any], name: str, kind: type, default: Any, least: int = 0) -> Any:
        found = entry.get(name)
        if found is None:
            return default
        right = isinstance(found, kind) and (kind is bool or not isinstance(found, bool))
        if not right or (kind is int and found < least):
            what = {int: f"a whole number, at least {least}", bool: "true or false", str: "text"}[kind]
            self.complain(key, f"is {found!r}: write {what}")
            return default
        return found

    def role(self, name: str, entry: Any) -> RolePlan:
        key = f"roles.{name}"
        known = ("devices", "phases", "resident", "items", "lease_items", "active_bytes", "parked_bytes")
        entry = self.section(key, {} if entry is None else entry, known)

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
        found = self.section("predicted", entry, names)
        seconds: Callable[[str], Any] = found.get
        for name in names:
            value = seconds(name)
            if isinstance(value, bool) or not isinstance(value, (int, float)) or value < 0:
                self.complain(f"predicted.{name}", f"is {value!r}: write seconds, or leave `predicted` out")
                return Prediction(0.0, 0.0)
        return Prediction(float(seconds(names[0])), float(seconds(names[1])))
