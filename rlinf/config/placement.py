"""The keys of `placement`: which role runs on which devices, by hand, by a rule, by a plan, or by measurement.

One process of `torchrun` is one device: a GPU, or on a CPU the share of the cores that the process computes with.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

from rlinf.config.schema import number


@dataclass
class Placing:
    """What the placement of every kind of run has."""

    __together__: ClassVar[bool] = True
    """`"rollout,judge": 0` is short for the same value under both names."""

    mode: Literal["collocated", "disaggregated", "hybrid", "auto"] | None = None
    """How roles share devices. `collocated`: all on all devices, taking turns. `disaggregated`: each on devices of its
    own, all at work at once. `hybrid`: generation on some, the others take turns on the rest. `auto`: begins
    collocated, measures, plans, and moves. null: as written below, or host 0; roles that meet there compute side by
    side, or take turns once device_memory_gb is given. Any mode wins over what is written below."""
    plan: str | None = None
    """A plan.yaml, as `python -m rlinf plan` or a run writes it; edited as you like. It wins over all else."""
    profile: str | None = None
    """A profile.json, as every run leaves one: the planner then finds the best sizes for the mode, or the best mode for
    auto or null. Without one a mode takes even shares, and `auto` measures first."""
    extrapolate: bool = False
    """Let the planner use numbers of devices and items that were not profiled: a guess. `auto` always does."""
    idle_processes: bool = False
    """Processes that were started may have no role, and idle; otherwise they are refused."""
    profile_steps: int = number(3, low=1)
    """auto: measure so many steps of each placement before planning; the first is left out as warm-up if there are
    several."""
    replan_above: float = number(0.15, above=0)
    """auto: plan anew once the last few steps took longer or shorter than predicted by more than this share."""
    device_memory_gb: float | None = number(None, above=0)
    """Memory of each device in GB (10^9 bytes); null takes a GPU's own, and no limit on a CPU. What cannot fit is
    refused before anything starts; roles that do not fit side by side are parked while they are not at work."""
    node_groups: dict[str, Any] = field(default_factory=dict)
    """Names for parts of a cluster, `{big: {nodes: 0-3, hardware: h100}}`, for placements such as
    `trainer: {node_group: big, placement: all}`. Plans count every kind of hardware by itself."""
    devices: dict[str, Any] = field(default_factory=dict)
    """What a device of each kind of `hardware` holds and how fast it is: {l40s: {memory_gb: 43, tflops: 362, bandwidth:
    864, link: 32}}, bandwidth and link in GB a second; relative speeds will do for plans from a profile. Cards such as
    h100, a100 and l40s are known by their names: {gpu: h100}, where `gpu` is the kind of nodes that no group names."""


@dataclass
class PlacementConfig(Placing):
    """Which devices each role runs on. A placement is `0`, `0-3`, `all`, `0-3:0-7` (eight processes on four devices),
    or `{node_group: NAME, placement: 0-3}`; several roles may be given together, as in `"rollout,judge": 0-3`. In one
    process all share it."""

    device_kind: Literal["auto", "cpu", "cuda"] = "auto"
    """`cpu` leaves GPUs alone. `cuda` is for `--dry-run`, which takes the devices to be GPUs, for defaults and memory
    that depend on it: with device_memory_gb, it tells on a laptop what a cluster would run. `auto` is what this machine
    has."""
    rollout: Any = None
    """Devices that generate answers."""
    trainer: Any = None
    """Devices that train, one process each."""
    judge: Any = None
    """Hosts that score answers, beside their devices."""
    critic: Any = None
    """Devices that train the critic; null: those of the trainer. The same holds for the next three."""
    reward_model: Any = None
    """Devices of the reward model, each with a whole copy."""
    reference: Any = None
    """Devices of the reference policy, each with a whole copy."""
    teacher: Any = None
    """Devices of the teacher, each with a whole copy."""


@dataclass
class EmbodiedPlacementConfig(Placing):
    """Which devices each role runs on. A placement is `0`, `0-3`, `all`, `0-3:0-7` (eight processes on four devices),
    or `{node_group: NAME, placement: 0-3}`; several roles may be given together, as in `"env,policy": 0-3`. In one
    process all share it."""

    env: Any = None
    """Hosts that simulate, each process env.num_envs environments, beside their devices."""
    policy: Any = None
    """Devices that act."""
    trainer: Any = None
    """Devices that train, one process each, with a whole policy."""
