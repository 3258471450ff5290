"""The policy that acts: decides what environments do, and keeps what came of it until the trainer asks.

Consumes what a slice of environments shows, produces its next actions; unblocked by the compute thread. Everything that
happens to a slice passes here, so the trajectory is put together here, and observations need not travel twice. New
weights arrive through `load`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rlinf.actors.base.model_actor import ModelActor
from rlinf.algos.chunk_advantages import Chunks, without_lost
from rlinf.data.weights import Weights, misfits
from rlinf.envs.episodes import Chunk, Episode
from rlinf.envs.observations import placed
from rlinf.models.policy.base import Act, Policy
from rlinf.models.policy.build import build_policy_model, load_policy
from rlinf.runtime.actor.actor import endpoint
from rlinf.training.embodied.trajectory import Seen, Trajectory
from rlinf.training.embodied.transitions import Experience
from rlinf.weights.receive import Receiver
from rlinf.weights.state_tensors import held

Key = tuple[int, int]
"""Which slice: rank of the simulation, number of the slice."""


@dataclass(slots=True, eq=False)
class _Diary:
    """What happened to a slice since its trajectory began."""

    acts: list[Act] = field(default_factory=list)
    chunks: list[Chunk] = field(default_factory=list)
    finals: list[Tensor | None] = field(default_factory=list)
    """Values of the last observations of episodes that were cut, [N], elsewhere 0; None without a critic."""


class PolicyActor(ModelActor, Receiver):
    """Acts with a whole policy on each rank."""

    async def setup(  # type: ignore[override]
        self, *, policy: Mapping[str, Any], path: str | None = None
    ) -> None:
        """Make the policy.

        Args:
            policy: its configuration, see `models.policy.build`.
            path: directory of a saved one that is taken instead.

        Raises:
            ValueError: no such policy or key.
            FileNotFoundError: the directory holds no policy.
        """
        self._policy: Policy = await self.compute(made, policy, path, self.device)
        self._diaries: dict[Key, _Diary] = {}
        self._version = 0

    @endpoint(device=True)
    async def act(self, key: Key, seen: Seen, *, greedy: bool = False, keep: bool = True) -> Tensor:
        """Decide what the environments of a slice do next.

        Args:
            key: which slice.
            seen: what it shows, and what its last actions did.
            greedy: take the likeliest actions instead of drawing.
            keep: for the trajectory; calls for one slice must come in the order of time then.

        Returns:
            Chunks of actions in [-1, 1], float32 [N, C, A].
        """
        return await self.on_model(self._act, key, seen, greedy, keep)

    @endpoint(device=True)
    async def trajectory(self, key: Key, seen: Seen) -> Trajectory:
        """What happened to a slice since this was last asked.

        Args:
            key: which slice.
            seen: what it shows now: the values of what is to come are said of it.

        Raises:
            ValueError: nothing was decided for it.
        """
        return await self.on_model(self._told, key, seen)

    @endpoint
    async def version(self) -> int:
        """Version of the weights in use."""
        return self._version

    async def check_weights(self, weights: Weights) -> None:
        own = {name: tuple(tensor.shape) for name, tensor in self._policy.state_dict().items()}
        if problems := misfits(own, weights.shapes):
            raise ValueError(f"published weights are not those of this policy: {problems}")

    async def switch_weights(self, weights: Weights) -> None:
        await self.on_model(self._policy.load_state_dict, dict(weights.named()))
        self._version = weights.version

    def _held(self) -> Iterable[Tensor]:
        return held(self._policy)

    def _park(self) -> None:
        for diary in self._diaries.values():  # these stay in host memory: trajectories are put together there
            diary.acts = [_on_host(act) for act in diary.acts]
        super()._park()

    @torch.no_grad()
    def _act(self, key: Key, seen: Seen, greedy: bool, keep: bool) -> Tensor:
        if keep and seen.chunk is not None:
            self._note(key, seen.chunk)
        elif keep:  # a step begins; what an earlier one left, which was given up half way, belongs to nobody
            self._diaries.pop(key, None)
        observation = {name: array.to(self.device) for name, array in seen.observation.items()}
        act = self._policy.act(observation, instructions=seen.instructions, generator=seen.seeds, greedy=greedy)
        if keep:
            self._diaries.setdefault(key, _Diary()).acts.append(act)
        return act.actions.cpu()

    def _note(self, key: Key, chunk: Chunk) -> None:
        """Enter what the last actions of a slice did."""
        diary = self._diaries.get(key)
        if diary is None:  # done by actions before the trajectory began
            return
        diary.chunks.append(chunk)
        final = torch.zeros(len(chunk.running)) if self._values else None
        if final is not None and len(chunk.ended) and len(cut := chunk.cut):
            observation = {name: array[cut].to(self.device) for name, array in chunk.final.items()}
            # the words of the episode that is over are those of the one that follows, in all simulators so far
            words = chunk.instructions
            instructions = None if words is None else [words[env] for env in chunk.ended[cut].tolist()]
            final[chunk.ended[cut]] = self._policy.value(observation, instructions).float().cpu()
        diary.finals.append(final)

    @property
    def _values(self) -> bool:
        return self._policy.config.value_level is not None

    @torch.no_grad()
    def _told(self, key: Key, seen: Seen) -> Trajectory:
        if seen.chunk is not None:
            self._note(key, seen.chunk)
        diary = self._diaries.pop(key, None)
        if diary is None or not diary.chunks:
            raise ValueError(f"policy: nothing was done in slice {key[1]} of simulation {key[0]} yet")
        following = None
        if self._values:
            observation = {name: array.to(self.device) for name, array in seen.observation.items()}
            following = self._policy.value(observation, seen.instructions).float().cpu()
        return _trajectory(key[0], diary, seen, following, self._version)


def _trajectory(rank: int, diary: _Diary, seen: Seen, following: Tensor | None, version: int) -> Trajectory:
    acts, chunks = diary.acts, diary.chunks

    def rows(name: str) -> Tensor:
        return torch.stack([getattr(chunk, name) for chunk in chunks]).cpu()

    terminated, truncated, lost = rows("terminated"), rows("truncated"), rows("lost")
    known = [act.values for act in acts if act.values is not None]
    finals = [final for final in diary.finals if final is not None]
    episodes = tuple(episode for chunk in chunks for episode in chunk.episodes)
    return Trajectory(
        chunks=Chunks(
            rewards=rows("rewards"),
            terminated=terminated,
            truncated=truncated,
            valid=without_lost(rows("valid"), terminated | truncated, lost),
            values=_stacked(known).float() if known else None,
            next_values=following,
            final_values=torch.stack(finals) if finals else None,
        ),
        stored={name: _stacked([act.stored[name] for act in acts]) for name in acts[0].stored},
        logprobs=_stacked([act.logprobs for act in acts]).float(),
        success=_first_successes(episodes, seen.first, terminated.shape[1]),
        episodes=episodes,
        lost=int(lost.sum()),
        first=seen.first,
        rank=rank,
        version=version,
    )


def _stacked(rows: Sequence[Tensor]) -> Tensor:
    """Rows on the host, of which some may have been there already."""
    alike = len({row.device for row in rows}) == 1
    return torch.stack(list(rows)).cpu() if alike else torch.stack([row.cpu() for row in rows])


def _on_host(act: Act) -> Act:
    return replace(
        act,
        logprobs=act.logprobs.cpu(),
        values=None if act.values is None else act.values.cpu(),
        stored={name: rows.cpu() for name, rows in act.stored.items()},
    )


def _first_successes(episodes: tuple[Episode, ...], first: int, count: int) -> Tensor | None:
    """Whether the first episode that ended in each environment was solved, bool [N]; one that did not end was not."""
    if any(episode.success_once is None for episode in episodes):
        return None
    found = torch.zeros(count, dtype=torch.bool)
    seen: set[int] = set()
    for episode in episodes:
        if episode.env not in seen:
            seen.add(episode.env)
            found[episode.env - first] = bool(episode.success_once)
    return found


def made(policy: Mapping[str, Any], path: str | None, device: torch.device) -> Policy:
    """A policy from its configuration, or from a directory if there is one, on a device. Blocking."""
    found = build_policy_model(policy) if path is None else load_policy(Path(path).expanduser())
    return found.to(device)


class OffPolicyDecider(PolicyActor):
    """Acts, and tells what followed each chunk too."""

    @torch.no_grad()
    def _told(self, key: Key, seen: Seen) -> Experience:
        diary = self._diaries.get(key)
        trajectory = super()._told(key, seen)  # enters the last chunk, and ends the diary
        assert diary is not None
        after = []
        for chunk in diary.chunks:
            observation = placed(chunk.observation, chunk.ended, chunk.final)
            # the words of the episode that is over are those of the one that follows, in all simulators so far
            after.append(self._policy.inputs(observation, chunk.instructions))
        told = {field.name: getattr(trajectory, field.name) for field in fields(Trajectory)}
        return Experience(
            **told, following={name: torch.stack([each[name] for each in after]).cpu() for name in after[0]}
        )
