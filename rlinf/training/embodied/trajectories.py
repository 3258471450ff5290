"""Trajectories of a policy in environments, and the training batches that are made of them.

The actor of the policy puts one `Trajectory` together per slice of environments and step; `joined` makes one of all
slices. From a step's trajectories comes a `TrajectoryBatch`, laid out decision by decision with advantages by the
algorithm, of which trainers take minibatches, and metrics; or `replay.py` makes rows of a replay buffer of them.

`RewardScale` divides rewards by the running standard deviation of discounted returns. Every rank sees all trajectories,
so that all have the same scale.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from rlinf.algos.algorithms import AlgorithmSpec, Decoupled, Gae, GroupRelative
from rlinf.algos.chunk_advantages import (
    ChunkAdvantages,
    Chunks,
    advantages_of_chunks,
    episode_ids,
    group_advantages,
    rows,
)
from rlinf.envs.environment import Episode
from rlinf.models.policy.actor_critic import RunningNorm
from rlinf.models.policy.base import BROKEN, Stored


@dataclass(frozen=True, slots=True, eq=False)
class Trajectory:
    """T decisions for each of N environments, in order of time."""

    __plain__: ClassVar[bool] = True  # holds no promise: the runtime need not look for one in its arrays

    chunks: Chunks
    """Rewards, ends and values, [T, N, C]; episodes that were lost are not valid in it."""
    stored: Stored
    """All that log-probs depend on, [T, N, ...]."""
    logprobs: Tensor
    """Log-probs of the drawn actions, at the policy's level, nats: [T, N], [T, N, C] or [T, N, C, A]."""
    success: Tensor | None
    """True where the first episode that ended here was solved at some time, bool [N]; None if nobody says."""
    episodes: tuple[Episode, ...]
    """Those that ended."""
    lost: int
    """Episodes that died with their simulator."""
    first: int
    """Number of the first environment among those of its actor."""
    rank: int
    """Rank of the actor of the environments."""
    version: int
    """Version of the weights that decided."""
    following: Stored | None = None
    """The policy's inputs after each chunk, [T, N, ...]: where a chunk ended an episode, of the last observation of
    that episode, not of the first of the next. None where learning does not need them."""
    actions: Tensor | None = None
    """The chunks as environments got them, in [-1, 1], float32 [T, N, C, A]; with `following`, otherwise None."""
    intervened: Tensor | None = None
    """True where somebody else acted, whose actions are `stored` then, bool [T, N, C]; None where nobody can."""
    proposed: Tensor | None = None
    """The policy's own "actions" of `stored`, [T, N, ...]; None where nobody can intervene."""


def in_order(parts: Sequence[Trajectory]) -> list[Trajectory]:
    """Slices by actor and environment, whatever order they came in."""
    return sorted(parts, key=lambda part: (part.rank, part.first))


def joined(parts: Sequence[Trajectory]) -> Trajectory:
    """Several slices as one, in the order of actor and environment, whatever order they came in.

    Raises:
        ValueError: there are none, or they are of different lengths.
    """
    if not parts:
        raise ValueError("train: not one trajectory came")
    parts = in_order(parts)
    lengths = [part.logprobs.shape[0] for part in parts]
    if len(set(lengths)) > 1:
        raise ValueError(f"train: trajectories have {lengths} decisions; let all slices act equally often")
    if len(parts) == 1:
        return parts[0]
    chunks = [part.chunks for part in parts]
    return Trajectory(
        chunks=Chunks(**{name.name: _joined(chunks, name.name) for name in fields(Chunks)}),
        stored=_joined(parts, "stored"),
        logprobs=_joined(parts, "logprobs"),
        success=_joined(parts, "success"),
        episodes=tuple(episode for part in parts for episode in part.episodes),
        lost=sum(part.lost for part in parts),
        first=parts[0].first,
        rank=parts[0].rank,
        version=min(part.version for part in parts),
        following=_joined(parts, "following"),
        actions=_joined(parts, "actions"),
        **_interventions(parts),
    )


def _interventions(parts: Sequence[Trajectory]) -> dict[str, Any]:
    """`intervened` and `proposed` of several slices; nobody intervened in those that have none beside others."""
    if all(part.intervened is None for part in parts):
        return {}
    filled = [
        part
        if part.intervened is not None
        else replace(part, intervened=torch.zeros_like(part.chunks.valid.bool()), proposed=part.stored["actions"])
        for part in parts
    ]
    return {name: _joined(filled, name) for name in ("intervened", "proposed")}


def intervened_in(trajectory: Trajectory) -> dict[str, float]:
    """Metrics of interventions: `interventions/share` of the steps, and `interventions/episodes`, the share of the
    episodes that ended in which there was one; none where nobody can intervene."""
    if trajectory.intervened is None:
        return {}
    valid, count = trajectory.chunks.valid.bool(), len(trajectory.episodes)
    metrics = {"interventions/share": float((trajectory.intervened & valid).sum()) / max(float(valid.sum()), 1.0)}
    if count:
        metrics["interventions/episodes"] = sum(episode.intervened > 0 for episode in trajectory.episodes) / count
    return metrics


def _joined(parts: Sequence[Any], name: str) -> Any:
    """A field of all parts along the environments; None if one part has none."""

    def along(tensors: Sequence[Any]) -> Any:
        if isinstance(tensors[0], dict):
            return {key: along([tensor[key] for tensor in tensors]) for key in tensors[0]}
        return torch.cat(list(tensors), 0 if tensors[0].ndim == 1 else 1)  # [N], else [T, N, ...]

    columns = [getattr(part, name) for part in parts]
    return None if any(each is None for each in columns) else along(columns)


@dataclass(frozen=True, slots=True, eq=False)
class TrajectoryBatch:
    """D decisions to learn from, whichever environments and times they are from; or D sequences of L decisions in a row
    of one environment each, where the policy has a memory."""

    stored: Stored
    """Inputs of the policy's `evaluate`, D rows; of sequences [D, L, ...]."""
    logprobs: Tensor
    """Under the policy that acted, nats, [D, tokens]; a token is what has a log-prob of its own. Those of a sequence
    come one decision after the other."""
    advantages: Tensor
    """[D, tokens]"""
    mask: Tensor
    """Which tokens count, bool [D, tokens]."""
    sequences: Tensor | None
    """Episode of each token, for losses that average over episodes, [D, tokens]."""
    values: Tensor | None
    """The critic's predictions at acting, [D, values]; None without one."""
    returns: Tensor | None
    """Its targets, [D, values]."""
    value_mask: Tensor | None
    """Which values count, bool [D, values]."""

    def __len__(self) -> int:
        return len(self.mask)

    def rows(self, indices: Tensor | slice) -> TrajectoryBatch:
        """Some of the decisions.

        Args:
            indices: which, int64 [d]; neighbours, as a slice, are not copied.
        """
        return self._each(lambda tensor: tensor[indices])

    def to(self, device: torch.device) -> TrajectoryBatch:
        """These decisions on another device."""
        return self if self.mask.device == device else self._each(lambda tensor: tensor.to(device))

    @property
    def nbytes(self) -> int:
        """Memory of all rows, bytes."""
        rest = [getattr(self, name) for name in self.__slots__[1:]]
        return sum(tensor.nbytes for tensor in (*self.stored.values(), *rest) if tensor is not None)

    def silent(self) -> TrajectoryBatch:
        """These decisions with empty masks: none counts."""
        value_mask = None if self.value_mask is None else torch.zeros_like(self.value_mask)
        return replace(self, mask=torch.zeros_like(self.mask), value_mask=value_mask)

    def _each(self, change: Callable[[Tensor], Tensor]) -> TrajectoryBatch:
        columns: dict[str, Any] = {"stored": {name: change(tensor) for name, tensor in self.stored.items()}}
        for name in self.__slots__[1:]:
            tensor = getattr(self, name)
            columns[name] = None if tensor is None else change(tensor)
        return TrajectoryBatch(**columns)


def check(spec: AlgorithmSpec, *, has_critic: bool, group_size: int, sequence: int = 1) -> None:
    """Check that an algorithm can learn from actions.

    Raises:
        ValueError: it cannot, or the policy or the environments are not as it needs them.
    """
    where = f"algorithm {spec.name!r}"
    if not isinstance(spec.advantage, Gae | GroupRelative):
        raise ValueError(f"{where}: for actions there are the advantages gae and group_relative: take ppo or grpo")
    if isinstance(spec.advantage, Gae) and not has_critic:
        raise ValueError(f"{where} needs a critic: let policy.settings.value_level be action or chunk")
    if isinstance(spec.advantage, GroupRelative) and group_size < 2:
        raise ValueError(f"{where} compares episodes that began alike: set env.group_size to at least 2")
    if sequence > 1 and spec.aggregation.how != "token-mean":
        raise ValueError(
            f"{where}: a policy with a memory learns from sequences, which may be of several episodes each, so that no "
            f"mean over episodes can be taken: let aggregation.how be token-mean, or policy.settings.sequence 1"
        )
    unusable: dict[str, object] = {
        "kl": spec.kl,
        "correction": spec.correction,
        "shaping": spec.shaping,
        "sampling": spec.sampling,
        "a loss against a proximal policy": spec.loss if isinstance(spec.loss, Decoupled) else None,
    }
    for name, part in unusable.items():
        if part is not None:
            raise ValueError(f"{where}: {name} is for text; take a recipe without it, such as ppo or grpo")


@dataclass(frozen=True, slots=True)
class GroupFilter:
    """Which groups of episodes are learned from, besides those that were all solved, or not one, which never are."""

    returns: tuple[float, float] | None = None
    """Bounds of the mean return."""
    success: tuple[float, float] | None = None
    """Bounds of the share that solved the task."""


def batch_of(
    trajectory: Trajectory,
    spec: AlgorithmSpec,
    group_size: int,
    sequence: int = 1,
    groups: GroupFilter | None = None,
) -> TrajectoryBatch:
    """The decisions of a step's trajectories, with the advantages that an algorithm gives them.

    Args:
        trajectory: of all environments.
        spec: the algorithm, which passed `check`.
        group_size: neighbouring environments that began their episodes alike.
        sequence: decisions in a row that are one row of the batch, L.
        groups: which of them are learned from; None for no bounds.

    Raises:
        ValueError: the decisions of an environment cannot be divided into such sequences.
    """
    trajectory = _without_nan(trajectory)
    chunks = trajectory.chunks
    if trajectory.intervened is not None and bool(trajectory.intervened.any()):
        raise ValueError(
            f"train: somebody else acted in {int(trajectory.intervened.sum())} steps, and {spec.name} learns from the "
            "policy's own actions alone: let algorithm be sac, crossq, iql or dagger, or let nobody intervene"
        )
    if chunks.rewards.shape[0] % sequence:
        raise ValueError(
            f"train: {chunks.rewards.shape[0]} decisions of an environment are no multiple of policy.settings.sequence="
            f"{sequence}: choose policy.horizon so that they are"
        )
    advantages = _advantages(trajectory, spec, group_size, groups or GroupFilter())
    episodes = episode_ids(chunks.ended) if spec.aggregation.how != "token-mean" else None
    laid = rows(advantages.values, trajectory.logprobs, advantages.mask, episodes)
    if trajectory.logprobs.ndim > 2:  # one advantage for a whole chunk is none for its actions behind an end
        laid["mask"] = laid["mask"] & rows(chunks.rewards, trajectory.logprobs, chunks.valid)["mask"]

    def in_rows(tensor: Tensor) -> Tensor:
        """[T, N, ...] by decision, or by sequence of them."""
        if sequence == 1:
            return tensor.flatten(0, 1)
        return tensor.unflatten(0, (-1, sequence)).transpose(1, 2).flatten(0, 1)

    def tokens(name: str) -> Tensor:
        return in_rows(laid[name].unflatten(0, chunks.rewards.shape[:2])).flatten(1)

    def flat(tensor: Tensor | None) -> Tensor | None:
        if tensor is None or advantages.returns is None:
            return None
        rows = in_rows(tensor)
        return rows.reshape(len(rows), -1)

    return TrajectoryBatch(
        stored={name: in_rows(tensor) for name, tensor in trajectory.stored.items()},
        logprobs=tokens("logprobs"),
        advantages=tokens("advantages"),
        mask=tokens("mask"),
        sequences=tokens("sequences") if "sequences" in laid else None,
        values=flat(chunks.values),
        returns=flat(advantages.returns),
        value_mask=flat(advantages.mask),
    )


def metrics_of(parts: Sequence[Trajectory], trajectory: Trajectory, batch: TrajectoryBatch) -> dict[str, float]:
    """Metrics of a step's trajectories.

    Args:
        parts: of each slice.
        trajectory: those joined.
        batch: what is learned from it.
    """
    chunks = trajectory.chunks
    valid = chunks.valid.bool()
    steps = float(valid.sum())
    judged = [episode for part in in_order(parts) for episode in counted(part)]
    return {
        "env_steps": steps,
        "decisions": float(valid.any(-1).sum()),
        "reward/step": float(torch.where(valid, chunks.rewards, 0.0).sum()) / max(steps, 1.0),
        "episodes/lost": float(trajectory.lost),
        "learned_from": float(batch.mask.float().mean()),
        **broken_share(trajectory),
        **summary(judged),
        **summary_by_task(judged),
    }


def broken_share(trajectory: Trajectory) -> dict[str, float]:
    """`actions/broken`, the share of decisions that say no chunk as they should; none where nobody says."""
    broken, done = trajectory.stored.get(BROKEN), trajectory.chunks.valid.any(-1)
    return {} if broken is None else {"actions/broken": float((broken & done).sum()) / max(float(done.sum()), 1.0)}


def robot_times(episodes: Sequence[Episode]) -> dict[str, float]:
    """Metrics of when a robot's steps were decided and done, `robot/*`: means over episodes, but for the greatest
    `age_max` and the sum of `holds`; none where nobody says."""
    times = [episode.times for episode in episodes if episode.times is not None]
    if not times:
        return {}
    means = {f"robot/{name}": sum(each[name] for each in times) / len(times) for name in times[0]}
    holds = sum(each["holds"] for each in times)
    return {**means, "robot/age_max": max(each["age_max"] for each in times), "robot/holds": holds}


def ages_of(parts: Sequence[Trajectory], version: int) -> dict[str, float]:
    """By how many versions the weights that decided were older than those that learn: mean over slices, and the most.

    Args:
        parts: of each slice.
        version: of the weights that learn, before the update.
    """
    ages = [version - part.version for part in parts]
    return {"staleness/mean": sum(ages) / len(ages), "staleness/max": float(max(ages))}


def counted(trajectory: Trajectory) -> tuple[Episode, ...]:
    """The episodes by which a policy is judged, of those that ended in a slice.

    Where all environments begin new episodes with the step, an early success leaves time for a second episode, which is
    then counted only if it ends in time too: that is, if it is short. So only the first of each environment counts.
    Where episodes go on from step to step all of them count: none is left out for being long.
    """
    chunks, firsts = trajectory.chunks, dict[int, Episode]()
    for episode in trajectory.episodes:
        firsts.setdefault(episode.env - trajectory.first, episode)
    over = (chunks.terminated | chunks.truncated).any(-1)
    behind = over.cumsum(0) - over.long()  # episodes that ended before, int64 [T, N]
    done = (chunks.valid.bool().sum(-1) * (behind == 0)).sum(0).tolist()  # steps until the first one ended
    whole = all(done[env] == episode.length for env, episode in firsts.items())
    return tuple(firsts.values()) if whole else trajectory.episodes


def summary(episodes: Sequence[Episode]) -> dict[str, float]:
    """How finished episodes went: `episodes`, their mean `return`, `length`, and, where the simulator says,
    `success_once` and `success_at_end`, and `robot_times`; only the count where there are none."""
    metrics: dict[str, float] = {"episodes": float(len(episodes))}
    if not episodes:
        return metrics
    count = len(episodes)
    metrics["reward/mean"] = sum(episode.total for episode in episodes) / count
    metrics["episodes/length"] = sum(episode.length for episode in episodes) / count
    for name in ("success_once", "success_at_end"):
        values = Counter(getattr(episode, name) for episode in episodes)
        if None not in values:
            metrics[name] = values[True] / count
    return metrics | robot_times(episodes)


def by_task(episodes: Sequence[Episode]) -> dict[str, tuple[Episode, ...]]:
    """The episodes of each task by its name, in the order of names; none where there are no two tasks."""
    by_name: dict[str, list[Episode]] = defaultdict(list)
    for episode in episodes:
        if episode.task is not None:
            by_name[episode.task].append(episode)
    return {name: tuple(by_name[name]) for name in sorted(by_name)} if len(by_name) > 1 else {}


def summary_by_task(episodes: Sequence[Episode]) -> dict[str, float]:
    """`tasks/NAME/…` of each task: its `episodes`, and their `success_once` and `reward/mean`."""
    names = ("episodes", "success_once", "reward/mean")
    parts = {name: summary(episodes_of_task) for name, episodes_of_task in by_task(episodes).items()}
    return {f"tasks/{name}/{what}": part[what] for name, part in parts.items() for what in names if what in part}


def _without_nan(trajectory: Trajectory) -> Trajectory:
    """Zeros in the place of decisions of dropped episodes that are not finite: a mask does not keep NaN from spreading
    in a gradient."""
    if bool(torch.isfinite(trajectory.logprobs.sum())):
        return trajectory
    acted = trajectory.chunks.valid.bool().any(-1)  # [T, N]

    def cleared(tensor: Tensor) -> Tensor:
        return torch.where(acted.reshape(*acted.shape, *[1] * (tensor.ndim - 2)), tensor, torch.zeros_like(tensor))

    chunks, values = trajectory.chunks, trajectory.chunks.values
    return replace(
        trajectory,
        stored={name: cleared(tensor) for name, tensor in trajectory.stored.items()},
        logprobs=cleared(trajectory.logprobs),
        chunks=replace(chunks, values=None if values is None else cleared(values)),
    )


def _advantages(trajectory: Trajectory, spec: AlgorithmSpec, group_size: int, bounds: GroupFilter) -> ChunkAdvantages:
    part = spec.advantage
    if isinstance(part, Gae):
        return advantages_of_chunks(trajectory.chunks, gamma=part.gamma, lam=part.lam, whiten=part.whiten)
    assert isinstance(part, GroupRelative)
    groups = torch.arange(trajectory.logprobs.shape[1]) // group_size
    level: Literal["action", "chunk"] = "action" if trajectory.logprobs.ndim > 2 else "chunk"
    success = trajectory.success if trajectory.episodes else None  # nobody says it before an episode has ended
    within = {"returns_within": bounds.returns, "success_within": bounds.success}
    return group_advantages(trajectory.chunks, groups, success=success, scale=part.scale, level=level, **within)


_LEAST_VARIANCE = 1e-8  # of returns that differ by rounding alone


class RewardScale:
    """Divides rewards by a running standard deviation, and leaves their sign and their 0 where they are.

        R_t = gamma R_{t-1} + r_t        of each episode from its beginning on        r_t / sqrt(Var(R))

    (Engstrom et al., arXiv:2005.12729, section 3: reward scaling.) The variance is over all decisions up to and with
    the step that is scaled. A decision's reward is the sum over its chunk, and gamma is per decision.

    Args:
        gamma: discount.
        goes_on: environments go on with their episodes from one step to the next.
    """

    def __init__(self, gamma: float, *, goes_on: bool):
        self._gamma, self._goes_on = gamma, goes_on
        self._seen = RunningNorm(1)
        self._returns: torch.Tensor | None = None

    def scaled(self, chunks: Chunks) -> Chunks:
        """Return the chunks with scaled rewards; their returns are taken into the variance first."""
        valid = chunks.valid.bool()
        rewards = torch.where(valid, chunks.rewards, 0.0).double().sum(-1)
        ended, there = chunks.ended.any(-1), valid.any(-1)
        running = self._returns if self._goes_on else None
        running = torch.zeros_like(rewards[0]) if running is None else running
        if len(running) != rewards.shape[1]:
            raise ValueError(f"rewards are of {rewards.shape[1]} environments, and were of {len(running)} before")
        returns = torch.empty_like(rewards)
        for time, reward in enumerate(rewards):
            returns[time] = running = torch.where(there[time], self._gamma * running + reward, 0.0)
            running = torch.where(ended[time], 0.0, running)
        self._returns = running
        self._seen.update(returns.reshape(-1, 1), there.reshape(-1))
        return replace(chunks, rewards=(chunks.rewards / self.deviation).to(chunks.rewards.dtype))

    @property
    def deviation(self) -> float:
        """Divisor of rewards; 1 as long as all returns are alike."""
        variance = float(self._seen.variance)
        return math.sqrt(variance) if variance > _LEAST_VARIANCE else 1.0

    def state(self) -> dict[str, Any]:
        """All that the next scales depend on, as JSON values."""
        numbers = {name: buffer.tolist() for name, buffer in self._seen.named_buffers()}
        return {**numbers, "returns": None if self._returns is None else self._returns.tolist()}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on from what `state` said."""
        for name, buffer in self._seen.named_buffers():
            buffer.copy_(torch.tensor(state[name], dtype=torch.float64))
        returns = state["returns"]
        self._returns = None if returns is None else torch.tensor(returns, dtype=torch.float64)
