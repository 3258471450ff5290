"""Nodes, the devices on them, groups of nodes, and processes that share a GPU: what a placement may point at.

Flows in: a declaration (how many nodes, what each holds) or facts gathered from hosts. Flows out: a `Cluster`, which
numbers devices through all nodes in order, and lists the resources that the ranks of a placement string count. torchrun
may start more processes on a machine than it has GPUs: `first_on_same` says which share one, `refused` what then fails.
"""

from __future__ import annotations

import functools
import itertools
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches

from rlinf.config.common import Placing


def first_on_same(processes: int, gpus: int) -> tuple[int, ...]:
    """Return for each process of the job the first one on the same GPU; () where each has its own, or there is none.

    Args:
        processes: of the job.
        gpus: of this machine; others are taken to have as many. A process takes that of its local rank, counted round.
    """
    here = int(os.environ.get("LOCAL_WORLD_SIZE", "0"))  # set by torchrun; without it all share this process anyway
    if not 0 < gpus < here:
        return ()
    return tuple(number // here * here + number % here % gpus for number in range(processes))


def refused(wanted: Placing, together: Mapping[str, Sequence[int]], first: Sequence[int], gpus: int) -> Iterator[str]:
    """Complaints, each with its key, about what does not work on GPUs that processes share.

    Args:
        wanted: the section `placement`.
        together: by role that computes on all its processes together, these processes.
        first: see `first_on_same`.
        gpus: of a machine.
    """
    if not first:
        return
    fix = f"start no more processes on a machine than it has GPUs (torchrun --nproc-per-node {gpus})"
    if wanted.plan is None and (wanted.profile is not None or wanted.mode == "auto"):
        key = "mode" if wanted.profile is None else "profile"
        yield f"placement.{key}: the planner counts a GPU for each process, and here processes share GPUs: {fix}"
    for role, processes in together.items():
        on: dict[int, int] = {}
        for number in processes:
            if (other := on.setdefault(first[number], number)) != number:
                yield (
                    f"placement.{role}: its processes {other} and {number} share a GPU, where NCCL refuses to let them "
                    f"compute together: {fix}, or give it one process of each GPU"
                )
                break


NODE = "node"
"""The reserved label of a group whose resources are all nodes of the cluster, whatever devices they have."""


@dataclass(frozen=True, slots=True)
class Device:
    """Something that a process computes on or controls: a GPU, a CPU host's device slot, a robot."""

    number: int
    """Through all nodes of the cluster, from 0."""
    node: int
    """Number of the node that it belongs to."""
    kind: str
    """Its kind: "gpu", "cpu", "h100", "franka". Devices of one kind are interchangeable to the planner."""
    memory: int | None = None
    """Bytes that it holds; None: not known, and nothing is checked against it."""


@dataclass(frozen=True, slots=True)
class Node:
    """One machine."""

    number: int
    """From 0, in the order of the cluster."""
    devices: tuple[Device, ...]
    """Accelerators and other hardware on it; a machine that only has cores has none."""


@dataclass(frozen=True, slots=True)
class NodeGroup:
    """Some nodes under a label, as `node_group:` in a placement names them."""

    label: str
    """Unique in the cluster."""
    nodes: tuple[int, ...]
    """Numbers of its nodes, in the order in which ranks count through them."""
    hardware: str | None = None
    """The kind of device that ranks count; None: all devices of its nodes, or the nodes if they have none."""


@dataclass(frozen=True, slots=True)
class Resource:
    """The resource that one rank of a placement stands for: a device, or a whole node."""

    node: int
    """Number of the node."""
    kind: str
    """Kind of the device, or "node"."""
    device: int | None
    """Number of the device; None for a node."""


@functools.lru_cache(16)  # whoever reads a configuration asks for the same thousands, several times
def _nodes(
    nodes: tuple[tuple[tuple[str, int], ...], ...], memory: tuple[tuple[str, int | None], ...]
) -> tuple[Node, ...]:
    numbers, bytes_of = itertools.count(), dict(memory)
    return tuple(
        Node(
            node,
            tuple(Device(next(numbers), node, kind, bytes_of.get(kind)) for kind, count in holds for _ in range(count)),
        )
        for node, holds in enumerate(nodes)
    )


@dataclass(frozen=True, slots=True)
class Cluster:
    """All machines of a job."""

    nodes: tuple[Node, ...]
    """In order of their numbers, 0 to n - 1."""
    groups: tuple[NodeGroup, ...] = ()
    """Labelled parts of it."""
    _by_label: dict[str, NodeGroup] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if [node.number for node in self.nodes] != list(range(len(self.nodes))):
            raise ValueError(f"nodes must be numbered 0, 1, 2, … in order, got {[n.number for n in self.nodes]}")
        numbers = [device.number for node in self.nodes for device in node.devices]
        if numbers != list(range(len(numbers))):
            raise ValueError(f"devices must be numbered 0, 1, 2, … through the nodes, got {numbers}")
        for node in self.nodes:
            if strays := [device.number for device in node.devices if device.node != node.number]:
                raise ValueError(f"devices {strays} are listed on node {node.number} but name another node")
        labels = [group.label for group in self.groups]
        for label in labels:
            if labels.count(label) > 1 or label == NODE:
                why = "is reserved for whole nodes" if label == NODE else "names two groups"
                raise ValueError(f"node group label {label!r} {why}: choose another")
        for group in self.groups:
            if missing := [number for number in group.nodes if not 0 <= number < len(self.nodes)]:
                raise ValueError(
                    f"node group {group.label!r}: there is no node {missing[0]}, nodes are 0-{len(self.nodes) - 1}"
                )
        object.__setattr__(self, "_by_label", {group.label: group for group in self.groups})

    @classmethod
    def declared(
        cls,
        nodes: Sequence[Mapping[str, int]],
        memory: Mapping[str, int | None] | None = None,
        groups: Sequence[NodeGroup] = (),
    ) -> Cluster:
        """Return a cluster from what each node holds.

        Args:
            nodes: per node, the number of devices by kind, such as `[{"h100": 8}, {"h100": 8}, {}]`.
            memory: bytes of a device, by kind.
            groups: labelled parts of it.
        """
        built = _nodes(tuple(tuple(holds.items()) for holds in nodes), tuple((memory or {}).items()))
        return cls(built, tuple(groups))

    @property
    def devices(self) -> tuple[Device, ...]:
        """All devices, in order of their numbers."""
        return tuple(device for node in self.nodes for device in node.devices)

    def resources(self, labels: Sequence[str] = ()) -> tuple[Resource, ...]:
        """Return what resource ranks 0, 1, 2, … stand for.

        Args:
            labels: of node groups, through which the ranks count in this order; none: the whole cluster.

        Raises:
            ValueError: there is no group of a label.
        """
        if not labels:
            return self._of_nodes(range(len(self.nodes)), None)
        matches: list[Resource] = []
        for label in labels:
            if label == NODE:
                matches += [Resource(node.number, NODE, None) for node in self.nodes]
                continue
            group = self._by_label.get(label)
            if group is None:
                labels_there = [*self._by_label, NODE]
                near = get_close_matches(label, labels_there, 1)
                hint = f"did you mean {near[0]!r}?" if near else f"there are: {', '.join(labels_there)}"
                raise ValueError(f"there is no node group {label!r}; {hint}")
            matches += self._of_nodes(group.nodes, group.hardware)
        return tuple(matches)

    def _of_nodes(self, numbers: Sequence[int], hardware: str | None) -> tuple[Resource, ...]:
        devices = [
            Resource(number, device.kind, device.number)
            for number in numbers
            for device in self.nodes[number].devices
            if hardware in (None, device.kind)
        ]
        if devices or hardware is not None:
            return tuple(devices)
        return tuple(Resource(number, NODE, None) for number in numbers)
