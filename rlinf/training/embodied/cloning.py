"""Learning from demonstrations: a policy learns to find demonstrated actions likely, or remembers them as transitions.

Decisions of demonstrations are the same on every rank; each computes on its share of a batch. Blocking code.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from rlinf.algos.loss_sum import LossSum
from rlinf.data.demonstrations import Decisions, DecisionStream, Demonstration, decisions
from rlinf.data.rng import mix
from rlinf.models.policy.base import Policy
from rlinf.training.embodied.replay import Rows, several_steps
from rlinf.training.optimizer import adamw_of_parts, minimize, share_of

_ROWS = 1024  # decisions on the device at a time where nothing is learned from them: a bound on its memory


def imitate(
    policy: Policy,
    demonstrations: DecisionStream,
    device: torch.device,
    *,
    steps: int,
    lr: float,
    fixed: Sequence[str] = (),
    mesh: DeviceMesh | None = None,
    micro_batch: int | None = None,
) -> dict[str, float]:
    """Raise the likelihood of demonstrated actions, with an optimizer that is for this alone.

    Args:
        policy: changed in place; what it learns without gradients, such as the scale of states, comes first.
        demonstrations: batches of decisions.
        device: of the policy.
        steps, lr, fixed: see `PolicyTrainer.imitate`.
        mesh: ranks that each have a copy; None for one.
        micro_batch: see `losses_of`.

    Returns:
        Metrics, see `PolicyTrainer.imitate`.
    """
    if steps < 1:
        raise ValueError(f"imitate: steps={steps} must be at least 1")
    get_used_to(policy, demonstrations, device)
    parameters = imitating(policy, fixed)
    optimizer = adamw_of_parts([(parameters, lr)], betas=(0.9, 0.999), weight_decay=0.0)
    losses = [
        minimize(losses_of(policy, demonstrations, step, device, mesh, micro_batch), parameters, optimizer, mesh=mesh)[
            0
        ]
        for step in range(steps)
    ]
    per_epoch = -(-demonstrations.decisions // demonstrations.batch)
    newest = losses[-per_epoch:]
    return {
        "imitation/loss": float(sum(losses[1:], losses[0]).mean()),
        "imitation/last": float(sum(newest[1:], newest[0]).mean()),
        "imitation/decisions": float(demonstrations.decisions),
    }


def get_used_to(policy: Policy, demonstrations: DecisionStream, device: torch.device) -> None:
    """Let a policy learn what needs no gradients, such as the scale of states, from what is in memory first."""
    for part in demonstrations.beginning(_ROWS):
        policy.adapt(policy.inputs(_on(part.observation, device), part.instructions))


def imitating(policy: Policy, fixed: Sequence[str]) -> list[torch.nn.Parameter]:
    """The parameters that learn from demonstrations.

    Args:
        policy: whose.
        fixed: names of those that stay as they are besides what only values need.
    """
    acting = {id(each) for each in policy.without_critic() if each.requires_grad}
    return [each for name, each in policy.named_parameters() if id(each) in acting and name not in fixed]


def losses_of(
    policy: Policy,
    demonstrations: DecisionStream,
    step: int,
    device: torch.device,
    mesh: DeviceMesh | None,
    micro_batch: int | None,
) -> Iterator[Callable[[], LossSum]]:
    """The losses of this rank's micro-batches of a step, L = mean of -log pi(a|o); as many on every rank.

    Args:
        policy, shown, device: see `imitate`.
        step: number of the optimizer step.
        mesh: see `imitate`.
        micro_batch: decisions that a rank computes at once; None for all of its share.
    """
    batch, seeds = demonstrations.draw(step), demonstrations.seeds(step)
    ranks = 1 if mesh is None else mesh.size()
    share, counts = share_of(torch.arange(len(batch)), mesh)
    size = -(-len(batch) // ranks) if micro_batch is None else micro_batch
    for first in range(0, -(-len(batch) // ranks), size):
        rows = share[first : first + size]
        yield partial(_loss, policy, batch, rows if len(rows) else share[:1], seeds, device, counts and len(rows) > 0)


def loss_on(policy: Policy, rows: Decisions, device: torch.device, seed: int = 0) -> LossSum:
    """The loss of decisions that nobody learns from."""
    seeds = torch.tensor([mix(seed, row) for row in range(len(rows))], dtype=torch.int64)
    with torch.no_grad():
        return _loss(policy, rows, torch.arange(len(rows)), seeds, device, True)


def _loss(policy: Policy, batch: Decisions, rows: Tensor, seeds: Tensor, device: torch.device, counts: bool) -> LossSum:
    mine = batch.rows(rows)
    stored = policy.demonstrated(_on(mine.observation, device), mine.actions.to(device), mine.instructions)
    return policy.imitate(stored, mine.valid.to(device) & counts, seeds[rows].to(device))


def demonstrated_transitions(
    policy: Policy, demonstrations: Sequence[Demonstration], device: torch.device, *, n_step: int = 1
) -> Rows:
    """Demonstrations as rows of a replay buffer, laid out as `off_policy.transitions` gives them.

    Args:
        policy: whose terms actions and inputs are put in.
        demonstrations: at least one.
        device: of the policy.
        n_step: decisions that a transition spans.

    Raises:
        ValueError: decisions overlap, since chunks were recorded action by action, and a transition is to span several.
    """
    if n_step > 1 and policy.config.chunk > 1 and any(len(each.actions[0]) == 1 for each in demonstrations):
        raise ValueError(
            "off_policy.n_step: demonstrations that were recorded action by action give overlapping chunks; record "
            f"them in chunks of {policy.config.chunk}, or set n_step to 1"
        )
    demonstrated = decisions(demonstrations, policy.config.chunk)
    parts: list[Rows] = []
    for indices in torch.arange(len(demonstrated)).split(_ROWS):
        part = demonstrated.rows(indices)
        stored = policy.demonstrated(_on(part.observation, device), part.actions.to(device), part.instructions)
        actions = stored.pop("actions")
        following = policy.inputs(_on(part.following, device), part.instructions)
        rows = {f"seen.{name}": row for name, row in stored.items()}
        rows |= {f"following.{name}": row for name, row in following.items()}
        rows |= {"actions": actions, "rewards": part.rewards, "steps": part.valid.sum(1), "terminated": part.terminated}
        parts.append({name: row.cpu() for name, row in rows.items()})
    rows = {name: torch.cat([part[name] for part in parts]) for name in parts[0]}
    if n_step == 1:
        return rows
    last = torch.zeros(len(demonstrated), 1, dtype=torch.bool)  # one environment, in which they lie one after the other
    last[torch.tensor([len(each.actions) for each in demonstrations]).cumsum(0) - 1] = True
    outcome = {name: row[:, None] for name, row in rows.items() if name != "actions" and not name.startswith("seen.")}
    return {**rows, **{name: row[:, 0] for name, row in several_steps(outcome, last, n_step).items()}}


def _on(observation: dict[str, torch.Tensor], device: torch.device) -> dict[str, torch.Tensor]:
    return {name: rows.to(device) for name, rows in observation.items()}
