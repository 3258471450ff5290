"""Roles move between two steps: with all that they have learned, onto the devices that they are to have; and a move
that fails says why, once, and leaves nothing behind."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from rlinf import Actor, ActorSystem, endpoint
from rlinf.placement.plan import Plan, RolePlan
from rlinf.placement.seats import Placed, RoleKind, Seat, placed_by
from rlinf.runs.placement_manager import ASIDE, moved, relocate
from rlinf.runs.roles import restore_roles
from rlinf.runtime.base.clock import run_virtual
from rlinf.runtime.base.errors import ActorDied
from rlinf.training.checkpoint import ParkedState, StateCopy

FAILS: set[str] = set()
"""What goes wrong, such as "trainer.save"."""
CLOSED: list[str] = []
"""Actors that have been ended, in order."""


class Learner(Actor):
    """Knows a number, and says which devices it computed on by how long a step takes."""

    async def setup(self) -> None:
        self.name = self._cell.name.partition("[")[0]
        self.known = 0
        self._may_fail("setup")

    def _may_fail(self, what: str) -> None:
        if f"{self.name}.{what}" in FAILS:
            raise OSError(f"{self.name} cannot {what}")

    @endpoint(device=True)
    async def learn(self) -> int:
        await asyncio.sleep(1.0)
        self.known += 1
        return self.known

    @endpoint
    async def known_now(self) -> int:
        return self.known

    async def close(self) -> None:
        CLOSED.append(self._cell.name)
        self._may_fail("close")
        await asyncio.sleep(1.0)


class Filing(Learner):
    """Knows only how to write into files what it knows."""

    @endpoint
    async def save(self, directory: str) -> None:
        self._may_fail("save")
        Path(directory).mkdir(parents=True)
        (Path(directory) / self.name).write_text(str(self.known))

    @endpoint
    async def restore(self, directory: str) -> None:
        self._may_fail("restore")
        self.known = int((Path(directory) / self.name).read_text())


class Remembering(Learner):
    """Moves through memory."""

    @endpoint(device=True, joint=True)
    async def export_state(self) -> StateCopy:
        self._may_fail("export")
        return StateCopy(self.rank, json.dumps({"known": self.known}) if self.rank == 0 else None, {}, {}, {})

    @endpoint(device=True, joint=True)
    async def import_state(self, parked: ParkedState) -> None:
        self._may_fail("import")
        self.known = parked.about["known"]


CLASSES = {"rollout": Filing, "judge": Learner, "trainer": Remembering}
KINDS = (RoleKind("rollout"), RoleKind("judge", on_devices=False), RoleKind("trainer", learns=True))
TOGETHER = Placed(
    {
        "rollout": Seat((0, 1), (frozenset([0]), frozenset([1]))),
        "judge": Seat((0,), (frozenset(),)),
        "trainer": Seat((0, 1), (frozenset([0]), frozenset([1]))),
    },
    devices=2,
    turns=True,
)
APART = placed_by(Plan({"rollout": RolePlan((0,)), "trainer": RolePlan((1,))}), TOGETHER, KINDS)
MOVING = frozenset({"rollout", "trainer"})


class Run:
    """Toy roles in a system, and how to move them."""

    def __init__(self, system: ActorSystem, directory: Path) -> None:
        self.system, self.directory = system, directory
        self.roles: dict[str, Any] = {}

    async def spawn(self, placed: Placed, only: Any = ("rollout", "judge", "trainer")) -> dict[str, Any]:
        return {
            role: await self.system.spawn(CLASSES[role], name=role, **placed.spawning(role, 60, 5))
            for role in placed.seats
            if role in only
        }

    async def relocate(self, before: Placed, after: Placed) -> None:
        async def publish(roles):
            self.published = [name for name in roles if await roles[name][0].known_now() is not None]

        self.roles = await relocate(
            self.system, self.roles, moved(before, after), self.directory,
            spawn=lambda moving: self.spawn(after, moving), publish=publish,
        )  # fmt: skip


def in_a_run(tmp_path, main, *fails):
    """Run `main(run)` in virtual time, everybody on all devices at first; its value, and the actors that were ended."""
    FAILS.clear()
    FAILS.update(fails)
    CLOSED.clear()

    async def whole():
        async with ActorSystem.local(2, device_memory={0: 100, 1: 100}) as system:
            run = Run(system, tmp_path)
            run.roles = await run.spawn(TOGETHER)
            return await main(run)

    found, _ = run_virtual(whole())
    return found


def test_who_moves_are_those_whose_devices_change_and_those_who_begin_to_take_turns():
    assert moved(TOGETHER, TOGETHER) == frozenset()
    assert moved(TOGETHER, APART) == MOVING
    half = placed_by(Plan({"rollout": RolePlan((0,)), "trainer": RolePlan((0, 1))}), TOGETHER, KINDS)
    assert moved(TOGETHER, half) == {"rollout"}
    assert moved(half, APART) == MOVING, "on host 0, the rollout need not ask for its device any more"


def test_roles_keep_what_they_know_and_are_where_they_are_to_be(tmp_path):
    async def main(run):
        judge = run.roles["judge"]
        for _ in range(3):
            await asyncio.gather(run.roles["trainer"].learn(), run.roles["rollout"].learn())
        await run.relocate(TOGETHER, APART)
        assert list(run.roles) == ["rollout", "judge", "trainer"]
        assert run.published == ["rollout", "judge", "trainer"]
        assert run.roles["judge"] is judge, "it has not been touched"
        assert CLOSED.count("judge[0]") == 0
        assert [run.roles[role].hosts for role in ("rollout", "trainer")] == [[0], [1]]
        return [await run.roles[role][0].learn() for role in ("rollout", "trainer")]

    assert in_a_run(tmp_path, main) == [4, 4]
    assert not (tmp_path / ASIDE).exists()


def test_their_devices_are_taken_in_turns_before_and_not_after(tmp_path):
    """A step of both takes two seconds where they share devices, and one where each has its own."""

    async def main(run):
        clock, took = asyncio.get_running_loop().time, []
        for after in (APART, TOGETHER, TOGETHER):
            start = clock()
            await asyncio.gather(run.roles["trainer"].learn(), run.roles["rollout"].learn())
            took.append(clock() - start)
            await run.relocate(APART if after is TOGETHER and len(took) == 2 else TOGETHER, after)
        memory = await run.system.device_memory()
        return took, memory

    took, memory = in_a_run(tmp_path, main)
    assert took == [pytest.approx(2.0), pytest.approx(1.0), pytest.approx(2.0)]
    for device in memory.values():
        assert device.peak <= 100
        assert (device.resident, device.parked) == (60, 5), "those that left take nothing any more"


@pytest.mark.parametrize(
    "stage", ["trainer.export", "rollout.save", "trainer.close", "rollout.close", "trainer.import", "rollout.restore"]
)
def test_what_fails_is_told_as_it_is_and_all_ends_with_the_run(tmp_path, stage):
    async def main(run):
        await run.relocate(TOGETHER, APART)

    role, _, what = stage.partition(".")
    with pytest.raises(OSError, match=f"{role} cannot {what}"):
        in_a_run(tmp_path, main, stage)
    started = ["rollout[0]", "rollout[1]", "judge[0]", "trainer[0]", "trainer[1]"]
    if what in ("restore", "import"):
        started += ["rollout[0]", "trainer[0]"]
    assert sorted(CLOSED) == sorted(started)


@pytest.mark.parametrize("role", sorted(MOVING))
def test_a_role_that_cannot_be_started_anew_says_so_and_names_are_free_again(tmp_path, role):
    async def main(run):
        before = dict(run.roles)
        FAILS.add(f"{role}.setup")
        with pytest.raises(OSError, match=f"{role} cannot setup"):
            await run.relocate(TOGETHER, APART)
        assert await before["judge"][0].known_now() == 0, "it still runs"
        for gone in MOVING:
            with pytest.raises(ActorDied):
                await before[gone][0].known_now()
        FAILS.clear()
        again = await run.spawn(TOGETHER, {role})
        return await again[role].learn()

    assert in_a_run(tmp_path, main) == [1, 1]


def test_a_role_that_cannot_be_ended_does_not_keep_the_others_alive(tmp_path):
    async def main(run):
        before = dict(run.roles)
        with pytest.raises(OSError, match=r"rollout.*close"):
            await run.relocate(TOGETHER, APART)
        for gone in MOVING:
            with pytest.raises(ActorDied):
                await before[gone][0].known_now()
        FAILS.clear()
        await run.spawn(TOGETHER, MOVING)

    in_a_run(tmp_path, main, "rollout.close")


def test_nothing_is_ended_before_all_has_been_written(tmp_path):
    async def main(run):
        await run.roles["trainer"].learn()
        with pytest.raises(OSError, match=r"rollout.*save"):
            await run.relocate(TOGETHER, APART)
        assert CLOSED == []
        return await run.roles["trainer"].learn()

    assert in_a_run(tmp_path, main, "rollout.save") == [2, 2]


def test_what_an_earlier_move_left_is_not_taken_for_what_a_role_knows(tmp_path):
    async def main(run):
        stale = tmp_path / ASIDE / "roles" / "rollout" / "0"
        stale.mkdir(parents=True)
        (stale / "rollout").write_text("99")
        await run.relocate(TOGETHER, APART)
        assert await run.roles["rollout"][0].known_now() == 0

    in_a_run(tmp_path, main)


class Frozen(Actor):
    """A reference policy that was warmed up: one number."""

    async def setup(self, known: int = 0) -> None:
        self.known = known

    @endpoint
    async def save(self, directory: str) -> None:
        Path(directory).mkdir()
        (Path(directory) / "known").write_text(str(self.known))

    @endpoint
    async def restore(self, directory: str) -> int:
        self.known = int((Path(directory) / "known").read_text())
        return self.known

    @endpoint
    async def known_now(self) -> int:
        return self.known


def test_a_run_that_goes_on_from_another_one_has_its_frozen_reference_when_that_moves(tmp_path):
    """Checkpoints leave it out, for it never changes: each run keeps it once, and so must the one that goes on."""
    first, second = tmp_path / "first", tmp_path / "second"

    async def main():
        async with ActorSystem.local(1) as system:
            for run in (first, second):
                (run / "checkpoints" / "step_000002").mkdir(parents=True)
            await (await system.spawn(Frozen, name="old", known=7))[0].save(str(first / "reference"))
            one = {"reference": await system.spawn(Frozen, name="one")}
            await restore_roles(one, first / "checkpoints" / "step_000002", first, second)
            moved_there = {"reference": await system.spawn(Frozen, name="two")}
            await restore_roles(moved_there, second / ASIDE, second)
            again = {"reference": await system.spawn(Frozen, name="three")}
            await restore_roles(again, second / "checkpoints" / "step_000002", second, second)
            return [await group["reference"][0].known_now() for group in (one, moved_there, again)]

    found, _ = run_virtual(main())
    assert found == [7, 7, 7]
