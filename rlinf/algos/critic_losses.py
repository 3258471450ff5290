"""Losses of off-policy learning: soft actor-critic, its relatives (REDQ, RLPD, CrossQ), and IQL. Pure functions.

Transitions flow in as tensors over a batch, predictions of several critics as [critics, batch]; `LossSum`s come out,
un-normalised like all others, so that micro-batches and ranks add. What is drawn at random takes a generator.
"""

from __future__ import annotations

import torch
from torch import Tensor

from rlinf.algos.loss_sum import LossSum, Mask, same_shape, wide, within
from rlinf.algos.losses import Tokens

Returns = tuple[float, float]
"""Least and greatest return that a task can give."""


def pessimistic(values: Tensor, *, subset: int | None = None, generator: torch.Generator | None = None) -> Tensor:
    """The smallest prediction, of all critics or of some drawn without replacement.

    Clipped double Q (arXiv:1802.09477, eq. 10); a random subset is REDQ's (arXiv:2101.05982, algorithm 1), and RLPD's
    with it (arXiv:2302.02948).

    Args:
        values: [critics, batch]; differentiable.
        subset: how many critics to draw, the same for the whole batch; None for all.
        generator: of the draw.

    Returns:
        [batch].

    Raises:
        ValueError: `values` are no [critics, batch], or `subset` is not between 1 and the number of critics.
    """
    if values.ndim != 2:
        raise ValueError(f"pessimistic: values must be [critics, batch], got {list(values.shape)}")
    if subset is not None:
        within("pessimistic", "subset", subset, 1, len(values))
        values = values[torch.randperm(len(values), generator=generator)[:subset].to(values.device)]
    return wide(values).amin(0)


def soft_target(
    rewards: Tensor,
    terminated: Tensor,
    next_values: Tensor,
    next_logprobs: Tensor,
    *,
    gamma: float,
    alpha: float | Tensor,
    steps: int | Tensor = 1,
    returns: Returns | None = None,
) -> Tensor:
    """The target of a critic: y = r + gamma^steps (1 - terminated) (V' - alpha log pi(a'|s')).

    Soft actor-critic (arXiv:1812.05905, eq. 2 and 3), over a chunk of `steps` actions with their summed reward. A limit
    that cuts an episode is no end: `terminated` is false there.

    Args:
        rewards: of the chunk, [batch].
        terminated: whether the episode really ended in it, bool or 0/1, [batch].
        next_values: of the target critics for an action drawn now, such as `pessimistic` gives, [batch].
        next_logprobs: log-prob of that action, nats, [batch].
        gamma: discount per action, 0 to 1.
        alpha: temperature, reward per nat.
        steps: actions in the chunk, one number or [batch].
        returns: least and greatest that there can be, to which targets are cut; None leaves them.

    Returns:
        [batch], without gradient.

    Raises:
        ValueError: shapes differ, or gamma is out of range.
    """
    same_shape(
        "soft_target", "rewards", rewards, terminated=terminated, next_values=next_values, next_logprobs=next_logprobs
    )
    within("soft_target", "gamma", gamma, 0.0, 1.0)
    temperature = alpha.detach() if isinstance(alpha, Tensor) else alpha
    ahead = wide(next_values.detach()) - temperature * next_logprobs.detach()
    return _possible(wide(rewards.detach()) + gamma**steps * torch.where(terminated.bool(), 0.0, ahead), returns)


def _possible(targets: Tensor, returns: Returns | None) -> Tensor:
    return targets if returns is None else targets.clamp(*returns)


def critics(values: Tensor, targets: Tensor, mask: Tensor) -> LossSum:
    """Squared error of every critic, averaged over critics: L = mean over j of (Q_j - y)^2.

    Soft actor-critic (arXiv:1812.05905, eq. 5, without its factor 1/2).

    Args:
        values: predictions for the actions taken, [critics, batch]; differentiable.
        targets: [batch]; never differentiated.
        mask: which transitions count, [batch], bool or 0/1.

    Returns:
        Sums; metrics `q/mean` and `target/mean`.

    Raises:
        ValueError: shapes do not fit.
    """
    if values.ndim != 2:
        raise ValueError(f"critics: values must be [critics, batch], got {list(values.shape)}")
    same_shape("critics", "a critic's values", values[0], targets=targets, mask=mask)
    batch = _tokens("critics", mask, values)
    Q, y = batch.read(values), batch.constant(targets)
    return batch.sum((Q - y).square().mean(0), {"q/mean": Q.mean(0), "target/mean": y})


def choices(
    values: Tensor,
    choice: Tensor,
    rewards: Tensor,
    next_values: Tensor,
    mask: Tensor,
    *,
    discount: Tensor,
    returns: Returns | None = None,
) -> LossSum:
    """Squared error of the value of what was chosen, averaged over critics: L = mean over j of (Q_j(s, g) - y)^2.

        y = r + discount Q'(s', argmax over g of Q(s', g))

    Double deep Q-learning (arXiv:1509.06461, eq. 4), as HIL-SERL learns a gripper (arXiv:2410.21845, section 3.2).

    Args:
        values: Q(s, g) of each choice by each critic, [critics, choices, batch]; differentiable.
        choice: number of the choice that was made, int64 [batch].
        rewards: [batch].
        next_values: of the target critics, such as `pessimistic` gives, for the choice that the trained ones think
            best, [batch]; never differentiated.
        mask: which transitions count, [batch], bool or 0/1.
        discount: of `next_values`, 0 where the task ended, [batch].
        returns: see `soft_target`.

    Returns:
        Sums; metric `q/gripper`.

    Raises:
        ValueError: shapes do not fit.
    """
    if values.ndim != 3:
        raise ValueError(f"choices: values must be [critics, choices, batch], got {list(values.shape)}")
    others = {"rewards": rewards, "next_values": next_values, "mask": mask, "discount": discount}
    same_shape("choices", "a choice's values", values[0, 0], choice=choice, **others)
    own = values[:, choice, torch.arange(len(choice), device=choice.device)]
    batch = _tokens("choices", mask, own)
    Q = batch.read(own)
    y = batch.constant(_possible(wide(rewards) + discount * wide(next_values), returns))
    return batch.sum((Q - y).square().mean(0), {"q/gripper": Q.mean(0)})


def likeness(moves: Tensor, theirs: Tensor, mask: Tensor) -> LossSum:
    """Squared distance of what a policy would do from what somebody did: L = |a - a'|^2.

    The imitation loss beside an actor's own (arXiv:1709.10089, eq. 3, without its filter).

    Args:
        moves: the policy's, [batch, numbers]; differentiable.
        theirs: [batch, numbers]; never differentiated.
        mask: which states count, [batch], bool or 0/1.

    Returns:
        Sums; metric `imitation/distance`, squared.

    Raises:
        ValueError: shapes differ.
    """
    same_shape("likeness", "moves", moves, theirs=theirs)
    same_shape("likeness", "a row's number", moves[:, 0], mask=mask)
    batch = _tokens("likeness", mask, moves[:, 0])
    distance = (batch.read(wide(moves).T) - batch.constant(wide(theirs).T)).square().sum(0)
    return batch.sum(distance, {"imitation/distance": distance})


def actor(logprobs: Tensor, values: Tensor, mask: Tensor, *, alpha: float | Tensor) -> LossSum:
    """The policy's loss by reparametrised actions: L = alpha log pi(a|s) - Q(s, a).

    Soft actor-critic (arXiv:1812.05905, eq. 7).

    Args:
        logprobs: of actions drawn from the policy now, nats, [batch]; differentiable.
        values: the critics' (pessimistic) verdict on them, [batch]; differentiable by way of the actions.
        mask: which states count, [batch], bool or 0/1.
        alpha: temperature; never differentiated.

    Returns:
        Sums; metric `entropy`, the mean of -log pi, nats.

    Raises:
        ValueError: shapes differ.
    """
    same_shape("actor", "logprobs", logprobs, values=values, mask=mask)
    temperature = alpha.detach() if isinstance(alpha, Tensor) else alpha
    batch = _tokens("actor", mask, logprobs)
    log_pi, Q = batch.read(logprobs), batch.read(values)
    return batch.sum(temperature * log_pi - Q, {"entropy": -log_pi})


def temperature(log_alpha: Tensor, logprobs: Tensor, mask: Tensor, *, target_entropy: float) -> LossSum:
    """The temperature's loss: L = -alpha (log pi + target entropy), which raises alpha where entropy is too low.

    Soft actor-critic (arXiv:1812.05905, eq. 18).

    Args:
        log_alpha: logarithm of the temperature, []; differentiable.
        logprobs: of actions drawn from the policy now, nats, [batch]; never differentiated.
        mask: which states count, [batch], bool or 0/1.
        target_entropy: nats; the negative number of action dimensions is the custom.

    Returns:
        Sums; metric `alpha`.

    Raises:
        ValueError: shapes differ.
    """
    same_shape("temperature", "logprobs", logprobs, mask=mask)
    batch = _tokens("temperature", mask, logprobs)
    alpha, log_pi = log_alpha.exp(), batch.constant(logprobs)
    return batch.sum(batch.read(-alpha * (log_pi + target_entropy)), {"alpha": alpha.expand_as(log_pi)})


def expectile(values: Tensor, targets: Tensor, mask: Tensor, *, tau: float) -> LossSum:
    """Expectile regression of state values on the critics' verdict: L = |tau - 1(d < 0)| d^2 with d = Q(s, a) - V(s).

    Implicit Q-learning (arXiv:2110.06169, eq. 5): with tau towards 1, V goes towards the best of the actions that the
    data show in a state, and no other action is ever asked about.

    Args:
        values: V(s), [batch]; differentiable.
        targets: Q(s, a) of the target critics for the actions in the data, [batch]; never differentiated.
        mask: which transitions count, [batch], bool or 0/1.
        tau: between 0 and 1; 0.5 is the mean.

    Returns:
        Sums; metric `value/mean`.

    Raises:
        ValueError: shapes differ, or tau is out of range.
    """
    same_shape("expectile", "values", values, targets=targets, mask=mask)
    within("expectile", "tau", tau, 0.0, 1.0)
    batch = _tokens("expectile", mask, values)
    V, Q = batch.read(values), batch.constant(targets)
    d = Q - V
    weight = torch.where(d < 0.0, 1.0 - tau, tau)
    return batch.sum(weight * d.square(), {"value/mean": V})


def weighted_likelihood(
    logprobs: Tensor, advantages: Tensor, mask: Tensor, *, beta: float, most: float = 100.0
) -> LossSum:
    """Advantage-weighted regression: L = -min(exp(beta A), most) log pi(a|s).

    Implicit Q-learning (arXiv:2110.06169, eq. 7), after arXiv:1910.00177, eq. 4.

    Args:
        logprobs: of the actions in the data, nats, [batch]; differentiable.
        advantages: Q(s, a) - V(s), [batch]; never differentiated.
        mask: which transitions count, [batch], bool or 0/1.
        beta: inverse temperature, 1 / reward; 0 is behaviour cloning.
        most: weights are cut off at it.

    Returns:
        Sums; metrics `advantage/mean` and `weight/mean`.

    Raises:
        ValueError: shapes differ, or beta is below 0.
    """
    same_shape("weighted_likelihood", "logprobs", logprobs, advantages=advantages, mask=mask)
    within("weighted_likelihood", "beta", beta, 0.0, float("inf"))
    batch = _tokens("weighted_likelihood", mask, logprobs)
    log_pi, A = batch.read(logprobs), batch.constant(advantages)
    weights = torch.exp(beta * A).clamp(max=most)
    return batch.sum(-weights * log_pi, {"advantage/mean": A, "weight/mean": weights})


def polyak(target: Tensor, source: Tensor, *, tau: float) -> Tensor:
    """A target network's parameter after a step towards the trained one's: (1 - tau) target + tau source.

    Args:
        target, source: of one shape.
        tau: share of the way, 0 to 1; 0.01 is usual.

    Raises:
        ValueError: shapes differ, or tau is out of range.
    """
    same_shape("polyak", "target", target, source=source)
    within("polyak", "tau", tau, 0.0, 1.0)
    return torch.lerp(target.detach(), source.detach().to(target.dtype), tau)


def _tokens(name: str, mask: Tensor, like: Tensor) -> Tokens:
    """Positions of a batch: each is its own sequence, and their losses are averaged."""
    return Tokens(name, Mask.of(mask, like), {})
