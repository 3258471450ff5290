"""Placement strings: which resources each process of a role gets.

Flows in: `"0-1:0-3,3-5,7-10:7-14"` and the like, as users of RLinf write them, with the number of resources there are.
Flows out: per process its resource ranks; or every mistake, each with its position and what to write instead. `parse`
reads one string, `assign` a table of them by role.

    placement  := segment ("," segment)*
    segment    := resources [":" processes]
    resources  := "all" | range
    processes  := range
    range      := number | number "-" number          both ends included

A segment without processes gives one process to each of its resources, counted on from the segment before. In one
segment either number is a multiple of the other: more processes than resources share them, fewer have several each.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any

from rlinf.placement.devices import Cluster, Resource

_RANGE = re.compile(r"(\d+)(?:\s*-\s*(\d+))?")
_LONGEST = 10_000_000
"""Ranks of one range, beyond which a number is a slip of the finger that would fill the memory before it is noticed."""


class PlacementError(ValueError):
    """A placement cannot be used. `complaints` holds every reason, a message each."""

    def __init__(self, complaints: Sequence[str]) -> None:
        super().__init__("\n".join(complaints))
        self.complaints = tuple(complaints)


class TooFewGpus(PlacementError):
    """More processes were started on a machine than it has GPUs, for roles that need one each."""


@dataclass(frozen=True, slots=True)
class Segment:
    """A part of a placement string between two commas, as it is written."""

    start: int
    """Position of its first character in the string, from 0."""
    text: str
    """Without the blanks around it."""
    resources: range | None
    """Resource ranks; None: all."""
    processes: range | None
    """Process ranks; None: counted on from the segment before."""

    @property
    def processes_at(self) -> int:
        """Position of the process ranks in the string."""
        return self.start + self.text.index(":") + 1 if ":" in self.text else self.start


class _Fault(Exception):
    """A mistake at a place; becomes one line of a PlacementError."""

    def __init__(self, start: int, length: int, message: str) -> None:
        super().__init__(message)
        self.start, self.length, self.message = start, max(1, length), message


def parse(text: str, available: int, *, key: str = "placement") -> tuple[tuple[int, ...], ...]:
    """Return the resource ranks of each process: `parse("0-1:0-3", 2) == ((0,), (0,), (1,), (1,))`.

    Args:
        text: a placement string.
        available: number of resources there are, ranks 0 to `available` - 1.
        key: name of the setting, for messages.

    Raises:
        PlacementError: with all that is wrong.
    """
    faults: list[_Fault] = []
    segments = []
    for start, part in _parts(text):
        try:
            segments.append(_segment(start, part))
        except _Fault as fault:
            faults.append(fault)
    if not faults:
        faults += _misplaced(segments, available)
    placed: dict[int, tuple[int, ...]] = {}
    if not faults:
        placed = _assign(segments, available, faults)
    if not faults:
        faults += _gaps(placed, segments)
    if faults:
        raise PlacementError([_mark(key, text, fault) for fault in faults])
    return tuple(placed[rank] for rank in sorted(placed))


def _range_text(first: int, last: int) -> str:
    return str(first) if first == last else f"{first}-{last}"


def _parts(text: str) -> Iterator[tuple[int, str]]:
    position = 0
    for part in text.split(","):
        stripped = part.strip()
        yield position + (len(part) - len(part.lstrip()) if stripped else 0), stripped
        position += len(part) + 1


def _segment(start: int, text: str) -> Segment:
    if not text:
        raise _Fault(start, 1, "a rank, a range or `all` is missing here: remove the comma, or write for example 0-3")
    resource_text, colon, right = text.partition(":")
    if ":" in right:
        raise _Fault(
            start + len(resource_text) + 1 + right.index(":"),
            1,
            "a second colon: write resources:processes, and a comma before the next pair",
        )
    resources = None if resource_text.strip() == "all" else _range(resource_text, start, "resources")
    processes = None
    if colon:
        at = start + len(resource_text) + 1
        if right.strip() == "all":
            raise _Fault(
                at, len(right), "processes cannot be `all`: write how many there are, such as 0-7, or leave `:all` out"
            )
        processes = _range(right, at, "processes")
    return Segment(start, text, resources, processes)


def _range(text: str, start: int, what: str) -> range:
    start += len(text) - len(text.lstrip())
    text = text.strip()
    if not text:
        raise _Fault(start, 1, f"the {what} are missing here: write a rank such as 0 or a range such as 0-3")
    match = _RANGE.fullmatch(text)
    if match is None:
        others = " or `all`" if what == "resources" else ""
        raise _Fault(start, len(text), f"{text!r} is not a rank (0), a range (0-3){others}")
    first = int(match[1])
    last = first if match[2] is None else int(match[2])
    if last < first:
        raise _Fault(start, len(text), f"the range {first}-{last} runs backwards: write {last}-{first}")
    if last - first >= _LONGEST:
        raise _Fault(
            start, len(text), f"the range {first}-{last} holds {last - first + 1:,} ranks: write a smaller one"
        )
    return range(first, last + 1)


def _misplaced(segments: Sequence[Segment], available: int) -> Iterator[_Fault]:
    owners: dict[int, str] = {}
    for segment in segments:
        if available == 0:
            yield _Fault(segment.start, len(segment.text), "there are no resources here: name another node group")
            return
        if segment.resources is None:
            if len(segments) > 1:
                yield _Fault(segment.start, 3, "`all` leaves nothing for other segments: write it alone, or a range")
            continue
        if segment.resources[-1] >= available:
            yield _Fault(
                segment.start,
                len(segment.text.partition(":")[0]),
                f"resource {segment.resources[-1]} does not exist, the last of {available} is {available - 1}: "
                + _smaller(segment.resources, available),
            )
            continue
        clash = next((rank for rank in segment.resources if rank in owners), None)
        if clash is not None:
            yield _Fault(
                segment.start,
                len(segment.text),
                f"resource {clash} is in {owners[clash]!r} already: begin after it, or let processes share it "
                f"in one segment, such as {clash}:0-1",
            )
        owners.update(dict.fromkeys(segment.resources, segment.text))


def _smaller(resources: range, available: int) -> str:
    if resources[0] >= available:
        return f"write ranks below {available}"
    return f"write {_range_text(resources[0], available - 1)}"


def _assign(segments: Sequence[Segment], available: int, faults: list[_Fault]) -> dict[int, tuple[int, ...]]:
    """Give each process its resources; what cannot be shared out evenly goes to `faults`."""
    placed: dict[int, tuple[int, ...]] = {}
    following = 0
    for segment in segments:
        resources = range(available) if segment.resources is None else segment.resources
        processes = segment.processes or range(following, following + len(resources))
        following = processes[-1] + 1
        have, want = len(resources), len(processes)
        if have % want and want % have:
            divisors = (count for count in range(want, 0, -1) if have % count == 0)
            near = have * round(want / have) if want > have else next(divisors)
            faults.append(
                _Fault(
                    segment.start,
                    len(segment.text),
                    f"{want} processes cannot share {have} resources evenly: "
                    f"write {near} processes, {_range_text(processes[0], processes[0] + near - 1)}",
                )
            )
            continue
        if double := [rank for rank in processes if rank in placed]:
            faults.append(
                _Fault(
                    segment.processes_at,
                    len(segment.text) - (segment.processes_at - segment.start),
                    f"process {double[0]} has resources already: the next free one is {max(placed) + 1}",
                )
            )
            continue
        for index, rank in enumerate(processes):
            if want >= have:
                placed[rank] = (resources[index // (want // have)],)
            else:
                width = have // want
                placed[rank] = tuple(resources[index * width : (index + 1) * width])
    return placed


def _gaps(placed: dict[int, tuple[int, ...]], segments: Sequence[Segment]) -> Iterator[_Fault]:
    rank = next((rank for rank in range(len(placed)) if rank not in placed), None)
    if rank is None:
        return
    # Implicit ranks follow the segment before, so whatever skips a rank first is written out.
    _, culprit, count = min(
        (segment.processes[0], segment, len(segment.processes))
        for segment in segments
        if segment.processes and segment.processes[0] > rank
    )
    yield _Fault(
        culprit.processes_at,
        len(culprit.text) - (culprit.processes_at - culprit.start),
        f"process {rank} has no resources, processes count from 0 without a gap: "
        f"write {_range_text(rank, rank + count - 1)}",
    )


def _mark(key: str, text: str, fault: _Fault) -> str:
    """Three lines: the setting, a mark under the mistake, what is wrong and what to write."""
    lead = f"{key}: "
    mark = " " * (len(lead) + fault.start) + "^" * fault.length
    return f"{lead}{text}\n{mark}\n  column {fault.start + 1}: {fault.message}"


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
    assignments: dict[str, Assignment] = {}
    for names, value in table.items():
        where = f"{key}.{names}"
        try:
            processes = _processes(value, cluster, where)
        except PlacementError as error:
            complaints += error.complaints
            processes = ()
        for role in (name.strip() for name in str(names).split(",")):
            if problem := _name_problem(role, assignments, roles):
                complaints.append(f"{where}: {problem}")
            else:
                assignments[role] = Assignment(role, processes)
    if complaints:
        raise PlacementError(complaints)
    return assignments


def _name_problem(role: str, assignments: Mapping[str, Assignment], roles: Sequence[str] | None) -> str | None:
    if not role:
        return "a role's name is missing between two commas: remove one"
    if role in assignments:
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
