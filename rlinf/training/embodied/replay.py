"""Off-policy learning without the losses: settings, the optimizer, and a replay buffer of transitions in host memory.

Trajectories that say what followed each decision become transitions: rows over one decision or several, of all episodes
or of good ones, in the order of time and then of environment. New rows replace the oldest in a ring. Rows are drawn at
random, where what is drawn follows from a key alone, so that a resumed run draws what it would have drawn.

Pictures (uint8, [R, H, W, channels]) are kept once each, however many transitions show them; the ring holds the numbers
of their slots. They may be shifted at random when they are drawn.

No actor: a buffer's owner calls it from its compute thread.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from rlinf.algos.critic_losses import polyak
from rlinf.data.safetensors_io import write_tensors, write_text
from rlinf.models.policy.base import Stored
from rlinf.training.embodied.trajectories import Trajectory, in_order, joined
from rlinf.training.optimizer import adamw_of_parts


@dataclass(frozen=True, slots=True, kw_only=True)
class OffPolicySettings:
    """Settings of all off-policy learners."""

    lr: float = 3e-4
    """Learning rate of the actor."""
    critic_lr: float | None = None
    """Learning rate of the critics; None takes lr."""
    betas: tuple[float, float] = (0.9, 0.999)
    """Decay of the running means of the gradient and of its square."""
    grad_clip: float = math.inf
    """Gradients of a larger norm are scaled down to it."""
    gamma: float = 0.99
    """Discount of each action."""
    tau: float = 0.005
    """Share of the way that the target critics go with each step."""
    returns: tuple[float, float] | None = None
    """Least and greatest return that the task can give, to which the critics' targets are cut; None leaves them."""
    shift: int = 0
    """Pictures are moved at random by so many pixels at most, in height and width (DrQ)."""

    def __post_init__(self) -> None:
        if self.returns is not None and not self.returns[0] < self.returns[1]:
            raise ValueError(f"off-policy: returns={list(self.returns)} must be the least and the greatest, in order")
        for name in ("gamma", "tau"):
            if not 0.0 <= getattr(self, name) <= 1.0:
                raise ValueError(f"off-policy: {name}={getattr(self, name)} must be between 0 and 1")
        if self.shift < 0:
            raise ValueError(f"off-policy: shift={self.shift} must not be below 0")


@dataclass(frozen=True, slots=True, kw_only=True)
class SacSettings(OffPolicySettings):
    """Settings of soft actor-critic and its relatives."""

    alpha_lr: float | None = None
    """Learning rate of the temperature; None takes lr, and 0 keeps the temperature as it is."""
    alpha: float = 1.0
    """First temperature, reward per nat."""
    target_entropy: float | None = None
    """Entropy at which the temperature keeps the policy, nats; None: minus the numbers in a chunk of actions."""
    subset: int | None = None
    """How many target critics, drawn anew each step, the smallest prediction is taken of, and the actor then follows
    the mean of all critics (REDQ, RLPD); None: all of them, and the actor follows the smallest."""
    backup_entropy: bool = True
    """Count the entropy of what follows as reward in the critics' targets; the actor's loss has its entropy anyway."""
    gripper_penalty: float = 0.0
    """Taken off the reward of the gripper's critics where it is told to close or open, and not to stay."""
    imitation: float = 0.0
    """Weight of the squared distance of the likeliest actions from those of demonstrations and interventions."""

    def __post_init__(self) -> None:
        OffPolicySettings.__post_init__(self)  # super() does not work in a dataclass with slots
        if not self.alpha > 0.0:
            raise ValueError(f"soft actor-critic: alpha={self.alpha} must be more than 0; its logarithm is learned")


@dataclass(frozen=True, slots=True, kw_only=True)
class IqlSettings(OffPolicySettings):
    """Settings of implicit Q-learning."""

    expectile: float = 0.7
    """Which expectile of the data's actions a state is worth, above 0 and below 1: higher is more optimistic."""
    beta: float = 3.0
    """Inverse temperature of the actor's weights, 1 / reward; 0 is behaviour cloning."""

    def __post_init__(self) -> None:
        OffPolicySettings.__post_init__(self)
        if not (0.0 < self.expectile < 1.0 and self.beta >= 0.0):
            raise ValueError(
                f"iql: expectile={self.expectile} must be between 0 and 1, and beta={self.beta} not below 0"
            )


def optimizer_of(
    settings: OffPolicySettings, *parts: tuple[Sequence[nn.Parameter], float | None]
) -> torch.optim.Optimizer:
    """Adam, with a learning rate for each part: parameters, and their rate, or None for `settings.lr`."""
    rates = [(part, settings.lr if rate is None else rate) for part, rate in parts]
    return adamw_of_parts(rates, betas=settings.betas, weight_decay=0.0)


_BLOCK = 1024
"""Pictures whose memory is allocated at a time."""


class PictureStore:
    """Pictures of one shape by content: equal ones share a slot, which is free again when nobody refers to it.

    A transition's last picture is the next one's first, so this halves what a replay buffer holds.

    Args:
        shape: of one picture.

    Attributes:
        shape: the same.
    """

    def __init__(self, shape: torch.Size):
        self.shape = shape
        self._blocks: list[Tensor] = []
        self._slots: dict[bytes, int] = {}
        self._digests: dict[int, bytes] = {}
        self._uses: list[int] = []
        self._free: list[int] = []

    def __len__(self) -> int:
        return len(self._slots)

    def keep(self, pictures: Tensor) -> Tensor:
        """Refer once more to each picture, uint8 [n, *shape]; their slots, int64 [n]."""
        pictures = pictures.cpu().contiguous()
        return torch.tensor([self._keep(picture) for picture in pictures], dtype=torch.int64)

    def release(self, slots: Tensor) -> None:
        """Refer once less to each slot, int64 [n]."""
        for slot in slots.tolist():
            self._uses[slot] -= 1
            if not self._uses[slot]:
                del self._slots[self._digests.pop(slot)]
                self._free.append(slot)

    def look(self, slots: Tensor) -> Tensor:
        """The pictures in slots, int64 [n], as a copy, uint8 [n, *shape]."""
        pictures = torch.empty(len(slots), *self.shape, dtype=torch.uint8)
        blocks = slots // _BLOCK
        for block in blocks.unique().tolist():
            here = blocks == block
            pictures[here] = self._blocks[block][slots[here] % _BLOCK]
        return pictures

    def _keep(self, picture: Tensor) -> int:
        digest = hashlib.blake2b(picture.numpy().data, digest_size=16).digest()
        slot = self._slots.get(digest)
        if slot is None:
            slot = self._free.pop() if self._free else len(self._uses)
            if slot == len(self._uses):
                self._uses.append(0)
                if slot == len(self._blocks) * _BLOCK:
                    self._blocks.append(torch.empty(_BLOCK, *self.shape, dtype=torch.uint8))
            self._blocks[slot // _BLOCK][slot % _BLOCK] = picture
            self._slots[digest], self._digests[slot] = slot, digest
        self._uses[slot] += 1
        return slot


def shifted(pictures: Tensor, by: Tensor) -> Tensor:
    """Pictures moved by some pixels, with their borders repeated: random crops of padded pictures (DrQ,
    arXiv:2004.13649, section 4.1).

    Args:
        pictures: [N, H, W, channels].
        by: pixels down and to the right, int64 [N, 2].

    Returns:
        [N, H, W, channels].
    """
    count, height, width = pictures.shape[:3]
    rows = (torch.arange(height, device=by.device) - by[:, :1]).clamp(0, height - 1)
    columns = (torch.arange(width, device=by.device) - by[:, 1:]).clamp(0, width - 1)
    number = torch.arange(count, device=by.device)
    return pictures[number[:, None, None], rows[:, :, None], columns[:, None, :]]


Rows = dict[str, Tensor]
"""Named tensors with as many rows each."""

_TENSORS, _ABOUT = "replay.safetensors", "replay.json"
_PICTURES, _PLACES = "pictures.", "places."
_TAKEN = 4096
"""Rows that are taken at a time from another buffer."""


class ReplayBuffer:
    """A ring of rows; its memory is allocated with the first of them, that of pictures as they come.

    Args:
        capacity: rows that it holds.

    Attributes:
        added: rows that ever came.
    """

    def __init__(self, capacity: int):
        if capacity < 1:
            raise ValueError(f"replay: capacity={capacity} must be at least 1")
        self.capacity, self.added = capacity, 0
        self._rows: Rows = {}
        self._shapes: dict[str, torch.Size] = {}
        self._stores: dict[str, PictureStore] = {}  # by the name of the rows whose pictures they keep

    def __len__(self) -> int:
        return min(self.added, self.capacity)

    @property
    def pictures(self) -> int:
        """Pictures that are kept."""
        return sum(len(store) for store in set(self._stores.values()))

    def add(self, rows: Mapping[str, Tensor]) -> None:
        """Add rows; row k of all that ever came is at k modulo the capacity.

        Raises:
            ValueError: they have other names or shapes than those before.
        """
        count = len(next(iter(rows.values())))
        if not self._rows:
            self._allocate(rows)
        for name in {*rows, *self._shapes}:
            mine, theirs = self._shapes.get(name), rows.get(name)
            if mine is None or theirs is None or mine != theirs.shape[1:] or len(theirs) != count:
                raise ValueError(
                    f"replay: {name!r} is {None if theirs is None else list(theirs.shape)}, but the buffer has "
                    f"{None if mine is None else list(mine)} in each row; rows must stay alike"
                )
        stored = min(count, self.capacity)
        places = (self.added + torch.arange(count - stored, count)) % self.capacity
        for name, row in rows.items():
            ring, new = self._rows[name], row[count - stored :]
            if (store := self._stores.get(name)) is None:
                ring[places] = new.to("cpu", ring.dtype)
            else:
                slots, old = store.keep(new), ring[places]
                ring[places] = slots
                store.release(old[old >= 0])
        self.added += count

    def draw(self, count: int, *key: int) -> Rows:
        """Rows drawn evenly, with replacement.

        Args:
            count: how many.
            key: what the draw follows from, whole numbers from 0.

        Raises:
            ValueError: the buffer is empty.
        """
        if not self.added:
            raise ValueError("replay: it is empty, so nothing can be drawn")
        indices = torch.from_numpy(np.random.default_rng(key).integers(0, len(self), count))
        return self._looked_at(indices)

    def tensors(self) -> Rows:
        """All that it holds: `rows.NAME` each, as they are and not copied; `counts`, its capacity and `added`; and of
        pictures, which are copied, `pictures.SHAPE` with their places in it, `places.SHAPE.NAME`."""
        state: Rows = {"counts": torch.tensor([self.capacity, self.added])}
        groups: dict[PictureStore, dict[str, Tensor]] = {}
        for name, ring in self._rows.items():
            if (store := self._stores.get(name)) is None:
                state[f"rows.{name}"] = ring[: len(self)]
            else:
                groups.setdefault(store, {})[name] = ring[: len(self)]
        for store, rows in groups.items():
            shape = "x".join(map(str, store.shape))
            slots, places = torch.cat(list(rows.values())).unique(return_inverse=True)
            state[f"{_PICTURES}{shape}"] = store.look(slots)
            parts = places.split(len(self))
            state |= {f"{_PLACES}{shape}.{name}": part.clone() for name, part in zip(rows, parts, strict=True)}
        return state

    def take(self, tensors: Mapping[str, Tensor]) -> None:
        """Replace all rows by those of another buffer's `tensors`. With the same capacity, draws go on as they would
        have."""
        capacity, added = tensors["counts"].tolist()
        there = min(added, capacity)
        ages = torch.arange(added - there, added) % capacity
        self._rows, self._shapes, self._stores, self.added = {}, {}, {}, added - there
        if not there:
            return
        for part in ages.split(_TAKEN):  # not all at once: pictures are apart from each other until they are kept
            rows = {name.removeprefix("rows."): row[part] for name, row in tensors.items() if name.startswith("rows.")}
            for name, places in tensors.items():
                if name.startswith(_PLACES):
                    shape, _, row = name.removeprefix(_PLACES).partition(".")
                    rows[row] = tensors[f"{_PICTURES}{shape}"][places[part]]
            self.add(rows)

    def _allocate(self, rows: Mapping[str, Tensor]) -> None:
        stores: dict[torch.Size, PictureStore] = {}
        for name, row in rows.items():
            shape = self._shapes[name] = row.shape[1:]
            if row.dtype == torch.uint8 and len(shape) == 3:  # height, width, channels
                self._stores[name] = stores.setdefault(shape, PictureStore(shape))
                self._rows[name] = torch.full((self.capacity,), -1)  # no slot yet
            else:
                self._rows[name] = row.new_empty(self.capacity, *shape, device="cpu")

    def _looked_at(self, indices: Tensor) -> Rows:
        rows = {name: ring[indices] for name, ring in self._rows.items()}
        return {name: self._stores[name].look(row) if name in self._stores else row for name, row in rows.items()}

    def write(self, directory: Path) -> None:
        """Write all rows into a directory, which is made if it is not there. Blocking.

        Raises:
            OSError: it cannot be written.
        """
        directory.mkdir(parents=True, exist_ok=True)
        rows = {name.removeprefix("rows."): tensor for name, tensor in self.tensors().items() if name != "counts"}
        write_tensors(directory / _TENSORS, rows)
        write_text(directory / _ABOUT, json.dumps({"capacity": self.capacity, "added": self.added}) + "\n")

    def read(self, directory: Path) -> None:
        """Replace all rows by those that were written. With the same capacity, draws go on as they would have.

        Raises:
            FileNotFoundError: the directory holds none.
        """
        if not (directory / _ABOUT).is_file():
            raise FileNotFoundError(f"{directory} holds no {_ABOUT}: no replay buffer was saved there")
        about = json.loads((directory / _ABOUT).read_text(encoding="utf-8"))
        tensors = {"counts": torch.tensor([about["capacity"], about["added"]])}
        for name, tensor in load_file(directory / _TENSORS).items() if about["added"] else ():
            tensors[name if name.startswith((_PICTURES, _PLACES)) else f"rows.{name}"] = tensor
        self.take(tensors)


def transitions(parts: Sequence[Trajectory], *, n_step: int = 1, solved_only: bool = False) -> tuple[Trajectory, Rows]:
    """Several slices as one, and their transitions, in the order of time and then of environment.

    Args:
        parts: of all slices, in any order, with `following`.
        n_step: decisions that a transition spans, unless its episode or the trajectory ends before.
        solved_only: leave out episodes that were not solved, or did not end in this trajectory.

    Returns:
        All trajectories in one, and for the R chunks of which anything was done: `seen.*`, the policy's inputs; and
        `actions`, in its own terms; `following.*`; `rewards` of each action, 0 where it was not done, float32
        [R, n_step x C]; `steps`, how many were done, int64 [R]; `terminated`, bool [R]; and where somebody can
        intervene `intervened`, bool [R]: they did an action of the first chunk.

    Raises:
        ValueError: there are none, they are of different lengths, or do not say what followed; or nobody says which
            episodes were solved.
    """
    whole = joined(parts)
    if whole.following is None:
        raise ValueError(
            "train: trajectories do not say what followed each decision: spawn the PolicyActor with keep_following=True"
        )
    chunks = whole.chunks
    valid = chunks.valid.bool()
    done = valid.any(-1)
    mask = done & torch.cat([_in_solved(part) for part in in_order(parts)], 1) if solved_only else done
    rows = {f"seen.{name}": stored for name, stored in whole.stored.items() if name != "actions"}
    rows["actions"] = whole.stored["actions"]
    outcome = {f"following.{name}": stored for name, stored in whole.following.items()}
    outcome["rewards"] = torch.where(valid, chunks.rewards, 0.0).float()
    outcome["steps"] = valid.sum(-1)
    outcome["terminated"] = (chunks.terminated.bool() & valid).any(-1)
    ended = ((chunks.terminated | chunks.truncated).bool() & valid).any(-1)
    rows |= several_steps(outcome, ended | ~done, n_step)
    if whole.intervened is not None:
        rows["intervened"] = (whole.intervened & valid).any(-1)
    return whole, {name: tensor[mask] for name, tensor in rows.items()}


def several_steps(outcome: Rows, last: Tensor, count: int) -> Rows:
    """Outcome of several decisions in a row, for every decision that they begin with.

        R_t = sum over k < n of gamma^(steps before k) r_(t + k), then bootstrapped with what followed the n-th

    (arXiv:1710.02298, section 3.) A chunk that is not the last of its episode is done whole, so rewards in a row are in
    the places that their discounts follow from.

    Args:
        outcome: `rewards` [T, N, C], `steps` and `terminated` [T, N], and `following.*` [T, N, ...].
        last: nothing of the same episode follows, bool [T, N].
        count: decisions, n; fewer where an episode or the trajectory ends before.

    Returns:
        The same names; `rewards` [T, N, n x C].
    """
    if count == 1:
        return outcome
    times, environments = last.shape
    at = torch.arange(times)[:, None].expand(times, environments).clone()  # the decision that is taken in next
    alive = torch.ones_like(last)
    end, column = at.clone(), torch.arange(environments).expand(times, environments)
    rewards, steps = [], torch.zeros_like(outcome["steps"])
    for _ in range(count):
        here = at.clamp(max=times - 1)
        rewards.append(torch.where(alive[..., None], outcome["rewards"][here, column], 0.0))
        steps += torch.where(alive, outcome["steps"][here, column], 0)
        end = torch.where(alive, here, end)
        alive = alive & ~last[here, column] & (at + 1 < times)
        at = at + 1
    result = {name: rows[end, column] for name, rows in outcome.items()}
    return {**result, "rewards": torch.cat(rewards, -1), "steps": steps}


def _in_solved(part: Trajectory) -> Tensor:
    """Mask of the decisions that belong to episodes that ended here and were solved, bool [T, N]."""
    ended = ((part.chunks.terminated | part.chunks.truncated) & part.chunks.valid).bool().any(-1)
    solved: dict[int, list[bool]] = defaultdict(list)
    for episode in part.episodes:  # in each environment in the order of time
        if episode.success_once is None:
            raise ValueError("train: only solved episodes are to be kept, and the simulator does not say which are")
        solved[episode.env - part.first].append(episode.success_once)
    number = ended.long().cumsum(0) - ended.long()  # episodes that ended before
    mask = torch.zeros_like(ended)
    for env, outcomes in solved.items():
        solved_by_end = torch.tensor([*outcomes, False])  # the last one goes on
        mask[:, env] = solved_by_end[number[:, env].clamp(max=len(outcomes))]
    return mask


def inputs_of(rows: Rows, prefix: str) -> Stored:
    """The policy's inputs in transitions, "seen." or "following."."""
    return {name.removeprefix(prefix): row for name, row in rows.items() if name.startswith(prefix)}


def rewards_of(rows: Rows, gamma: float) -> Tensor:
    """Discounted reward of each transition, sum of gamma^i r_i, [B]."""
    rewards = rows["rewards"]
    return (rewards * gamma ** torch.arange(rewards.shape[1], device=rewards.device)).sum(1)


def shifts(batch: Rows, most: int, generator: torch.Generator) -> Rows:
    """The batch with its pictures moved at random by at most so many pixels, each by itself; see `shifted`."""
    if not most:
        return batch
    moved = dict(batch)
    for name, rows in batch.items():
        if rows.dtype == torch.uint8 and rows.ndim == 4:  # height, width, channels
            moved[name] = shifted(rows, torch.randint(-most, most + 1, (len(rows), 2), generator=generator))
    return moved


@torch.no_grad()
def follow(target: nn.Module, source: nn.Module, tau: float) -> None:
    """Move a target network that share of the way towards its source."""
    for mine, theirs in zip(target.parameters(), source.parameters(), strict=True):
        mine.copy_(polyak(mine, theirs, tau=tau))
