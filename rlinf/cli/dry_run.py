"""Describes a run without starting it: where each role would run, whether it fits, and what the data are.

In: a checked configuration and the number of processes. Out: lines for a terminal; on request, the whole configuration
as YAML that loads as the same, with the lines as comments below. Code that the configuration names is imported; no
process is started and no device is touched.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping

from rlinf.config.embodied import EmbodiedConfig
from rlinf.config.loading import dump
from rlinf.config.text import RunConfig
from rlinf.job.checks.by_kind import device_kind, elsewhere
from rlinf.job.checks.data import look_at_data
from rlinf.job.checks.embodied import expected_horizon_warning, held_by, seconds_of, without_path
from rlinf.job.checks.modelled.step import modelled, plans
from rlinf.job.prepare import Prepared, prepare, refuse_idle
from rlinf.job.start import check_output
from rlinf.placement.plan import GB
from rlinf.placement.seats import CONTROL, TEXT, Placed

_ALL_KEYS = "Configuration: --dry-run --verbose prints every key, as YAML that --config takes"


def describe(config: RunConfig | EmbodiedConfig, hosts: int, *, whole: bool = False) -> str:
    """What a job of `hosts` processes would make of a configuration.

    Args:
        config: it, resolved.
        hosts: processes of the job.
        whole: whether the configuration comes first, as YAML in which the rest are comments.

    Raises:
        ConfigError: it could not run; the text says what does not fit, and what would.
    """
    if not (isinstance(config, RunConfig) and elsewhere(config.placement)):
        check_output(config)
    prepared = prepare(config, hosts)
    refuse_idle(config.placement, prepared)
    placed = prepared.placed
    held = prepared.held if isinstance(config, RunConfig) else held_by(config, placed)
    lines = [
        *_roles(config, placed),
        *(f"Left to the devices: {line}" for line in prepared.became),
        *(f"Warning: {line}" for line in prepared.warnings),
        *_to_be_named(config),
        *_memory(placed, held, cuda=isinstance(config, RunConfig) and device_kind(config.placement) == "cuda"),
        *_prediction(prepared, config),
    ]
    if isinstance(config, RunConfig):
        lines += [f"Data: {line}" for line in look_at_data(config, prepared)]
    if whole:
        return "\n".join([dump(config), *(f"# {line}" for line in lines)])
    return "\n".join([*lines, _ALL_KEYS])


def _to_be_named(config: RunConfig | EmbodiedConfig) -> Iterator[str]:
    """What a run needs that could be checked without."""
    if isinstance(config, EmbodiedConfig) and (missing := without_path(config)) is not None:
        yield f"Warning: a run is refused as it is: {missing.key}: {missing.advice}"
    if isinstance(config, EmbodiedConfig) and (cut := expected_horizon_warning(config)) is not None:
        yield f"Warning: {cut}"


def _roles(config: RunConfig | EmbodiedConfig, placed: Placed) -> Iterator[str]:
    if placed.devices == 1:
        named = _named_devices(config)
        yield "Roles: one process, which all roles share" + (
            f"; torchrun --nproc-per-node {named} would place them" if named > 1 else ""
        )
    else:
        shared = ", taking turns" if placed.turns else ""
        each = f"on {placed.gpus} GPU{'s' if placed.gpus > 1 else ''}" if placed.first else "a device each"
        yield f"Roles: {placed.devices} processes, {each}; {placed.plan.mode}{shared}"
    width = max(10, *map(len, placed.seats))
    for role, seat in placed.seats.items():
        where = ("device" if any(seat.devices) else "host") + ("s" if len(set(seat.hosts)) > 1 else "")
        yield f"  {role:<{width}} {where} {listed(seat.hosts)}"


def _memory(placed: Placed, held: Mapping[str, tuple[int, int]], *, cuda: bool) -> Iterator[str]:
    """What each role takes on a device by its model's shape; what cannot fit was refused before."""
    if not held:
        return
    limit = f"of {placed.memory / GB:.3g}" if placed.memory is not None else "no limit"
    parts = ", ".join(f"{role} {_gigabytes(active)}" for role, (active, _) in held.items() if active)
    turns = "; roles of a device take turns, and are parked where they do not fit" if placed.turns else ""
    bound = "at the peak" if cuda else "at least"
    yield f"Memory of a device, GB, {bound}: {parts} ({limit}{turns})"
    machine = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if placed.memory is None and (most := max(active for active, _ in held.values())) > machine:
        yield f"  which is more than the {machine / GB:.3g} GB of this machine: {most / GB:.3g} GB will not fit here"


def _prediction(prepared: Prepared, config: RunConfig | EmbodiedConfig) -> Iterator[str]:
    chosen, placed = prepared.chosen, prepared.placed
    if chosen is None and isinstance(config, RunConfig) and prepared.algorithm is not None and placed.fleet.hardware:
        again, roles = prepared.algorithm.needs_recomputed_logprobs, prepared.roles
        yield from modelled(prepared.config, prepared.model_config, placed, prepared.flow, roles, recomputes=again)
        return
    if chosen is None and isinstance(config, EmbodiedConfig) and (lines := [*seconds_of(config, placed)]):
        yield from lines
        return
    if chosen is None:
        modelled_by_card = isinstance(config, RunConfig) and config.placement.device_kind == "cuda"
        card = "; placement.devices={gpu: h100} has it modelled" if modelled_by_card else ""
        yield f"Time: not known without a profile; every run leaves a profile.json, for placement.profile{card}"
        return
    predicted = placed.plan.predicted
    assert predicted is not None  # of every plan that was chosen
    yield (
        f"Time, simulated from the profile: {predicted.step_seconds:.3g} s a step, {predicted.efficiency:.0%} of what "
        f"is possible ({predicted.bound_seconds:.3g} s, {chosen.bound.binding})"
    )
    yield from plans(chosen)


def _gigabytes(held: int) -> str:
    return f"{float(f'{held / GB:.2g}'):,g}" if held >= GB / 1000 else "0.001"


def _named_devices(config: RunConfig | EmbodiedConfig) -> int:
    """How many devices the placement counts on, as far as plain numbers tell."""
    roles = [kind.name for kind in (*TEXT, *CONTROL)]
    given = (value for name, value in vars(config.placement).items() if name in roles)
    texts = [str(value) for value in given if isinstance(value, str | int)]
    numbers = [int(part) for text in texts for part in text.replace("-", ",").split(",") if part.isdigit()]
    return 1 + max(numbers, default=0)


def listed(numbers: tuple[int, ...]) -> str:
    """Numbers as people write them: `0-3, 6`."""
    parts: list[list[int]] = []
    for number in numbers:
        if parts and number == parts[-1][-1] + 1:
            parts[-1].append(number)
        else:
            parts.append([number])
    return ", ".join(str(part[0]) if len(part) == 1 else f"{part[0]}-{part[-1]}" for part in parts)
