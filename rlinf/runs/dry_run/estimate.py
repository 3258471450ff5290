"""Estimates the seconds of a step that was never run, from the model's shape and its devices' figures.

Of text: how much a step has to generate and learn, a model's shape and a kind of device give the seconds of each role
on so many devices, and when answers leave. Nothing is measured here. Which share of its figures a card reaches is taken
from published runs on H100s (RLinf, arXiv 2509.15965), for decoding, for learning, and for learning with experts;
another model, engine or card may reach more or less. So is how unlike each other the lengths of answers are; how long
they are, a configuration may say. The real flow is rehearsed with these seconds in virtual time, where roles are placed
and in the best plan of each mode. Out: lines for `--dry-run`.

Of a policy that acts: the policy on the meta device, its configuration and where its roles are give what simulating,
deciding and learning take. Deciding and learning follow from products and bytes; simulating is as fast as
`env.expected_steps_per_second` says, since nothing of it follows from a configuration.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from statistics import NormalDist
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rlinf.config.embodied import DAGGER, IMITATION, OFF_POLICY, EmbodiedConfig
from rlinf.config.text import RunConfig
from rlinf.models.policy.base import Policy
from rlinf.placement.auto import Choice, choose_for, stand_in
from rlinf.placement.grammar import PlacementError
from rlinf.placement.hardware import Hardware
from rlinf.placement.plan import Plan, RolePlan
from rlinf.placement.profile import Release
from rlinf.placement.seats import Placed
from rlinf.placement.simulate import Flow, rehearse
from rlinf.placement.workload import Edge, Option, Stage, Workload, chunk_choices
from rlinf.runs.dry_run.footprint import GB, Footprint, footprints
from rlinf.runs.dry_run.transformer import Shape, engine_split

BANDWIDTH_SHARE = 0.67
"""Share of a card's memory bandwidth that decoding reaches: 591, 367 and 236 s on 64, 128 and 256 GPUs, 7B split over
two (figure 9)."""
DENSE_SHARE = 0.4
"""Share of a card's products that learning and scoring reach: 367.7 s and 102.3 s on 64 GPUs, 7B (figure 9), if layers
are computed again for the gradient."""
EXPERTS_SHARE = 0.082
"""Share of a card's products that a mixture of experts reaches: 8,416 GPU seconds for 14.3 million tokens,
Qwen3-30B-A3B (figure 13)."""
SPREAD = 0.53
"""Standard deviation of the logarithms of lengths, which are normal until the cap cuts them: so that of answers with
0.53 of the cap on average 8.8 % are cut off, as in figure 9's runs (77 % of the groups of 16 have one that is)."""
USUAL = 0.53
"""Tokens of an answer as a share of the cap, on average, where nobody says more: 15,300 of 28,672 (figure 9)."""
_NORMAL = NormalDist()
_HALVINGS = 60
"""Bisections of an interval that holds a median; the last ones change no bit."""


@dataclass(frozen=True, slots=True)
class Work:
    """Amount of work of one step: answers, their lengths, and rows of an engine."""

    answers: int
    """That are generated and learned from."""
    group: int
    """Answers to a prompt; a prompt's leave together."""
    cap: int
    """Tokens of the longest."""
    prompt: int
    """Tokens of a prompt."""
    rows: int
    """Answers that one engine decodes at once, at most."""
    mean: float
    """Tokens of an answer on average; the cap: all are cut off."""

    def lengths(self) -> NDArray[np.float64]:
        """Tokens of each answer, `[answers]`: quantiles of a log-normal distribution that the cap cuts, so that their
        mean is right for few answers too, in an order that mixes them and is always the same."""
        median = _median(min(1.0, self.mean / self.cap))
        quantiles = [_NORMAL.inv_cdf((number + 0.5) / self.answers) for number in range(self.answers)]
        shares = np.minimum(1.0, median * np.exp(SPREAD * np.array(quantiles)))
        return np.maximum(1.0, self.cap * np.random.default_rng(0).permutation(shares))

    @property
    def tokens(self) -> float:
        """Total tokens of all prompts and answers."""
        return float(self.lengths().sum()) + self.answers * self.prompt

    @property
    def context(self) -> float:
        """Tokens before a token, on average over all tokens of answers."""
        lengths = self.lengths()
        return self.prompt + float((lengths**2).sum() / (2 * lengths.sum()))


def _median(mean: float) -> float:
    """Median of a log-normal distribution that is cut at 1 and then has a mean, both as shares of the cap."""

    def cut(median: float) -> float:
        distance = math.log(median) / SPREAD
        whole = median * math.exp(SPREAD**2 / 2)
        return whole * _NORMAL.cdf(-distance - SPREAD) + _NORMAL.cdf(distance)

    low, high = math.log(mean) - 1, 10 * SPREAD
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        low, high = (middle, high) if cut(math.exp(middle)) < mean else (low, middle)
    return math.exp(high)


def token_seconds(shape: Shape, hardware: Hardware, split: int, rows: int, context: float) -> float:
    """Seconds in which an engine makes a token for each of its rows, in bfloat16.

    It reads weights once, of experts those that any row chooses, E (1 - (1 - k/E)^rows); and keys and values of every
    row. Or it multiplies, if that takes longer.

    Args:
        shape: of the model.
        hardware: of its devices.
        split: devices over which it is split.
        rows: answers that it decodes.
        context: tokens before these, on average.
    """
    assert hardware.bandwidth is not None
    met = 1 - (1 - shape.active_experts / shape.experts) ** rows
    weights = 2.0 * (shape.parameters - shape.expert_parameters * (1 - met))
    cached = 4.0 * shape.layers * shape.keys * context * rows
    reading = (weights + cached) / (hardware.bandwidth * 1e9 * BANDWIDTH_SHARE)
    products = 0.0 if hardware.tflops is None else 2.0 * shape.active * rows / (hardware.tflops * 1e12 * DENSE_SHARE)
    return max(reading, products) / split


def generation(shape: Shape, hardware: Hardware, split: int, devices: int, work: Work) -> tuple[float, float, Release]:
    """Return seconds to generate all answers, those of the longest alone, and when prompts have all of theirs.

    Answers are dealt to the engines in turn; each engine takes the next one when a row is free.
    """
    engines, lengths, context = max(1, devices // split), work.lengths(), work.context
    per_row = [token_seconds(shape, hardware, split, rows, context) for rows in range(work.rows + 1)]
    done = np.empty(work.answers)
    for engine in range(engines):
        mine = range(engine, work.answers, engines)
        done[engine::engines] = _decoded(lengths[engine::engines], len(mine), work.rows, per_row)
    complete = done.reshape(-1, work.group).max(axis=1)
    alone = float(lengths.max()) * per_row[1]
    return float(done.max()), alone, Release.from_times(complete.tolist())


def _decoded(lengths: NDArray[np.float64], count: int, rows: int, per_row: list[float]) -> NDArray[np.float64]:
    """When an engine has made each of its answers: all rows get a token in the same time, which depends on how many
    there are, so that an answer leaves when so many tokens have been made as it has, counted from when it came."""
    done, at_work, following = np.empty(count), list[tuple[float, int]](), 0
    position = now = 0.0
    while following < count or at_work:
        while following < count and len(at_work) < rows:
            heapq.heappush(at_work, (position + lengths[following], following))
            following += 1
        end, number = at_work[0]
        now += (end - position) * per_row[len(at_work)]
        position = end
        heapq.heappop(at_work)
        done[number] = now
    return done


def passes(
    shape: Shape,
    hardware: Hardware,
    devices: int,
    work: Work,
    *,
    learns: int,
    checkpointed: bool = False,
    scores: bool = False,
) -> float:
    """Seconds to learn from all tokens so many times, or to score them, or both.

    A token takes 2 products per parameter that it passes through, and 4 per layer, query number and token before it for
    attention; a gradient takes twice as many, and once more where layers are computed again.
    """
    assert hardware.tflops is not None
    once = 2.0 * shape.active + 4.0 * shape.layers * shape.queries * work.context
    times = scores + learns * (4 if checkpointed else 3)
    share = EXPERTS_SHARE if shape.expert_parameters else DENSE_SHARE
    return times * once * work.tokens / (devices * hardware.tflops * 1e12 * share)


_LOADED = 25.0
"""GB a second at which a role is loaded and parked: of a PCIe link of 16 lanes, fourth generation."""
_STEP_OFF, _OFF_EXPERTS = 2.0, 3.0
"""Factors by which modelled seconds may be off. Published ones were met within 25 % for the dense model whose runs the
shares of `seconds` come from, and within 2.5 times for a mixture; another engine, network or card adds to that."""
_LEARN = ("trainer", "critic")
_SCORE = ("reference", "teacher")
_PROMPT = 256
"""Tokens of a prompt, where no limit says that they are fewer."""


class Unknown(ValueError):
    """Something that a step's seconds depend on is not known; the text says what."""


def workload_of(
    config: RunConfig, model_config: Any, placed: Placed, roles: Sequence[str] = (), *, recomputes: bool = False
) -> tuple[Workload, Work]:
    """Estimate the seconds of each role of a run on each kind of device, on as many as it has and on other numbers of
    them.

    Args:
        config: of the run, with values in place of what is left to devices.
        model_config: of its model, from transformers.
        placed: where its roles are.
        roles: that there are besides rollout, judge and trainer.
        recomputes: the trainer scores all tokens before it learns.

    Raises:
        Unknown: the speed of a kind of device, or a role that is not modelled.
    """
    fleet = placed.fleet
    for kind in fleet.counts:
        figures = fleet.hardware.get(kind)
        if figures is None or figures.tflops is None or figures.bandwidth is None:
            raise Unknown(f"how fast a {kind} is: say it, as in placement.devices={{{kind}: h100}}")
    if strange := [role for role in placed.seats if role not in {"rollout", "judge", *_LEARN, *_SCORE}]:
        raise Unknown(f"what {strange[0]} takes: profile a run")
    if not config.rollout.own_engine:
        raise Unknown("how many engines will have joined, which alone generate")
    shape, work = Shape.of(model_config), work_of(config)
    split, learning = engine_split(config.rollout.engine_args), config.trainer.parallel.copy
    options: dict[str, list[Option]] = {role: [] for role in placed.seats if role != "judge"}
    release: Release | None = None
    for kind, count in fleet.counts.items():
        hardware = fleet.hardware[kind]
        for devices in _sizes(count, {split, learning} - {1}, [len(_devices(placed, role)) for role in options]):
            seats = {role: [frozenset([number]) for number in range(devices)] for role in placed.seats}
            slices = dict.fromkeys(_LEARN, devices)
            footprint_by_role = footprints(config, model_config, seats, roles, slices)
            for role, own in options.items():
                if devices % (split if role == "rollout" else learning if role in _LEARN else 1):
                    continue
                longest = 0.0
                if role == "rollout":
                    seconds, longest, release = generation(shape, hardware, split, devices, work)
                else:
                    again = config.trainer.gradient_checkpointing is True
                    scores = role != "trainer" or recomputes  # a critic values what it then learns from
                    learns = config.algorithm.epochs if role in _LEARN else 0
                    seconds = passes(shape, hardware, devices, work, learns=learns, checkpointed=again, scores=scores)
                own.append(_option(kind, devices, seconds, longest, footprint_by_role[role], config))
    names = ["rollout", *(role for role in options if role in _SCORE), *(role for role in _LEARN if role in options)]
    judge = Stage("judge", (Option(0, 0.0, next(iter(fleet.counts))),))
    stages = (*(Stage(name, tuple(options[name]), release if name == "rollout" else None) for name in names), judge)
    first = [Edge("rollout", name) for name in ("judge", *(name for name in names if name in _SCORE))]
    then = [Edge(edge.target, name) for edge in first for name in names if name in _LEARN]
    items = config.algorithm.prompts_per_step
    workload = Workload(stages, (*first, *then), fleet.counts, placed.memory_by_kind or {}, chunk_choices(items))
    return workload, work


def work_of(config: RunConfig) -> Work:
    """Return the work of a step of a run, as far as its configuration says."""
    rollout, group = config.rollout, config.algorithm.group_size
    prompt = min(config.data.max_prompt_tokens or _PROMPT, _PROMPT)
    rows, cap = rollout.max_rows, rollout.max_new_tokens
    if rollout.max_tokens is not None:  # engines let an answer in where there is room for the longest
        rows = max(1, min(rows, rollout.max_tokens // (prompt + cap)))
    mean = min(rollout.expected_new_tokens or USUAL * cap, cap)
    return Work(config.algorithm.prompts_per_step * group, group, cap, prompt, rows, mean)


def _sizes(count: int, multiples: set[int], placed: Sequence[int]) -> list[int]:
    """Numbers of devices to plan with: all of a kind, shares of them, and what roles have."""
    shares = {count * part // 8 for part in (1, 2, 3, 4, 5, 6, 7, 8)}
    step = max(multiples, default=1)
    return sorted({size - size % step for size in shares if size >= step} | {size for size in placed if size <= count})


def _option(kind: str, devices: int, seconds: float, longest: float, footprint: Footprint, config: RunConfig) -> Option:
    """One size. What is parked is moved: all that stays between steps, not what comes and goes."""
    moved = (footprint.weights + footprint.gradients + footprint.optimizer) / (_LOADED * GB)
    return Option(devices, seconds, kind, footprint.active_bytes, footprint.parked_bytes, moved, moved, longest=longest)


def _devices(placed: Placed, role: str) -> tuple[int, ...]:
    return tuple(sorted(frozenset[int]().union(*placed.seats[role].devices)))


def as_placed(placed: Placed, workload: Workload, items: int) -> Plan:
    """The plan that a placement by hand comes to: roles that meet on a device follow each other, in order of work."""
    roles: dict[str, RolePlan] = {}
    numbers = {
        number: at for at, number in enumerate(n for kind in placed.fleet.counts for n in placed.fleet.of_kind(kind))
    }
    for stage in workload.stages:
        devices = tuple(sorted(numbers[number] for number in _devices(placed, stage.name)))
        phase = max((one.phases[0] for one in roles.values()), default=0)
        if any(set(devices) & set(one.devices) for one in roles.values() if phase in one.phases):
            phase += 1
        option = next((one for one in stage.options if one.devices == len(devices)), stage.options[-1])
        roles[stage.name] = RolePlan(
            devices,
            (phase,),
            resident=False,
            items=max(1, items // workload.chunks[-1]),
            active_bytes=option.active_bytes,
            parked_bytes=option.parked_bytes,
        )
    return Plan(roles)


def step_lines(
    config: RunConfig,
    model_config: Any,
    placed: Placed,
    flow: Flow,
    roles: Sequence[str] = (),
    *,
    recomputes: bool = False,
) -> Iterator[str]:
    """Lines about the seconds of a step.

    Args:
        config, model_config, placed, roles, recomputes: see `workload_of`.
        flow: one step.
    """
    if config.rollout.max_new_tokens < 1 or len(placed.fleet.kinds) < 2:
        return
    items = config.algorithm.prompts_per_step
    cap = config.rollout.max_new_tokens
    longest = replace(config, rollout=replace(config.rollout, expected_new_tokens=cap))

    def took(workload: Workload) -> float:
        few = stand_in(items, workload.chunks[-1])
        return rehearse(flow, as_placed(placed, workload, items), workload, items=items, rehearsed_items=few).seconds

    try:
        workload, work = workload_of(config, model_config, placed, roles, recomputes=recomputes)
        choice = choose_for(workload, items, flow, per_mode=1)
        seconds = took(workload)
        most = took(workload_of(longest, model_config, placed, roles, recomputes=recomputes)[0])
    except (Unknown, PlacementError) as error:
        yield f"Time: not known without a profile, or {error}"
        return
    off = _OFF_EXPERTS if Shape.of(model_config).expert_parameters else _STEP_OFF
    basis = "as expected" if config.rollout.expected_new_tokens is not None else "as assumed"
    yield (
        f"Time, modelled by the figures of {' and '.join(placed.fleet.counts)} and the model's shape, with answers of "
        f"{work.lengths().mean():,.0f} tokens on average, {basis}; nothing was measured: {seconds:,.4g} s a step as "
        f"placed, an order of magnitude, from {_rounded(seconds / off)} to {_rounded(seconds * off)} s; if all answers "
        f"had the longest, {cap:,}: {_rounded(most)} s"
    )
    yield from plans(choice)


def _rounded(seconds: float) -> str:
    """Seconds with two figures that count."""
    return f"{float(f'{seconds:.2g}'):,g}"


def plans(choice: Choice) -> Iterator[str]:
    """Lines about the best plan of each mode, and why the first is the best."""
    for row in choice.best_of_modes:
        sizes = ", ".join(f"{name} {len(role.devices)}" for name, role in row.plan.roles.items() if role.devices)
        yield f"  {row.mode:<13} {row.seconds:.4g} s  ({sizes})"
    yield f"  {choice.reason}"


_OFF = 5.0
"""Factor by which these may be off. The shares of a card's figures are those of language models; a published step of
512 LIBERO episodes is met within a quarter, one of ManiSkill takes four times as long."""


@dataclass(frozen=True, slots=True)
class ActingSeconds:
    """Seconds of a step, by what they are spent on."""

    decides: float
    """On the slowest device of the policy."""
    learns: float
    """On all devices of the trainer together."""
    simulates: float | None
    """On one host; None: not known."""
    concurrent: bool
    """It simulates one part of the environments while it decides for another, on other devices."""

    @property
    def seconds(self) -> float:
        """Seconds of the step, without simulating where that is not known."""
        simulates = self.simulates or 0.0
        return self.learns + (max(simulates, self.decides) if self.concurrent else simulates + self.decides)


def acting_seconds(config: EmbodiedConfig, policy: Policy, placed: Placed, hardware: Hardware) -> ActingSeconds | None:
    """Estimate the seconds of a step; None where it is not known how many tokens a decision has, or how fast a device
    is.

    A decision reads its tokens through all parameters, 2 products each, and then draws tokens one by one, each of which
    reads all weights once. Learning takes twice as many products again for a gradient, of adapters alone half of that,
    and once more where layers are computed again.

    Args:
        config: of the run.
        policy: that acts; on the meta device it costs nothing.
        placed: where its roles are.
        hardware: of the devices of policy and trainer.
    """
    tokens = policy.tokens_of_a_decision
    if tokens is None or hardware.tflops is None or hardware.bandwidth is None:
        return None
    passing, sampling = tokens
    parameters = sum(each.numel() for each in policy.parameters())
    products, bytes_ = hardware.tflops * 1e12 * DENSE_SHARE, hardware.bandwidth * 1e9 * BANDWIDTH_SHARE
    env, slices, horizon = config.env, config.env.slices, config.policy.horizon
    hosts, deciders, learners = (len(placed.seats[role].hosts) for role in ("env", "policy", "trainer"))
    rows, width = env.num_envs / slices, 2 if config.policy.dtype == "bfloat16" else 4
    weights = width * parameters / bytes_
    at_once = max(2.0 * parameters * passing * rows / products, weights)
    then = sampling * max(2.0 * parameters * rows / products, weights)
    turns = -(-hosts * slices // deciders)
    again, full = bool(config.policy.gradient_checkpointing), not config.policy.lora.on
    times = (3 if full else 2) + again
    decisions = hosts * env.num_envs * horizon * config.algorithm.epochs
    learns = 2.0 * parameters * (passing + sampling) * times * decisions / (learners * products)
    rate = env.expected_steps_per_second
    simulates = None if rate is None else env.num_envs * horizon * policy.config.chunk / rate
    apart = not set(placed.seats["env"].hosts) & set(placed.seats["policy"].hosts)
    return ActingSeconds(horizon * turns * (at_once + then), learns, simulates, apart and slices > 1)


def acting_lines(config: EmbodiedConfig, policy: Policy, placed: Placed) -> Iterator[str]:
    """The line about a step's seconds; none where they are not known, or where it is learned from a memory."""
    if config.algorithm.name in (*OFF_POLICY, DAGGER, IMITATION) or len(placed.fleet.counts) != 1:
        return
    (kind,) = placed.fleet.counts
    estimate = acting_seconds(config, policy, placed, placed.fleet.hardware.get(kind, Hardware()))
    if estimate is None:
        return
    took = estimate.seconds
    simulated = (
        f"simulating {estimate.simulates:,.4g} s, as expected" if estimate.simulates is not None else "simulating ?"
    )
    bound = "at least " if estimate.simulates is None else ""
    yield (
        f"Time, modelled by the figures of {kind} and the policy's size; nothing was measured: {bound}{took:,.4g} s a "
        f"step as placed, a guess, from {_rounded(took / _OFF)} to {_rounded(took * _OFF)} s ({simulated}, deciding "
        f"{estimate.decides:,.4g} s, learning {estimate.learns:,.4g} s)"
    )
