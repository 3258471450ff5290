"""Limits of a device, and how much of them each role of a step used: model FLOPs utilisation and bandwidth utilisation.

In: products and bytes that actors note of their work (`Actor.note`), counted by `rlinf.models.language.cost`, and the
device-seconds of each stage. Out: the metrics `mfu/...`, `mbu/...`, `idle/...` and `bound/device`. Known cards have
their makers' figures; any other device, a CPU too, is measured once, for a second between two steps of a run that has
lasted a while, and kept in the user's cache directory. What others do meanwhile makes a measured limit smaller, and
shares of it larger, up to the whole: nobody does more than a device can.
"""

from __future__ import annotations

import json
import os
import time
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from rlinf.placement.costs import MeasuredStep, role_of
from rlinf.placement.hardware import KNOWN, NAMES
from rlinf.runtime.observe.spans import Lap

if TYPE_CHECKING:
    import torch

COMPUTE, READ, DECODE = "work/compute/", "work/read/", "work/decode/"
"""Names under which actors note products, with the dtype that they are computed in behind: of learning and scoring, of
reading prompts, of making tokens."""
BYTES = "bytes"
"""In place of a dtype, for bytes that are moved."""
Resource = Literal["products", "bandwidth"]
REACHABLE = {"products": 0.4, "bandwidth": 0.67}
"""Shares of a card's figures that published runs reach (RLinf, arXiv 2509.15965): no more is counted as lost."""
MEASURED_AFTER = 30.0
"""Seconds of a run before it is worth a second to know what its device can do."""
LITTLE = {"cpu": 0.5, "cuda": 0.002}
"""Seconds of a step that a device must need at least before it is worth a word how well it is used: with less to do, as
with a toy, no program could keep it busy."""
_LABELS = {"trainer": "training", "rollout": "generation"}
_WORDS = {"bandwidth": "memory bandwidth"}
_ROUND = 0.2
"""Seconds of one measurement."""


@dataclass(frozen=True, slots=True)
class Limits:
    """The most that a device can do."""

    name: str
    products: Mapping[str, float]
    """Operations a second of products, by dtype."""
    bandwidth: float
    """Bytes a second from its own memory."""
    measured: bool = False
    """Measured here, and not by its maker."""

    @property
    def title(self) -> str:
        """Its name, for a sentence."""
        return f"{self.name}, as measured" if self.measured else self.name


def known(name: str) -> Limits | None:
    """The limits of a card by the name that torch gives it; None for any other device."""
    if name not in NAMES:
        return None
    card = KNOWN[NAMES[name]]
    figures = {"bfloat16": card.tflops, "float16": card.tflops, "float32": card.tflops_float32, "fp8": card.tflops_fp8}
    assert card.bandwidth is not None
    return Limits(name, {dtype: each * 1e12 for dtype, each in figures.items() if each}, card.bandwidth * 1e9)


class OwnDevice:
    """The device of this process, as far as its limits are known.

    Args:
        cache: file of what was measured on this machine; default: in the user's cache directory.
    """

    def __init__(self, cache: Path | None = None) -> None:
        import torch  # not with the module: pages that read runs need no torch

        from rlinf.metrics.machine import machine

        base = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser()
        self._cache = base / "rlinf" / "devices.json" if cache is None else cache
        self.name = machine()
        self.kind = "cuda" if torch.cuda.is_available() else "cpu"
        self._known = known(self.name)
        self._key = self.name if self.kind == "cuda" else f"{self.name}, {torch.get_num_threads()} threads"
        self._figures: dict[str, float] | None = None

    def limits(self, dtypes: Collection[str]) -> Limits | None:
        """Return the limits, if they are known for products in all of these dtypes; nothing is measured.

        Args:
            dtypes: such as "bfloat16".
        """
        if self._known is not None:
            return self._known if {*dtypes} <= self._known.products.keys() else None
        if self._figures is None:
            self._figures = self._read().get(self._key, {})
        figures = self._figures
        if not {*dtypes, BYTES} <= figures.keys():
            return None
        products = {dtype: each for dtype, each in figures.items() if dtype != BYTES}
        return Limits(self.name, products, figures[BYTES], measured=True)

    def measure(self, dtypes: Collection[str]) -> None:
        """Measure what is not known, and keep it; blocking, for about a second.

        Args:
            dtypes: of products.
        """
        if self._known is not None:
            return
        import torch

        from rlinf.runtime.base.tensors import own_device

        figures = {**(self._figures or {}), BYTES: _copied(own_device())}
        figures |= {dtype: _multiplied(own_device(), getattr(torch, dtype)) for dtype in {*dtypes} - figures.keys()}
        self._figures = figures
        try:
            self._cache.parent.mkdir(parents=True, exist_ok=True)
            part = self._cache.with_suffix(f".{os.getpid()}")
            part.write_text(json.dumps({**self._read(), self._key: figures}, indent=2) + "\n", encoding="utf-8")
            part.replace(self._cache)
        except OSError:  # a home that cannot be written to: the next run measures again
            pass

    def _read(self) -> dict[str, dict[str, float]]:
        try:
            saved: Any = json.loads(self._cache.read_text(encoding="utf-8"))
            return {str(key): {str(unit): float(each) for unit, each in own.items()} for key, own in saved.items()}
        except (OSError, ValueError, AttributeError, TypeError):  # none, or none of ours
            return {}


def _copied(device: torch.device) -> float:
    """Bytes a second that a large copy reads and writes."""
    import torch

    source = torch.ones(1 << (29 if device.type == "cuda" else 27), dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * source.nbytes / _quickest(lambda: target.copy_(source), device)


def _multiplied(device: torch.device, dtype: torch.dtype) -> float:
    """Operations a second of a large product; of constants, so that no random number is drawn."""
    import torch

    edge = 8192 if device.type == "cuda" else 768
    one = torch.full((edge, edge), 1 / edge, dtype=dtype, device=device)
    return 2 * edge**3 / _quickest(lambda: one @ one, device)


def _quickest(work: Callable[[], Any], device: torch.device) -> float:
    """Seconds of the quickest of some rounds, after one that warms up.

    On a CPU they are of this thread's own processor time: what others take of its core is no limit of the device.
    """
    clock = time.perf_counter if device.type == "cuda" else time.thread_time
    seconds, until = list[float](), time.perf_counter() + _ROUND
    while len(seconds) < 3 or time.perf_counter() < until:
        start = clock()
        work()
        if device.type == "cuda":
            import torch

            torch.cuda.synchronize(device)
        seconds.append(clock() - start)
    return min(seconds[1:])


@dataclass(frozen=True, slots=True)
class Use:
    """How much of its devices' limit a role used in a step."""

    role: str
    resource: Resource
    """The limit that binds."""
    least: float
    """Device-seconds that its work takes at the limit."""
    took: float
    """Device-seconds that it took."""

    @property
    def share(self) -> float:
        """Part of the limit that was reached."""
        return self.least / self.took

    @property
    def lost(self) -> float:
        """Device-seconds beyond those of work that reaches what published runs do."""
        return max(0.0, self.took - self.least / REACHABLE[self.resource])


def worth_a_word(metrics: Mapping[str, float], kind: str) -> bool:
    """True if the devices had enough to do in a step that it matters how well they were used.

    Args:
        metrics: of the step.
        kind: of its devices, a key of `LITTLE`.
    """
    return metrics.get("bound/device", 0.0) >= LITTLE[kind]


def used(role: str, resource: str, share: float, whose: str = "the device's") -> str:
    """Return the clause that says how much of a device's limit a role used, as "training used 6% of its products"."""
    part, digits = f"{whose} {_WORDS.get(resource, resource)}", 0 if share >= 0.095 else 1
    return f"{_LABELS.get(role, role)} used {share:.{digits}%} of {part}"


@dataclass(slots=True)
class _Amount:
    count: float = 0.0
    seconds: float = 0.0


class Work:
    """Products and bytes that the roles noted in a step.

    Args:
        lap: the step.
    """

    def __init__(self, lap: Lap) -> None:
        self._roles: dict[str, dict[str, _Amount]] = defaultdict(lambda: defaultdict(_Amount))
        for span in lap.parts:
            if span.what.startswith((COMPUTE, READ, DECODE)):
                amount = self._roles[role_of(span.actor)][span.what]
                amount.count += span.bytes
                amount.seconds += span.end - span.start

    @property
    def dtypes(self) -> set[str]:
        """Dtypes of all products."""
        units = {name.rpartition("/")[2] for amounts in self._roles.values() for name in amounts}
        return units - {BYTES}

    def uses(self, step: MeasuredStep, limits: Limits) -> list[Use]:
        """How much of the devices' limit each role used.

        Args:
            step: says how long they took.
            limits: of each device.
        """
        alone = {stage.members[0]: stage.work for stage in step.stages.values() if len(stage.members) == 1}
        uses = []
        for role, amounts in self._roles.items():
            if (took := alone.get(role, 0.0)) <= 0:
                continue
            before, decoding = (_products(amounts, parts, limits) for parts in ((COMPUTE, READ), (DECODE,)))
            moving = amounts[DECODE + BYTES].count / limits.bandwidth
            resource: Resource = "bandwidth" if moving > max(decoding, before) else "products"
            least = before + max(decoding, moving)
            uses.append(Use(role, resource, min(least, took) if limits.measured else least, took))
        return uses

    def metrics(self, uses: Iterable[Use], limits: Limits, devices: int) -> dict[str, float]:
        """Return the metrics of a step.

        Args:
            uses, limits: see `uses`.
            devices: of the job.
        """
        uses, values = list(uses), dict[str, float]()
        for use in uses:
            values[f"{'mfu' if use.resource == 'products' else 'mbu'}/{use.role}"] = use.share
            values[f"idle/{use.role}"] = use.lost / devices
        if uses:
            values["bound/device"] = sum(use.least for use in uses) / devices
        for amounts in self._roles.values():
            if (reading := sum(each.seconds for name, each in amounts.items() if name.startswith(READ))) > 0:
                values["mfu/prefill"] = _products(amounts, (READ,), limits) / reading
            if (moved := amounts[DECODE + BYTES]).seconds > 0:
                values["mbu/decode"] = moved.count / limits.bandwidth / moved.seconds
        return values


def _products(amounts: Mapping[str, _Amount], parts: tuple[str, ...], limits: Limits) -> float:
    """Device-seconds of the products of some parts of a role's work, at the limit."""
    named = ((name.rpartition("/")[2], each) for name, each in amounts.items() if name.startswith(parts))
    return sum(each.count / limits.products[unit] for unit, each in named if unit != BYTES)
