"""The policy that acts: decides on actions for environments, and collects trajectories until the trainer asks for them.

Consumes what a slice of environments shows, produces its next actions; unblocked by the compute thread, which small
policies do without; or, where a small policy and its simulators lie in one process, by nothing: `live` acts for a whole
step there. Everything that happens to a slice passes here, so its trajectory is put together here, and
observations need not travel twice. New weights arrive through `load`. `Scripted` acts without weights: by a function of
what is observed, in the place of a policy. `DaggerPolicy` asks an expert about everything that it observes, or
acts greedily until somebody intervenes.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rlinf.actors.base import ModelActor
from rlinf.actors.env import EnvActor
from rlinf.algos.chunk_advantages import Chunks, without_lost
from rlinf.config.importing import resolve
from rlinf.data.rng import uniforms
from rlinf.data.weights import Weights, misfits
from rlinf.envs.base import Interventions
from rlinf.envs.environment import Chunk, Decision, EnvOutput, Episode
from rlinf.envs.workers import at_once
from rlinf.models.policy.base import Act, Greedy, Policy, Stored
from rlinf.models.policy.build import load_policy, make_policy
from rlinf.runtime.actor.actor import Actor, endpoint
from rlinf.training.checkpoint import held
from rlinf.training.embodied.ppo import Preparation, origin_of
from rlinf.training.embodied.trajectories import Trajectory
from rlinf.training.weight_sync import Receiver


class Scripted(Actor):
    """Answers `act` as a `PolicyActor` does, by a function."""

    async def setup(self, *, function: str) -> None:  # type: ignore[override]
        """Import the function.

        Args:
            function: dotted path; called with the observation (arrays of N rows by name) and the instructions (N texts,
                or None), it gives actions in [-1, 1], float32 [N, C, A] or [N, A].
        """
        self._name, self._function = function, resolve(function)

    @endpoint
    async def act(self, key: Any, output: EnvOutput, *, greedy: Greedy = False, keep: bool = True) -> Tensor:
        """Decide what to do.

        Args:
            key: of the slice; not looked at.
            output: what it shows.
            greedy, keep: as for a policy; not looked at.

        Raises:
            ValueError: what the function gave are no actions of so many environments.
        """
        count = len(next(iter(output.observation.values())))
        actions = await self.compute(self._function, output.observation, output.instructions)
        if isinstance(actions, np.ndarray):
            actions = torch.from_numpy(actions)
        if not isinstance(actions, Tensor) or actions.ndim not in (2, 3) or len(actions) != count:
            text = f"{list(actions.shape)}" if isinstance(actions, Tensor) else f"{actions!r:.60}"
            raise ValueError(
                f"{self._name} gave {text}: actions of {count} environments are a tensor or an array [{count}, C, A]"
            )
        return (actions if actions.ndim == 3 else actions[:, None]).float()


Key = tuple[int, int]
"""Which slice: rank of the environments' actor, number of the slice."""


@dataclass(slots=True, eq=False)
class _History:
    """Everything that happened in a slice since its trajectory began."""

    acts: list[Act] = field(default_factory=list)
    chunks: list[Chunk] = field(default_factory=list)
    finals: dict[int, Tensor] = field(default_factory=dict)
    """By the number of a chunk in which episodes were cut, the critic's values of their last observations, [N],
    elsewhere 0."""
    proposed: dict[int, Tensor] = field(default_factory=dict)
    """By the number of a chunk in which somebody could intervene, the policy's own actions, in its terms, [N, ...]."""
    last: EnvOutput | None = None
    """Output of the slice behind the last of `chunks`, where `live` put it here."""


_STRETCH = 0.1
"""Seconds for which `live` acts at a time, between which it can be cancelled, and others can ask for decisions."""


class PolicyActor(ModelActor, Receiver):
    """Acts with a whole policy on each rank."""

    async def setup(  # type: ignore[override]
        self,
        *,
        policy: Mapping[str, Any],
        path: str | None = None,
        dtype: str = "float32",
        adapters: str | None = None,
        keep_following: bool = False,
    ) -> None:
        """Make the policy.

        Args:
            policy: its configuration, see `models.policy.build`.
            path: directory of a saved one that is taken instead.
            dtype: what it computes in, as for `Preparation`.
            adapters: directory of saved low-rank adapters that are added to its weights; None for none.
            keep_following: trajectories say what was done and what followed each chunk, too: `SacTrainer` and
                `WorldTrainer` need that.

        Raises:
            ValueError: no such policy or key.
            FileNotFoundError: the directory holds no policy.
        """
        param_dtype = Preparation(dtype=dtype).computes_in
        self._policy: Policy = await self.compute(make_policy, policy, path, self.device, param_dtype)
        if adapters is not None:
            from rlinf.models.language.lora import fold_saved  # imports transformers

            await self.compute(fold_saved, self._policy, adapters)
        self._origin = origin_of(policy, path)
        self._keep_following = keep_following
        self._histories: dict[Key, _History] = {}
        self._version = 0

    @endpoint(device=True)
    async def act(self, key: Key, output: EnvOutput, *, greedy: Greedy = False, keep: bool = True) -> Tensor | Decision:
        """Decide what the environments of a slice do next.

        Args:
            key: which slice.
            output: what it shows, and what its last actions did.
            greedy: take the likeliest actions instead of drawing.
            keep: for the trajectory; calls for one slice must come in the order of time then.

        Returns:
            Chunks of actions in [-1, 1], float32 [N, C, A]; of a policy with a memory together with that.
        """
        return await self.compute_briefly(self._needing(self._act), key, output, greedy, keep)

    @endpoint(device=True, late=True)
    async def live(self, key: Key, simulation: Any, epoch: int, decisions: int, *, fresh: bool) -> bool:
        """Act in a slice without messages, where the environments' actor is beside this one and the last decision took
        no longer than a message: otherwise these would take longer than a small policy, and two for each decision go
        from process to process where the flow runs in another one.

        Args:
            key: which slice.
            simulation: handle of the environments' actor.
            epoch: of new episodes.
            decisions: how many.
            fresh: new episodes begin; otherwise those that are under way go on.

        Returns:
            True if it did: `trajectory` without an output returns what happened. False: nothing was done, and `act` is
            to be asked for each decision.

        Raises:
            EnvironmentLost: see `EnvActor.step`.
        """
        env = self.beside(simulation)
        if not isinstance(env, EnvActor) or type(self).act is not PolicyActor.act:  # somebody's own must be asked
            return False
        if type(env).step is not EnvActor.step or not self.is_brief(self._act):
            return False
        begin = partial(env.reset if fresh else env.observe, key[1], epoch)
        if (thread := env.thread) is None:
            output = await self._converse(key, env, await begin(), decisions)
        else:
            output = await self.compute(thread.within, lambda: at_once(begin()))
            while decisions:
                stretch = partial(self._needing(self._stretch), key, env, output, decisions)
                output, decisions = await self.compute(thread.within, stretch)
        self._histories[key].last = output
        return True

    async def _converse(self, key: Key, env: EnvActor, output: EnvOutput, decisions: int) -> EnvOutput:
        """Act for as long as that, with simulators in processes of their own: what is shown then."""
        for _ in range(decisions):
            start = self._cell.host.now()
            actions = await self.compute_briefly(self._needing(self._act), key, output, False, True)
            decided = self._cell.host.now()
            output = await env.step(key[1], actions)
            self._record_calls(env, start, decided, self._cell.host.now())
        return output

    def _stretch(self, key: Key, env: EnvActor, output: EnvOutput, decisions: int) -> tuple[EnvOutput, int]:
        """Act for a while in the simulators' thread, while this actor's waits for it: what is shown then, and how many
        decisions are left."""
        host = self._cell.host
        now = began = host.now()
        while decisions and now - began < _STRETCH:
            decisions, start = decisions - 1, now
            actions = self._act(key, output, False, True)
            decided = host.now()
            output = at_once(env.step(key[1], actions))
            now = host.now()
            self._record_calls(env, start, decided, now)
        return output, decisions

    def _record_calls(self, env: EnvActor, start: float, decided: float, end: float) -> None:
        """Tell the trace of a decision and a step that were no calls, as if they had been."""
        actors, record = (self.group.names[self.rank], env.group.names[env.rank]), self._cell.host.tracer.record
        record(("call", actors[0], "act", f"{actors[0]}.live", start, decided, 0))
        record(("call", actors[1], "step", f"{actors[0]}.live", decided, end, 0))

    @endpoint(device=True)
    async def trajectory(self, key: Key, output: EnvOutput | None = None) -> Trajectory:
        """Return the trajectory of a slice since the last call.

        Args:
            key: which slice.
            output: what it shows now: values after the last chunk are predicted from it; None: as `live` left it.

        Raises:
            ValueError: nothing was decided for it.
        """
        return await self.on_model(self._trajectory, key, output)

    @endpoint
    async def version(self) -> int:
        """Version of the weights in use."""
        return self._version

    async def check_weights(self, weights: Weights) -> None:
        left_out = set(weights.left_out)
        own = {name: tuple(each.shape) for name, each in self._policy.weights().items() if name not in left_out}
        if problems := misfits(own, weights.shapes):
            raise ValueError(f"published weights are not those of this policy: {problems}")
        if left_out and weights.origin != self._origin:
            raise ValueError(
                f"weights of version {weights.version} leave out {len(left_out)} tensors that nothing changes, such as "
                f"{weights.left_out[0]}, and this policy never had those: load trainer.weights(whole=True) first"
            )

    async def switch_weights(self, weights: Weights) -> None:
        await self.on_model(self._take, weights)
        self._version = weights.version

    @torch.no_grad()
    def _take(self, weights: Weights) -> None:
        own = self._policy.weights()
        for name, tensor in weights.named():
            own[name].copy_(tensor)
        self._origin = weights.origin

    async def onload(self) -> None:
        """Bring back what `offload` moved, with new weights at once if such are coming."""
        if (coming := self.coming) is None:
            await super().onload()
        else:
            await self.compute(self._unpark_with, coming)
            self._version, self.early = coming.version, coming

    def _unpark_with(self, coming: Weights) -> None:
        own = self._policy.weights()
        if self._parking is not None:
            self._parking.unpark(without=[own[name] for name in coming.shapes])
        self._take(coming)

    def _held(self) -> Iterable[Tensor]:
        return held(self._policy)

    def _park(self) -> None:
        for history in self._histories.values():  # these stay in host memory: trajectories are put together there
            history.acts = [_on_host(act) for act in history.acts]
        super()._park()

    @torch.no_grad()
    def _act(self, key: Key, output: EnvOutput, greedy: Greedy, keep: bool) -> Tensor | Decision:
        if keep and output.chunk is not None:
            self._record(key, output.chunk)
        elif keep:  # a step begins; what an earlier one left, which was given up half way, belongs to nobody
            self._histories.pop(key, None)
        observation = self._on_device(output.observation)
        act = self._decided(observation, output, greedy, keep)
        if keep:
            self._histories.setdefault(key, _History()).acts.append(act)
        actions = act.actions.cpu()
        return actions if act.memory is None else Decision(actions, act.memory.cpu())

    def _decided(self, observation: Mapping[str, Tensor], output: EnvOutput, greedy: Greedy, keep: bool) -> Act:
        """Decide on actions for an observation that is on the policy's device."""
        return self._policy.act(observation, instructions=output.instructions, generator=output.seeds, greedy=greedy)

    def _record(self, key: Key, chunk: Chunk) -> None:
        """Add what the last actions of a slice did to its history."""
        history = self._histories.get(key)
        if history is None:  # done by actions before the trajectory began
            return
        history.chunks.append(chunk)
        if chunk.interventions is not None:
            number = len(history.chunks) - 1
            history.proposed[number] = history.acts[number].stored["actions"]
            history.acts[number] = self._as_executed(history.acts[number], chunk.interventions)
        if chunk.uneventful or not (self._has_critic and len(cut := chunk.cut)):
            return
        observation = self._on_device({name: array[cut] for name, array in chunk.final.items()})
        words = chunk.final_instructions
        instructions = None if words is None else [words[row] for row in cut.tolist()]
        final = torch.zeros(len(chunk.running))
        final[chunk.ended[cut]] = self._policy.value(observation, instructions).float().cpu()
        history.finals[len(history.chunks) - 1] = final

    def _as_executed(self, act: Act, interventions: Interventions) -> Act:
        """The act with what was executed as its actions; stored ones change in rows where somebody intervened."""
        rows = interventions.steps.any(1)
        if not bool(rows.any()):
            return act
        own = act.stored["actions"]
        executed = torch.where(interventions.steps[..., None], interventions.actions, act.actions.cpu())
        executed = executed.to(act.actions.device)
        encoded = self._policy.encode(executed, act.stored).to(own)
        mine = rows.to(own.device).view(-1, *[1] * (own.ndim - 1))
        return replace(act, actions=executed, stored={**act.stored, "actions": torch.where(mine, encoded, own)})

    @property
    def _has_critic(self) -> bool:
        return self._policy.config.value_level is not None

    def _on_device(self, observation: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return {name: array.to(self.device) for name, array in observation.items()}

    @torch.no_grad()
    def _trajectory(self, key: Key, output: EnvOutput | None) -> Trajectory:
        history = self._histories.get(key)
        if output is None and history is not None:
            output = history.last
        if output is not None and output.chunk is not None:
            self._record(key, output.chunk)
        history = self._histories.pop(key, None)
        if output is None or history is None or not history.chunks:
            raise ValueError(f"policy: nothing was done in slice {key[1]} of env[{key[0]}] yet")
        next_values = None
        if self._has_critic:
            observation = self._on_device(output.observation)
            next_values = self._policy.value(observation, output.instructions).float().cpu()
        following = self._following(history.chunks) if self._keep_following else None
        return _assembled(key[0], history, output.first, next_values, following, self._version)

    def _following(self, chunks: Sequence[Chunk]) -> Stored:
        """The policy's inputs after each chunk, before environments began other episodes."""
        inputs = [self._policy.inputs(*chunk.following) for chunk in chunks]
        return {name: _stacked([each[name] for each in inputs]) for name in inputs[0]}


def _assembled(
    rank: int, history: _History, first: int, next_values: Tensor | None, following: Stored | None, version: int
) -> Trajectory:
    acts, chunks = history.acts, history.chunks

    def rows(name: str) -> Tensor:
        return torch.stack([getattr(chunk, name) for chunk in chunks]).cpu()

    terminated, truncated, lost = rows("terminated"), rows("truncated"), rows("lost")
    values = [act.values for act in acts if act.values is not None]
    final_values = None if next_values is None else torch.zeros(terminated.shape[:2])
    if final_values is not None:
        for time, final in history.finals.items():
            final_values[time] = final
    episodes = tuple(episode for chunk in chunks for episode in chunk.episodes)
    intervened = proposed = None
    if history.proposed:  # somebody could intervene, if not in chunks that were lost with their simulators
        acted = [chunk.interventions for chunk in chunks]
        nobody = torch.zeros(terminated.shape[1:], dtype=torch.bool)
        intervened = torch.stack([nobody if each is None else each.steps.cpu() for each in acted])
        proposed = _stacked([history.proposed.get(time, act.stored["actions"]) for time, act in enumerate(acts)])
    return Trajectory(
        chunks=Chunks(
            rewards=rows("rewards"),
            terminated=terminated,
            truncated=truncated,
            valid=without_lost(rows("valid"), terminated | truncated, lost),
            values=_stacked(values).float() if values else None,
            next_values=next_values,
            final_values=final_values,
        ),
        stored={name: _stacked([act.stored[name] for act in acts]) for name in acts[0].stored},
        logprobs=_stacked([act.logprobs for act in acts]).float(),
        success=_first_successes(episodes, first, terminated.shape[1]),
        episodes=episodes,
        lost=int(lost.sum()),
        first=first,
        rank=rank,
        version=version,
        following=following,
        actions=None if following is None else _stacked([act.actions for act in acts]),
        intervened=intervened,
        proposed=proposed,
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
    """For each environment, True if the first episode that ended in it was solved, bool [N]; one that did not end was
    not. None if an environment does not say."""
    if any(episode.success_once is None for episode in episodes):
        return None
    firsts = {episode.env - first: bool(episode.success_once) for episode in reversed(episodes)}
    return torch.tensor([firsts.get(env, False) for env in range(count)], dtype=torch.bool)


Expert = Callable[[Mapping[str, Tensor], Sequence[str] | None], Tensor]
"""From N observations and instructions to chunks of actions in [-1, 1], float32 [N, C, A]."""


class DaggerPolicy(PolicyActor):
    """Acts greedily, or now and then as the expert says, and asks the expert about everything that is seen."""

    async def setup(  # type: ignore[override]
        self,
        *,
        policy: Mapping[str, Any],
        expert: str | None = None,
        path: str | None = None,
        beta: float = 0.0,
        decay: float = 0.5,
    ) -> None:
        """Make the policy and the expert.

        Args:
            policy, path: see `PolicyActor.setup`.
            expert: dotted path of an `Expert`, or the directory of a saved policy; None asks nobody: whoever intervenes
                in the environments teaches (HG-DAgger).
            beta: share of decisions in which the expert's action is done, at version 0 of the weights.
            decay: that share falls to this much of itself with each version.

        Raises:
            ValueError: no such policy or key.
            FileNotFoundError: a directory holds no policy.
            ImportError: there is no such function.
        """
        await super().setup(policy=policy, path=path)
        self._expert = None if expert is None else await self.compute(expert_of, expert, self.device)
        self._beta, self._decay = beta, decay

    @endpoint
    async def ask(self, output: EnvOutput) -> None:
        """Ask the expert about what a slice shows, so that one that does not fit says so before a run begins.

        Raises:
            ValueError: it does not know such observations, or its answers are no actions of this policy.
        """
        await self.on_model(self._ask, output)

    @torch.no_grad()
    def _ask(self, output: EnvOutput) -> None:
        self._decided(self._on_device(output.observation), output, True, True)

    def _decided(self, observation: Mapping[str, Tensor], output: EnvOutput, greedy: Greedy, keep: bool) -> Act:
        if not keep:
            return super()._decided(observation, output, greedy, keep)
        act = super()._decided(observation, output, True, keep)
        if self._expert is None:
            inputs = self._policy.inputs(observation, output.instructions)
            return replace(act, stored={**inputs, "actions": self._policy.encode(act.actions, inputs)})
        expert_actions = self._expert(observation, output.instructions).to(act.actions)
        if expert_actions.shape != act.actions.shape or not bool(expert_actions.isfinite().all()):
            raise ValueError(
                f"dagger.expert: it answered {list(expert_actions.shape)}, or numbers that are not finite; wanted are "
                f"actions {list(act.actions.shape)}: environments, actions of a chunk, numbers of an action"
            )
        expert_actions = expert_actions.clamp(-1.0, 1.0)
        share = self._beta * self._decay**self._version
        # a place that no policy draws from
        guided = uniforms(output.seeds[:, None], torch.tensor([-1])) < share
        actions = torch.where(guided[..., None].to(expert_actions.device), expert_actions, act.actions)
        inputs = self._policy.inputs(observation, output.instructions)
        return replace(act, actions=actions, stored={**inputs, "actions": self._policy.encode(expert_actions, inputs)})


def expert_of(name: str, device: torch.device) -> Expert:
    """An expert by name: a function's dotted path, or the directory of a saved policy. Blocking.

    Raises:
        ValueError: the policy looks at more than what is seen now.
    """
    if not os.path.isdir(os.path.expanduser(name)):
        expert: Expert = resolve(name)
        return expert
    policy = load_policy(Path(name).expanduser()).to(device)
    if getattr(policy.config, "memory", 0):
        raise ValueError(f"dagger.expert: {name} has a memory, and is asked about single decisions: take another")

    def answer(observation: Mapping[str, Tensor], instructions: Sequence[str] | None) -> Tensor:
        return policy.act(observation, instructions=instructions, greedy=True).actions

    return answer
