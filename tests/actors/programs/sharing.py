"""Roles that take turns on devices too small for all of them, watched: how many bytes are there, and what is learned.

Usage: sharing.py OUT MEMORY, where each rank's device holds MEMORY bytes; 0 declares no devices.
"""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import torch

import rlinf
from rlinf import Actor, endpoint
from rlinf.actors.critic import Critic
from rlinf.actors.reference import Reference
from rlinf.actors.trainer import Trainer
from rlinf.algos import recipes
from rlinf.data.sample import Group, Prompt
from rlinf.data.step import Step
from rlinf.flows.ppo import ppo
from rlinf.runtime.streams.stream import Stream, each
from tests.actors import toys

STEPS = 2
PPO = recipes.get("ppo", {"kl": {"place": "reward", "kind": "k1", "beta": 0.1}, "correction": {"cap": 2.0}})
MODEL = {"model": toys.configuration(), "tokenizer": toys.ALPHABET}
LEARNING = {
    **MODEL, "algorithm": PPO, "lr": 0.01, "micro_batch_tokens": 40, "epochs": 2,
}  # fmt: skip
"""The trainer learns from each group as it comes, and again with what it found out about it then."""


class Device:
    """The storages of one process, as they are: what roles have on its device, all of them together.

    It looks only while no role computes: a gradient that is read while autograd replaces it on another thread is read
    after its memory was freed, and the process dies of that sooner or later.
    """

    def __init__(self) -> None:
        self.limit = 0
        self.highest = 0
        self.looks = 0
        self.moves: list[str] = []
        self._roles: dict[Any, Callable[[], Iterable[torch.Tensor]]] = {}
        self._lock = threading.Lock()
        self._computing = 0

    def watch(self, role: Any, tensors: Callable[[], Iterable[torch.Tensor]]) -> None:
        self._roles[role] = tensors

    def forget(self, role: Any) -> None:
        self._roles.pop(role, None)

    def of(self, role: Any) -> int:
        """Bytes of one role's storages."""
        locals_ = [getattr(tensor, "_local_tensor", tensor) for tensor in self._roles[role]()]
        return sum({s._cdata: s.nbytes() for s in (tensor.untyped_storage() for tensor in locals_)}.values())

    @contextlib.contextmanager
    def watched(self, name: str) -> Iterator[None]:
        """In it a role computes; looks before and after, unless others compute."""
        with self._lock:  # nobody begins to compute during a look
            if not self._computing:
                self._look(f"before {name}")
            self._computing += 1
        try:
            yield
        finally:
            with self._lock:
                self._computing -= 1
                if not self._computing:
                    self._look(f"after {name}")

    def _look(self, when: str) -> None:
        there = {role._cell.name: self.of(role) for role in list(self._roles)}
        self.looks += 1
        self.highest = max(self.highest, sum(there.values()))
        if self.limit and sum(there.values()) > self.limit:
            raise MemoryError(f"{when}: {there} are more than {self.limit}")


device = Device()


def of_module(module: torch.nn.Module, optimizer: torch.optim.Optimizer | None = None) -> list[torch.Tensor]:
    """Everything that is known to be there, by another way than the actors go."""
    found: list[Any] = []
    for part in list(module.modules()):
        found += [*part._parameters.values(), *part._buffers.values()]
    found += [parameter.grad for parameter in found if isinstance(parameter, torch.nn.Parameter)]
    if optimizer is not None:
        found += [value for state in list(optimizer.state.values()) for value in list(state.values())]
    return [tensor for tensor in found if isinstance(tensor, torch.Tensor)]


class Weighed(Actor):
    """Looks at its device before and after all that it computes, moves included."""

    async def compute(self, fn: Any, *args: Any, **kwargs: Any) -> Any:
        name = f"{self._cell.name}.{getattr(fn, '__name__', fn)}"

        def weighed() -> Any:
            with device.watched(name):
                return fn(*args, **kwargs)

        return await super().compute(weighed)

    async def offload(self) -> None:
        await super().offload()
        assert device.of(self) == 0, "it keeps what it was to give back"
        device.moves.append(f"-{self._cell.name}")

    async def onload(self) -> None:
        await super().onload()
        device.moves.append(f"+{self._cell.name}")

    async def close(self) -> None:
        device.forget(self)
        await super().close()

    @endpoint
    async def weighs(self) -> tuple[int, int, int, list[str]]:
        """Bytes of this role, the most that were on its device, how often it was looked at, and all moves there."""
        return device.of(self), device.highest, device.looks, list(device.moves)


def of_learner(actor: Any) -> list[torch.Tensor]:
    """Of a trainer or a critic; within `sft` there is another optimizer."""
    return [
        *of_module(actor._back.module, actor._learner.optimizer),
        *of_module(torch.nn.Module(), actor._at_work.optimizer),
        *actor._runner.held(),
    ]


class WeighedTrainer(Weighed, Trainer):
    learned = 0
    """Micro-batches so far."""

    def _learn(self, *args: Any, **kwargs: Any) -> None:
        super()._learn(*args, **kwargs)
        self.learned += 1

    async def offload(self) -> None:
        if any(parameter.grad is not None for parameter in self._back.module.parameters()):
            device.moves.append(f"/{self._cell.name}")  # in the middle of a batch
        await super().offload()

    @endpoint
    async def careless(self) -> float:
        """Looks at weights without a lease."""
        return await self.computed(lambda: float(next(self._back.module.parameters()).detach().sum()))

    @endpoint
    async def micro_batches(self) -> int:
        return self.learned

    async def setup(self, **settings: Any) -> None:  # type: ignore[override]
        await super().setup(**settings)
        device.watch(self, lambda: of_learner(self))


class WeighedCritic(Weighed, Critic):
    async def setup(self, **settings: Any) -> None:  # type: ignore[override]
        await super().setup(**settings)
        device.watch(self, lambda: of_learner(self))


class WeighedReference(Weighed, Reference):
    async def setup(self, **settings: Any) -> None:  # type: ignore[override]
        await super().setup(**settings)
        device.watch(self, lambda: of_module(self.policy))


class Sampler(WeighedReference):
    """In place of an engine: answers of random tokens, with their log-probs under weights that it is sent."""

    @endpoint(device=True)
    async def generate(self, prompts: Any, n: int) -> AsyncIterator[Group]:
        async for prompt in each(prompts):
            rng = np.random.default_rng([prompt.id, self.version])
            drawn = toys.group(prompt.id, rng, size=n)
            asked = Group(prompt, tuple(replace(sample, prompt=prompt, reward=None) for sample in drawn.samples))
            (told,) = await self.compute(self._told, [asked])
            versions = [np.full(len(s.response_ids), self.version, np.int32) for s in told.samples]
            yield Group(
                prompt,
                tuple(
                    replace(s, logprobs=s.per_token[self._settings.column], per_token={}, versions=v, outcome=None)
                    for s, v in zip(told.samples, versions, strict=True)
                ),
            )


class Parity(Actor):
    """Likes even tokens."""

    @endpoint
    async def score(self, group: Group) -> Group:
        samples = (s.judged(float(np.mean(s.response_ids % 2 == 0)), "ok", scores={}) for s in group.samples)
        return Group(group.prompt, tuple(samples))


async def learned(system: rlinf.ActorSystem, ranks: int, sizes: Mapping[str, int] | None) -> dict[str, Any]:
    """A few steps of PPO with a reference, and what came of them.

    Args:
        sizes: bytes that are declared of each role; None declares no devices.
    """
    hosts = list(range(ranks))

    def where(role: str) -> dict[str, Any]:
        if sizes is None:
            return {"hosts": hosts}
        return {"hosts": hosts, "devices": hosts, "resident_bytes": sizes[role]}

    rollout = await system.spawn(Sampler, name="rollout", **where("rollout"), **MODEL)
    reference = await system.spawn(WeighedReference, name="reference", **where("reference"), **MODEL, seed=3)
    critic = await system.spawn(WeighedCritic, name="critic", **where("critic"), **LEARNING)
    trainer = await system.spawn(WeighedTrainer, name="trainer", **where("trainer"), **LEARNING)
    judge = await system.spawn(Parity, name="judge", hosts=[0])
    metrics = []
    await critic.load(trainer.weights())
    for index in range(STEPS):
        # a stream, which the ranks share: each would answer all of a list, and twins come in no order
        prompts = Stream.of([Prompt(10 * index + number, np.array([3, 4]), text="1>") for number in range(5)])
        metrics.append(await ppo(Step(index, prompts, 3), rollout, judge, critic, trainer, reference))
    return {
        "metrics": metrics,
        "weights": {name: tensor.clone() for name, tensor in (await trainer.weights()).named()},
        "said": await _values(critic),
        "weighed": [await role[rank].weighs() for role in (trainer, critic, reference, rollout) for rank in hosts],
    }


async def _values(critic: Any) -> list[list[float]]:
    groups = [group async for group in critic.values(toys.groups(3))]
    return [np.nan_to_num(sample.per_token["values"]).tolist() for group in groups for sample in group.samples]


def declared(ranks: int) -> dict[str, int]:
    """Bytes that each role has at most, on each of so many ranks: float32 of weights, gradients and two means."""
    weights = sum(tensor.numel() for tensor in toys.model().parameters()) * 4
    rest = 2048 + weights // 8  # counters, buffers, the critic's head, and what padding adds to slices
    learning = 4 * weights // ranks + rest
    return {"trainer": learning, "critic": learning, "reference": weights + rest, "rollout": weights + rest}


async def main(system: rlinf.ActorSystem) -> None:
    out, memory = sys.argv[1], int(sys.argv[2])
    torch.save(await learned(system, system.hosts, declared(system.hosts) if memory else None), out)


if __name__ == "__main__":
    given = int(sys.argv[2])
    device.limit = given
    rlinf.run(main, device_memory=dict.fromkeys(range(2), given) if given else None)
