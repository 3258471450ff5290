"""Which resources every role gets: a table of placement strings, read against a cluster.

Flows in: the mapping under `placement:` (roles to a string, or to a node group and a string) and the cluster. Flows
out: an `Assignment` per role; or one error that lists every mistake of the whole table. Nothing waits here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any

from .devices import Cluster, Resource
from .grammar import PlacementError, parse

_FIELDS = ("node_group", "placement")


@dataclass(frozen=True, slots=True)
class Assignment:
    """Where the processes of one role run."""

    role: str
    """Name of the role, such as "rollout"."""
    processes: tuple[tuple[Resource, ...], ...]
    """Per process rank, what it has: one or several devices of one node and kind, or a node."""

    @property
    def devices(self) -> tuple[int, ...]:
        """Numbers of all devices of the role, each once, ascending; none if it runs on whole nodes."""
        return tuple(sorted({part.device for process in self.processes for part in process if part.device is not None}))


def assign(
    table: Mapping[str, Any], cluster: Cluster, *, roles: Sequence[str] | None = None, key: str = "placement"
) -> dict[str, Assignment]:
    """Read a table of placements, such as `{"rollout,judge": "0-3", "trainer": {"node_group": "h100", …}}`.

    Args:
        table: role names, several with commas between, to a placement string, a rank, or a mapping with `placement`
            and, if ranks are to count through labelled groups, `node_group` (a label, several with commas, or a list).
        cluster: whose resources are counted.
        roles: the names that may stand there; None: any.
        key: name of the table, for messages.

    Raises:
        PlacementError: with every mistake of the table.
    """
    complaints: list[str] = []
    found: dict[str, Assignment] = {}
    for names, value in table.items():
        where = f"{key}.{names}"
        try:
            processes = _processes(value, cluster, where)
        except PlacementError as error:
            complaints += error.complaints
            processes = ()
        for role in (name.strip() for name in str(names).split(",")):
            if problem := _name_problem(role, found, roles):
                complaints.append(f"{where}: {problem}")
            else:
                found[role] = Assignment(role, processes)
    if complaints:
        raise PlacementError(complaints)
    return found


def _name_problem(role: str, found: Mapping[str, Assignment], roles: Sequence[str] | None) -> str | None:
    if not role:
        return "a role's name is missing between two commas: remove one"
    if role in found:
        return f"role {role!r} is placed twice: remove one of the two"
    if roles is not None and role not in roles:
        near = get_close_matches(role, roles, 1)
        hint = f"did you mean {near[0]!r}?" if near else f"there are: {', '.join(roles)}"
        return f"there is no role {role!r} in this run; {hint}"
    return None


def _processes(value: Any, cluster: Cluster, where: str) -> tuple[tuple[Resource, ...], ...]:
    labels: list[str] = []
    if isinstance(value, Mapping):
        if unknown := [name for name in value if name not in _FIELDS]:
            raise PlacementError([f"{where}.{unknown[0]}: unknown; there are: {', '.join(_FIELDS)}"])
        if "placement" not in value:
            raise PlacementError([f"{where}: `placement` is missing: write for example placement: all"])
        group = value.get("node_group") or []
        labels = [label.strip() for label in (group.split(",") if isinstance(group, str) else group)]
        value, where = value["placement"], f"{where}.placement"
    if isinstance(value, bool) or not isinstance(value, (str, int)):
        raise PlacementError([f"{where}: {value!r} is neither a placement string nor a rank: write for example 0-3"])
    try:
        resources = cluster.resources(labels)
    except ValueError as error:
        raise PlacementError([f"{where}: {error}"]) from None
    text = str(value)
    placed = tuple(tuple(resources[rank] for rank in ranks) for ranks in parse(text, len(resources), key=where))
    if complaints := [_torn(rank, process) for rank, process in enumerate(placed) if _is_torn(process)]:
        raise PlacementError([f"{where}: {text}\n  {complaints[0]}"])
    return placed


def _is_torn(process: Sequence[Resource]) -> bool:
    return len({(part.node, part.kind) for part in process}) > 1


def _torn(rank: int, process: Sequence[Resource]) -> str:
    nodes = sorted({part.node for part in process})
    if len(nodes) > 1:
        what = f"spans nodes {', '.join(map(str, nodes))}"
    else:
        what = f"mixes {' and '.join(sorted({part.kind for part in process}))}"
    return (
        f"process {rank} {what}, and one process can hold only resources of one kind on one node: "
        f"give it fewer, so that none crosses over"
    )
