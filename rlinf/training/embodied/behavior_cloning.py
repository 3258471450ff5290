"""Learning from demonstrations: a policy learns to find demonstrated actions likely, or remembers them as transitions.

In: decisions of demonstrations, the same on every rank. Out: a changed policy, or rows for a replay buffer. Each rank
computes on its share of a batch. Blocking code.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.distributed.device_mesh import DeviceMesh

from rlinf.algos.tensor.loss_sum import LossSum
from rlinf.data.demonstrations import Decisions, Demonstration, decisions
from rlinf.data.rng import mix, permutation
from rlinf.models.policy.base import Policy
from rlinf.training.embodied.off_policy.replay_buffer import Rows
from rlinf.training.embodied.off_policy.transitions import several_steps
from rlinf.training.optimizer import minimize, share_of

_ROWS = 1024  # decisions on the device at a time where nothing is learned from them: a bound on its memory


def imitate(
    policy: Policy,
    shown: Decisions,
    device: torch.device,
    *,
    steps: int,
    batch: int,
    lr: float,
    fixed: Sequence[str] = (),
    seed: int = 0,
    mesh: DeviceMesh | None = None,
) -> dict[str, float]:
    """Raise the likelihood of demonstrated actions: L = mean of -log pi(a|o).

    Args:
        policy: changed in place; what it learns without gradients, such as the scale of states, comes first.
        shown: D decisions.
        device: of the policy.
        steps, batch, lr, fixed: see `PolicyTrainer.imitate`.
        seed: of the order of decisions.
        mesh: ranks that each have a copy; None for one.

    Returns:
        Metrics, see `PolicyTrainer.imitate`.
    """
    if steps < 1 or batch < 1:
        raise ValueError(f"imitate: steps={steps} and batch={batch} must be at least 1")
    for rows in torch.arange(len(shown)).split(_ROWS):
        part = shown.rows(rows)
        policy.adapt(policy.inputs(_on(part.observation, device), part.instructions))
    acting = {id(each) for each in policy.without_critic() if each.requires_grad}
    parameters = [each for name, each in policy.named_parameters() if id(each) in acting and name not in fixed]
    optimizer = torch.optim.AdamW(parameters, lr=lr, weight_decay=0.0)
    per_epoch = -(-len(shown) // batch)
    losses: list[LossSum] = []
    for step in range(steps):
        epoch, number = divmod(step, per_epoch)
        chosen = torch.from_numpy(permutation(len(shown), seed, epoch)).split(batch)[number]
        share, counts = share_of(chosen, mesh)
        mine = shown.rows(share)
        stored = policy.demonstrated(_on(mine.observation, device), mine.actions.to(device), mine.instructions)
        drawn = torch.tensor([mix(seed, step, row) for row in share.tolist()], device=device)
        loss = policy.imitate(stored, mine.valid.to(device) & counts, drawn)
        losses.append(minimize(loss, parameters, optimizer, mesh=mesh)[0])
    newest = losses[-per_epoch:]
    return {
        "imitation/loss": float(sum(losses[1:], losses[0]).mean()),
        "imitation/last": float(sum(newest[1:], newest[0]).mean()),
        "imitation/decisions": float(len(shown)),
    }


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
    if n_step > 1 and policy.config.chunk > 1 and any(len(shown.actions[0]) == 1 for shown in demonstrations):
        raise ValueError(
            "off_policy.n_step: demonstrations that were recorded action by action give overlapping chunks; record "
            f"them in chunks of {policy.config.chunk}, or set n_step to 1"
        )
    shown = decisions(demonstrations, policy.config.chunk)
    parts: list[Rows] = []
    for chosen in torch.arange(len(shown)).split(_ROWS):
        part = shown.rows(chosen)
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
    last = torch.zeros(len(shown), 1, dtype=torch.bool)  # one environment, in which they lie one after the other
    last[torch.tensor([len(each.actions) for each in demonstrations]).cumsum(0) - 1] = True
    outcome = {name: row[:, None] for name, row in rows.items() if name != "actions" and not name.startswith("seen.")}
    return {**rows, **{name: row[:, 0] for name, row in several_steps(outcome, last, n_step).items()}}


def _on(observation: dict[str, torch.Tensor], device: torch.device) -> dict[str, torch.Tensor]:
    return {name: rows.to(device) for name, rows in observation.items()}
