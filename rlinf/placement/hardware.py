"""The devices of a job: their kinds by node group, what one of each kind holds, and how fast it is.

In: the section `placement`, the size of the job. Out: a `Cluster`, which placement strings count through, and a
`Fleet`, which the planner counts. No device is touched: what is not declared is not known, but for a few cards by name.

A planner takes devices kind by kind; a job numbers them through its nodes. `Fleet.numbered` is the way back.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from difflib import get_close_matches
from functools import cache
from typing import Any

from rlinf.config.common import Placing
from rlinf.placement.devices import Cluster, NodeGroup
from rlinf.placement.grammar import PlacementError, parse
from rlinf.placement.plan import GB, Plan

KIND = "gpu"
"""Of devices whose kind nobody names: to a plan, a process on a CPU is a device like any other."""


@dataclass(frozen=True, slots=True)
class Hardware:
    """One kind of device. Where only plans from a profile are made, its speeds may be relative ones."""

    memory_gb: float | None = None
    """GB (10^9 bytes) of it that roles may fill."""
    tflops: float | None = None
    """10^12 operations a second of dense bfloat16 products, by its maker."""
    bandwidth: float | None = None
    """GB a second from its own memory."""
    link: float | None = None
    """GB a second to other devices of its machine, one way."""
    tflops_float32: float | None = None
    """10^12 operations a second of float32 products at full precision, as torch computes them by default."""
    tflops_fp8: float | None = None
    """10^12 operations a second of dense products of 8-bit floats."""

    @property
    def memory(self) -> int | None:
        """Bytes that roles may fill; None: not known."""
        return None if self.memory_gb is None else int(min(self.memory_gb, 1e9) * GB)


KNOWN: Mapping[str, Hardware] = {
    "b200": Hardware(165, 2250, 7700, 900, 75, 4500),
    "h200": Hardware(138, 989, 4800, 450, 67, 1979),
    "h100": Hardware(78, 989, 3350, 450, 67, 1979),
    "h100-pcie": Hardware(78, 756, 2039, 300, 51, 1513),
    "h100-nvl": Hardware(92, 835, 3938, 300, 60, 1671),
    "h800": Hardware(78, 989, 3350, 200, 67, 1979),
    "h20": Hardware(94, 148, 4000, 450, 44, 296),
    "a100": Hardware(78, 312, 2039, 300, 19.5),
    "a100-40gb": Hardware(39, 312, 1555, 300, 19.5),
    "a100-pcie": Hardware(78, 312, 1935, 300, 19.5),
    "a800": Hardware(78, 312, 2039, 200, 19.5),
    "l40s": Hardware(43, 362, 864, 32, 91.6, 733),
    "l20": Hardware(43, 119.5, 864, 32, 59.8, 239),
    "l4": Hardware(22, 121, 300, 32, 30.3, 242),
    "a10": Hardware(22, 125, 600, 32, 31.2),
    "rtx4090": Hardware(23, 165, 1008, 32, 82.6, 330),
    "rtx5090": Hardware(30, 209.5, 1792, 64, 104.8, 419),
    "mi300x": Hardware(188, 1307, 5300, 448, 163.4, 2615),
}
"""By the names that `node_groups` use: their makers' figures without sparsity, those of products that are summed in
float32, and what is left of their memory by `torch.cuda` for roles (92 %). From NVIDIA's data sheets of B200 (HGX),
H200, H100 (SXM, PCIe and NVL), A100 (SXM and PCIe), L40S, L4 and A10, its white papers on Ada and Blackwell for the RTX
cards, AMD's data sheet of MI300X; those of H800, A800, H20 and L20 from their vendors' lists."""
NAMES: Mapping[str, str] = {
    "NVIDIA B200": "b200",
    "NVIDIA H200": "h200",
    "NVIDIA H100 80GB HBM3": "h100",
    "NVIDIA H100 PCIe": "h100-pcie",
    "NVIDIA H100 NVL": "h100-nvl",
    "NVIDIA H800": "h800",
    "NVIDIA H20": "h20",
    "NVIDIA A100-SXM4-80GB": "a100",
    "NVIDIA A100-SXM4-40GB": "a100-40gb",
    "NVIDIA A100-PCIE-40GB": "a100-40gb",
    "NVIDIA A100 80GB PCIe": "a100-pcie",
    "NVIDIA A800-SXM4-80GB": "a800",
    "NVIDIA L40S": "l40s",
    "NVIDIA L20": "l20",
    "NVIDIA L4": "l4",
    "NVIDIA A10": "a10",
    "NVIDIA GeForce RTX 4090": "rtx4090",
    "NVIDIA GeForce RTX 5090": "rtx5090",
    "AMD Instinct MI300X": "mi300x",
}
"""Those cards by the names that torch gives them; a part of one (MIG) has another name, and other limits."""


@dataclass(frozen=True, slots=True)
class Devices:
    """Devices that a plan may use, by kind."""

    counts: Mapping[str, int]
    """How many there are."""
    memory: Mapping[str, int] | None = None
    """Bytes of one; None: no limit."""
    hardware: Mapping[str, Hardware] = field(default_factory=dict)
    """Figures of each kind, for stages that were not measured on all of them."""
    multiple: int = 1
    """Sizes in multiples of so many devices, such as a node; a size of all devices is kept."""


@dataclass(frozen=True, slots=True)
class Fleet:
    """The devices of a job by kind."""

    kinds: tuple[str, ...]
    """Of each device, in the order of their numbers."""
    hardware: Mapping[str, Hardware] = field(default_factory=dict)
    """Hardware of each kind, as far as known."""

    @property
    def counts(self) -> dict[str, int]:
        """How many there are of each kind, in the order in which the kinds first come."""
        return {kind: self.kinds.count(kind) for kind in dict.fromkeys(self.kinds)}

    def by_kind(self, memory: Mapping[str, int] | None) -> Devices:
        """Return all of them as planners count them, with so many bytes to fill."""
        return Devices(self.counts, memory, self.hardware)

    def of_kind(self, kind: str) -> tuple[int, ...]:
        """Numbers of the devices of a kind."""
        return tuple(number for number, own in enumerate(self.kinds) if own == kind)

    def numbered(self, plan: Plan) -> Plan:
        """A plan that counts devices kind by kind, as planners do, in the job's own numbers."""
        numbers = [number for kind in self.counts for number in self.of_kind(kind)]
        roles = {
            name: replace(role, devices=tuple(sorted(numbers[device] for device in role.devices)))
            for name, role in plan.roles.items()
        }
        return replace(plan, roles=roles)

    def memories(self, limit: int | None) -> tuple[int | None, ...]:
        """Bytes of each device that roles may fill.

        Args:
            limit: of every device whose kind says nothing; None: there is no limit.
        """
        memory = {kind: own.memory for kind, own in self.hardware.items() if own.memory is not None}
        return tuple(memory.get(kind, limit) for kind in self.kinds)


@cache
def cpu_products() -> frozenset[str]:
    """Products of narrow numbers that this machine's CPU has instructions for, by torch's names for them."""
    import torch  # which plans do without

    capabilities: Mapping[str, Any] = getattr(torch.cpu, "get_capabilities", dict)()
    names = ("avx512_bf16", "amx_bf16", "avx512_vnni", "amx_int8")
    return frozenset(name for name in names if capabilities.get(name))


def fleet_of(wanted: Placing, hosts: int) -> Fleet:
    """The devices of a job by kind.

    Args:
        wanted: the section `placement`. A limit of its own, `device_memory_gb`, holds for every kind.
        hosts: number of processes.

    Raises:
        PlacementError: node groups or kinds that cannot be.
    """
    hardware = hardware_of(wanted)
    if wanted.device_memory_gb is not None:
        hardware = {kind: replace(own, memory_gb=wanted.device_memory_gb) for kind, own in hardware.items()}
    return Fleet(tuple(device.kind for device in cluster_of(wanted, hosts).devices), hardware)


def hardware_of(wanted: Placing) -> dict[str, Hardware]:
    """Return the hardware of the kinds that node groups name: from `placement.devices`, or else a card's own figures.

    Raises:
        PlacementError: with every mistake; each begins with its key.
    """
    named = [KIND, *(entry.get("hardware") for entry in wanted.node_groups.values() if isinstance(entry, Mapping))]
    kinds = [str(kind) for kind in dict.fromkeys(named) if kind is not None]
    hardware = {kind: KNOWN[kind] for kind in kinds if kind in KNOWN}
    problems = []
    names = [one.name for one in fields(Hardware)]
    for kind, entry in wanted.devices.items():
        key = f"placement.devices.{kind}"
        if kind not in kinds:
            near = get_close_matches(kind, kinds, 1)
            hint = f"did you mean {near[0]!r}?" if near else f"there are: {', '.join(kinds)}"
            problems.append(f"{key}: no node group has such hardware; {hint}")
        elif isinstance(entry, str) and entry in KNOWN:
            hardware[kind] = KNOWN[entry]
        elif not isinstance(entry, Mapping) or not entry or set(entry) - {*names}:
            problems.append(
                f"{key}: write any of {', '.join(names)}, as in {{memory_gb: 43}}, or a card: {', '.join(KNOWN)}"
            )
        elif wrong := [name for name, value in entry.items() if not _positive(value)]:
            problems.append(f"{key}.{wrong[0]}: {entry[wrong[0]]!r} is no number above 0")
        else:
            hardware[kind] = replace(hardware.get(kind, Hardware()), **entry)
    if problems:
        raise PlacementError(problems)
    return hardware


def _positive(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < float("inf")


def cluster_of(wanted: Placing, hosts: int, *, width: int | None = None) -> Cluster:
    """The devices of a job: one per process.

    Args:
        wanted: the section `placement`.
        hosts: number of processes.
        width: devices of a node; None: as many as torchrun started on this one.

    Raises:
        PlacementError: a node group that cannot be.
    """
    width = min(hosts, width or int(os.environ.get("LOCAL_WORLD_SIZE", hosts)))
    count = -(-hosts // width)
    complaints, groups = [], []
    kinds = [KIND] * count
    for label, entry in wanted.node_groups.items():
        try:
            group = _group(label, entry, count)
        except (PlacementError, ValueError) as error:
            complaints.append(str(error))
            continue
        groups.append(group)
        if group.hardware is not None:
            for node in group.nodes:
                kinds[node] = group.hardware
    if complaints:
        raise PlacementError(complaints)
    memory = None if wanted.device_memory_gb is None else int(min(wanted.device_memory_gb, 1e9) * GB)
    own = {kind: hardware.memory for kind, hardware in hardware_of(wanted).items()}
    nodes = [{kind: min(width, hosts - number * width)} for number, kind in enumerate(kinds)]
    try:
        return Cluster.declared(nodes, {kind: memory or own.get(kind) for kind in kinds}, groups)
    except ValueError as error:
        raise PlacementError([f"placement.node_groups: {error}"]) from None


def _group(label: str, entry: Any, nodes: int) -> NodeGroup:
    key = f"placement.node_groups.{label}"
    if not isinstance(entry, Mapping) or "nodes" not in entry or set(entry) - {"nodes", "hardware"}:
        raise PlacementError([f"{key}: write {{nodes: 0-3}}, and hardware: KIND if its devices differ from others'"])
    numbers = tuple(rank for process in parse(str(entry["nodes"]), nodes, key=f"{key}.nodes") for rank in process)
    return NodeGroup(label, numbers, None if entry.get("hardware") is None else str(entry["hardware"]))


def least(memories: Sequence[int | None]) -> int | None:
    """The fewest bytes of some devices; None: none of them has a limit."""
    return min((own for own in memories if own is not None), default=None)
