"""Learning from demonstrations: a policy is made to find likely what somebody else did.

In: decisions of demonstrations. Out: a changed policy, or transitions in its own terms. Every rank has all of them and
computes on its share of each batch.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.distributed.device_mesh import DeviceMesh

from rlinf.algos.tensor.loss_sum import LossSum
from rlinf.data.demonstrations import Decisions, Demonstration, decisions
from rlinf.data.rng import permutation
from rlinf.models.policy.base import Policy
from rlinf.training.embodied.replay_buffer import Rows
from rlinf.training.optimizer import minimize

_ROWS = 1024  # decisions that are brought to the device at a time, where nothing is learned from them


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
    """Raise the likelihood of demonstrated actions: L = mean of -log pi(a|o). Blocking.

    Args:
        policy: changed in place; what it learns otherwise than by gradients, such as the scale of states, comes first.
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
    ranks, rank = (1, 0) if mesh is None else (mesh.size(), mesh.get_local_rank())
    for rows in torch.arange(len(shown)).split(_ROWS):
        part = shown.rows(rows)
        policy.adapt(policy.inputs(_on(part.observation, device), part.instructions))
    deciding = {id(each) for each in policy.without_critic()}
    parameters = [each for name, each in policy.named_parameters() if id(each) in deciding and name not in fixed]
    optimizer = torch.optim.AdamW(parameters, lr=lr, weight_decay=0.0)
    per_epoch = -(-len(shown) // batch)
    losses: list[LossSum] = []
    for step in range(steps):
        epoch, number = divmod(step, per_epoch)
        chosen = torch.from_numpy(permutation(len(shown), seed, epoch)).split(batch)[number]
        share = chosen[rank::ranks]
        loss = _loss(policy, shown.rows(share if len(share) else chosen[:1]), device, counts=len(share) > 0)
        losses.append(minimize(loss, parameters, optimizer, mesh=mesh)[0])
    newest = losses[-per_epoch:]
    return {
        "imitation/loss": float(sum(losses[1:], losses[0]).mean()),
        "imitation/last": float(sum(newest[1:], newest[0]).mean()),
        "imitation/decisions": float(len(shown)),
    }


def remembered(policy: Policy, demonstrations: Sequence[Demonstration], device: torch.device) -> Rows:
    """Demonstrations as transitions that a policy lived through, as `transitions.transitions` gives them. Blocking.

    Args:
        policy: in whose terms actions are put.
        demonstrations: at least one.
        device: of the policy.
    """
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
    return {name: torch.cat([part[name] for part in parts]) for name in parts[0]}


def _loss(policy: Policy, shown: Decisions, device: torch.device, *, counts: bool) -> LossSum:
    stored = policy.demonstrated(_on(shown.observation, device), shown.actions.to(device), shown.instructions)
    mask = shown.valid.to(device)
    return policy.imitate(stored, mask if counts else torch.zeros_like(mask))


def _on(observation: dict[str, torch.Tensor], device: torch.device) -> dict[str, torch.Tensor]:
    return {name: rows.to(device) for name, rows in observation.items()}
