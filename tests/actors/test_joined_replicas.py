"""Replicas that join a trainer, and are lost in the middle of a step: its weights are those of one that works alone."""

import asyncio
import contextlib
import itertools

import pytest
import torch

from rlinf import ActorSystem
from rlinf.actors.replicas import far_side
from rlinf.actors.replicas import joined as joined_side
from rlinf.actors.trainer import Trainer
from rlinf.joining.connection import connect
from rlinf.runtime.base.errors import UserError
from tests.actors import toys
from tests.actors.test_trainer import SHARED, flat, scored, spoilt, system_actor

TOKEN = "of this job"
SMALL = {"micro_batch_tokens": 20, "lr": 0.01}
BATCHES = [toys.told(toys.groups(8, seed)) for seed in range(3)]


class Joined:
    """A trainer, and replicas in tasks of this process."""

    def __init__(self, trainer):
        self.trainer, self.runner, self.tasks = trainer, system_actor(trainer)._runner, []
        self.replicas = self.runner.replicas

    async def joins(self):
        """One more has joined; returns what has it leave."""
        leave, ready = asyncio.Event(), asyncio.Event()
        host, port = self.replicas._listener.how.split()[2].split(":")
        connection = await connect(host, int(port), TOKEN)
        self.tasks.append(asyncio.create_task(far_side.replicate(connection, Trainer, ready.set, leave)))
        there = len(self.replicas.there)
        await self.until(lambda: len(self.replicas.there) > there)
        return leave

    async def until(self, true):
        while not true():
            await self.runner._changed.wait()

    async def all_current(self):
        """Those that answer have the weights."""
        working = [one for one in self.replicas.there if one._computes is None]
        await self.until(lambda: all(one.peer.current and one.stamp is not None for one in working))

    async def close(self):
        for task in self.tasks:
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError, ConnectionError):
                await task


@pytest.fixture
async def spawn(monkeypatch):
    """Makes trainers that may be joined, and such as may not."""
    monkeypatch.setenv("RLINF_JOIN_TOKEN", TOKEN)
    all_joined, numbers = [], itertools.count()
    async with ActorSystem.local() as system:

        async def make(join=True, **settings):
            where = {"join": "127.0.0.1:0"} if join else {}
            trainer = await system.spawn(
                Trainer, name=f"trainer{next(numbers)}", **{**SHARED, **SMALL, **where, **settings}
            )
            if not join:
                return trainer
            all_joined.append(joined := Joined(trainer))
            return joined

        yield make
        for joined in all_joined:
            await joined.close()


@pytest.fixture
def computed(monkeypatch):
    """Numbers of micro-batches that replicas had; those in `deadly`, counted from 1, they die of, and those in `mute`
    they never answer."""

    class Computed(list):
        deadly = mute = frozenset()

    numbers, compute = Computed(), far_side.FarSide._compute

    async def counted(self, number, command, version):
        numbers.append(number)
        if (count := len(numbers)) in numbers.deadly:
            self._connection.abandon()
        if count in numbers.deadly or count in numbers.mute:
            await asyncio.get_running_loop().create_future()
        await compute(self, number, command, version)

    monkeypatch.setattr(far_side.FarSide, "_compute", counted)
    return numbers


HELD = {"lora": {"r": 4, "alpha": 8, "target_modules": "auto"}, "reference": "adapters_off"}
OTHERS = [{}, {"algorithm": "gspo", "epochs": 2, "order": "arrival"}, {"kind": "muon", "dtype": "bfloat16"}]
HOWS = [
    *(pytest.param(how, marks=pytest.mark.repeated) for how in OTHERS),
    {"epochs": 2, "minibatches": 3},
    {"algorithm": "grpo_tis", "minibatches": 2},
    {**HELD, "algorithm": {"name": "grpo", "overrides": {"kl": {"place": "loss"}}}},
]


async def alike(spawn, computed, how, replicas=2, batches=BATCHES):
    """Train two trainers, one of which is helped; their metrics and weights are the same."""
    alone, joined = await spawn(join=False, **how), await spawn(**how)
    for _ in range(replicas):
        await joined.joins()
    for batch in batches:
        expected, found = await alone.train(batch), await joined.trainer.train(batch)
        assert found == expected
        assert torch.equal(await flat(joined.trainer), await flat(alone))
        await joined.all_current()
    return joined


@pytest.mark.parametrize("how", HOWS)
async def test_weights_and_metrics_are_bit_for_bit_those_of_a_trainer_alone(spawn, computed, how):
    await alike(spawn, computed, how)
    assert len(computed) >= 4  # of each later batch each replica had one


@pytest.mark.parametrize(
    "deadly", [{2, 3}, *(pytest.param(some, marks=pytest.mark.repeated) for some in ({1}, {4}, {3, 5}))]
)
async def test_what_a_replica_had_that_is_lost_is_computed_by_others(spawn, computed, deadly):
    computed.deadly = deadly
    joined = await alike(spawn, computed, {"epochs": 2})
    assert len(joined.replicas.there) == 2 - len(deadly)


async def test_a_replica_that_lives_and_does_not_answer_holds_no_step_up(spawn, computed, monkeypatch):
    monkeypatch.setattr(joined_side, "SILENCE", 0.01)  # or any: whoever computes it, it is the same
    computed.mute = {1, 3}
    joined = await alike(spawn, computed, {})
    assert len(joined.replicas.there) == 2


async def test_one_that_is_told_to_leave_says_so_and_the_others_end_with_the_job(spawn, computed):
    joined = await spawn()
    leave, _ = await joined.joins(), await joined.joins()
    await joined.trainer.train(BATCHES[0])
    await joined.all_current()
    before = len(computed)
    training = asyncio.ensure_future(joined.trainer.train(BATCHES[1]))
    await joined.until(lambda: len(computed) > before)
    leave.set()
    await training
    await joined.until(lambda: len(joined.replicas.there) == 1)
    await joined.replicas.close()
    assert "told to leave" in await joined.tasks[0]
    assert "has ended" in await joined.tasks[1]


async def test_a_step_that_fails_or_is_cancelled_leaves_nothing_behind(spawn, computed, tmp_path):
    how = {"order": "arrival"}
    alone, joined = await spawn(join=False, **how), await spawn(**how)
    await joined.joins()
    for trainer in (alone, joined.trainer):
        with pytest.raises(FloatingPointError):
            await trainer.train([*BATCHES[0][:4], spoilt(scored(number=9)), *BATCHES[0][4:]])
        await trainer.save(tmp_path / str(trainer is alone))
        await trainer.train(BATCHES[1])

    async def endless():
        for group in BATCHES[2]:
            yield group
        await asyncio.get_running_loop().create_future()

    await joined.all_current()
    before = len(computed)
    training = asyncio.ensure_future(joined.trainer.train(endless()))
    await joined.until(lambda: len(computed) > before)
    training.cancel()
    with pytest.raises(asyncio.CancelledError):
        await training
    assert torch.equal(await flat(joined.trainer), await flat(alone))
    for trainer in (alone, joined.trainer):  # back to weights that the replica does not have any more
        await trainer.restore(tmp_path / str(trainer is alone))
    assert await joined.trainer.train(BATCHES[2]) == await alone.train(BATCHES[2])
    await joined.all_current()
    assert await joined.trainer.train(BATCHES[0]) == await alone.train(BATCHES[0])
    assert torch.equal(await flat(joined.trainer), await flat(alone))


@pytest.mark.parametrize("wrong", [{"hosts": [0, 1]}, {"order": "free"}, {"backend": "megatron"}])
async def test_a_trainer_that_replicas_cannot_help_is_refused_in_a_line_before_it_is_made(wrong):
    async with ActorSystem.local() as system:
        with pytest.raises(UserError, match=r"trainer\.join"):
            await system.spawn(Trainer, **SHARED, **{"hosts": [0], **wrong}, join="127.0.0.1:0")
