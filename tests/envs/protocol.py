"""What every adapter must do: derive a test class from `ProtocolSuite`, and say in `make` how the simulator is made."""

from collections import defaultdict

import pytest
import torch

from rlinf.envs.base import Simulator, rows_of
from rlinf.envs.environment import Environment, Rules, mistake_in

SEEDS = [7, 2**31 - 1, 0, 12345]


def same(one, other) -> bool:
    """Whether two trees of tensors are equal, bit for bit."""
    if isinstance(one, torch.Tensor):
        return one.dtype == other.dtype and torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[name], other[name]) for name in one)
    return one == other


def everyone(simulator) -> torch.Tensor:
    return torch.ones(simulator.num_envs, dtype=torch.bool, device=simulator.device)


def begin(simulator, seeds=None) -> dict:
    seeds = SEEDS[: simulator.num_envs] if seeds is None else seeds
    return simulator.reset(torch.tensor(seeds), torch.arange(len(seeds)))


def actions_for(simulator, *shape, seed=0) -> torch.Tensor:
    """Actions from -1 to 1, [*shape, A]."""
    generator = torch.Generator().manual_seed(seed)
    return torch.rand(*shape, simulator.action_spec.size, generator=generator) * 2 - 1


def scaled(simulator, actions) -> torch.Tensor:
    return simulator.action_spec.scaled(actions.to(simulator.device))


def told(transition, row: int):
    """What a transition says of one environment."""
    success = None if transition.success is None else transition.success[row]
    return {
        "observation": {name: array[row] for name, array in transition.observation.items()},
        "reward": transition.reward[row],
        "terminated": transition.terminated[row],
        "truncated": transition.truncated[row],
        **({} if success is None else {"success": success}),
    }


class ProtocolSuite:
    """Derive, and define `make`. Simulators with rare tasks that end within three random steps are not foreseen."""

    steps = 3
    """Random steps that are done in a row; no episode ends by itself within so many."""

    def make(self, num_envs: int) -> Simulator:
        raise NotImplementedError

    @pytest.fixture(scope="class")
    @classmethod
    def _kept(cls):
        """Simulators by their number of environments: to make one costs most, and episodes must not tell them apart."""
        kept: dict[int, list[Simulator]] = {}
        yield kept
        for simulators in kept.values():
            for simulator in simulators:
                simulator.close()

    @pytest.fixture
    def made(self, _kept):
        given = defaultdict(int)

        def make(num_envs=2):
            simulators = _kept.setdefault(num_envs, [])
            if given[num_envs] == len(simulators):
                simulators.append(self.make(num_envs))
            given[num_envs] += 1
            return simulators[given[num_envs] - 1]

        return make

    def test_observations_and_transitions_are_as_specified(self, made):
        simulator = made(3)
        assert simulator.num_envs == 3
        assert mistake_in(begin(simulator), simulator.observation_spec, 3) is None
        moved = simulator.step(scaled(simulator, actions_for(simulator, 3)), everyone(simulator))
        assert mistake_in(moved.observation, simulator.observation_spec, 3) is None
        assert moved.reward.dtype == torch.float32
        for flags in (moved.terminated, moved.truncated):
            assert flags.dtype == torch.bool
            assert flags.shape == moved.reward.shape == (3,)
        assert moved.success is None or (moved.success.dtype, moved.success.shape) == (torch.bool, (3,))
        instructions = simulator.instructions()
        assert instructions is None or [type(text) for text in instructions] == [str] * 3

    def test_equal_seeds_give_equal_starts_in_any_environment_and_after_other_episodes(self, made):
        simulator = made(2)
        first = begin(simulator, [7, 9])
        for step in range(self.steps):
            simulator.step(scaled(simulator, actions_for(simulator, 2, seed=step)), everyone(simulator))
        swapped = begin(simulator, [9, 7])
        assert same(rows_of(first, torch.tensor([1, 0])), swapped)
        assert same(begin(made(2), [7, 7]), rows_of(first, torch.tensor([0, 0])))

    def test_other_seeds_give_other_starts(self, made):
        simulator = made(2)
        starts = [begin(simulator, [seed, seed + 100]) for seed in range(4)]
        assert not all(same(starts[0], start) for start in starts[1:])

    def test_an_episode_follows_from_its_seed_and_its_actions(self, made):
        one, other = made(2), made(2)
        begin(one, [5, 6])
        begin(other, [6, 5])
        for step in range(self.steps):
            actions = scaled(one, actions_for(one, 2, seed=step))
            here = one.step(actions, everyone(one))
            there = other.step(actions.flip(0), everyone(other))
            assert all(same(told(here, row), told(there, 1 - row)) for row in range(2))

    def test_what_was_returned_is_not_written_later(self, made):
        simulator = made(2)
        kept = [begin(simulator)]
        moved = simulator.step(scaled(simulator, actions_for(simulator, 2)), everyone(simulator))
        kept += [moved.observation, {"reward": moved.reward}]
        copies = [{name: array.clone() for name, array in each.items()} for each in kept]
        simulator.step(scaled(simulator, actions_for(simulator, 2, seed=1)), everyone(simulator))
        simulator.reset(torch.tensor([99]), torch.tensor([1]))
        assert all(same(one, other) for one, other in zip(kept, copies, strict=True))

    def test_a_reset_and_inactive_rows_do_not_disturb_the_other_environments(self, made):
        disturbed, alone = made(3), made(3)
        for simulator in (disturbed, alone):
            begin(simulator)
        idle = torch.tensor([True, False, True], device=disturbed.device)
        for step in range(self.steps):
            actions = scaled(alone, actions_for(alone, 3, seed=step))
            there = alone.step(actions, everyone(alone))
            here = disturbed.step(actions, idle)
            assert all(same(told(here, row), told(there, row)) for row in (0, 2))
            if step == 0:
                disturbed.reset(torch.tensor([4]), torch.tensor([1]))

    def test_steps_from_a_restored_state_repeat_bit_for_bit_here_and_elsewhere(self, made):
        simulator, elsewhere = made(2), made(2)
        begin(simulator)
        simulator.step(scaled(simulator, actions_for(simulator, 2)), everyone(simulator))
        states = simulator.save()
        assert len(states) == 2
        later = [scaled(simulator, actions_for(simulator, 2, seed=step + 1)) for step in range(self.steps)]
        expected = [simulator.step(actions, everyone(simulator)) for actions in later]
        begin(simulator, [3, 4])
        simulator.restore(states, torch.arange(2))
        again = [simulator.step(actions, everyone(simulator)) for actions in later]
        begin(elsewhere, [3, 4])
        elsewhere.restore(states[::-1], torch.tensor([0, 1]))  # in the other order: states belong to no place
        moved = [elsewhere.step(actions.flip(0), everyone(elsewhere)) for actions in later]
        for wanted, here, there in zip(expected, again, moved, strict=True):
            assert all(same(told(wanted, row), told(here, row)) for row in range(2))
            assert all(same(told(wanted, row), told(there, 1 - row)) for row in range(2))

    def test_actions_beyond_one_are_clipped(self, made):
        one, other = made(2), made(2)
        begin(one)
        begin(other)
        ones = torch.ones(2, one.action_spec.size)
        bounded = torch.isfinite(one.action_spec.low) & torch.isfinite(one.action_spec.high)
        beyond = torch.where(bounded, 5.0, 1.0) * ones
        here = one.step(scaled(one, ones), everyone(one))
        there = other.step(scaled(other, beyond), everyone(other))
        assert all(same(told(here, row), told(there, row)) for row in range(2))

    def test_a_chunk_is_its_actions_one_by_one(self, made):
        whole, single = (Environment(made(2), Rules(seed=1)) for _ in range(2))
        actions = actions_for(whole.simulator, 2, self.steps)
        assert same(whole.reset().observation, single.reset().observation)
        chunk = whole.step(actions)
        parts = [single.step(actions[:, index : index + 1]) for index in range(self.steps)]
        assert chunk.valid.all()
        assert same(chunk.rewards, torch.cat([part.rewards for part in parts], 1))
        assert same(chunk.observation, parts[-1].observation)

    def test_a_time_limit_truncates_keeps_the_final_observation_and_begins_the_next_episode(self, made):
        environment = Environment(made(2), Rules(seed=1, max_steps=2))
        environment.reset()
        actions = actions_for(environment.simulator, 2, 3)
        chunk = environment.step(actions)
        ends = [[False, True, False]] * 2
        assert (chunk.truncated | chunk.terminated).tolist() == ends
        assert chunk.valid.tolist() == [[True, True, False]] * 2
        assert (chunk.rewards[:, 2] == 0).all()
        assert chunk.ended.tolist() == [0, 1]
        assert chunk.next_episode.tolist() == [1, 1]
        other = made(2)
        begin(other, [environment.seed_of(env, 0) for env in range(2)])
        for index in range(2):
            moved = other.step(scaled(other, actions[:, index]), everyone(other))
        assert same(chunk.final, moved.observation)
        assert same(chunk.observation, begin(other, [environment.seed_of(env, 1) for env in range(2)]))

    def test_members_of_a_group_begin_alike(self, made):
        environment = Environment(made(4), Rules(seed=2, group_size=2, max_steps=1))
        for epoch in range(2):
            start = environment.reset(epoch).observation
            assert same(rows_of(start, torch.tensor([0, 2])), rows_of(start, torch.tensor([1, 3])))
        after = environment.step(actions_for(environment.simulator, 4, 1)).observation
        assert same(rows_of(after, torch.tensor([0, 2])), rows_of(after, torch.tensor([1, 3])))

    def test_a_restored_environment_goes_on_bit_for_bit(self, made):
        rules = Rules(seed=3, max_steps=self.steps)
        environment, elsewhere = Environment(made(2), rules), Environment(made(2), rules)
        environment.reset()
        environment.step(actions_for(environment.simulator, 2, self.steps - 1))
        saved = environment.state_dict()
        actions = [actions_for(environment.simulator, 2, 2, seed=step + 1) for step in range(2)]
        expected = [environment.step(each) for each in actions]
        elsewhere.load_state_dict(saved)
        for wanted, each in zip(expected, actions, strict=True):
            found = elsewhere.step(each)
            for name in ("rewards", "valid", "observation", "final", "episodes", "next_episode"):
                assert same(getattr(wanted, name), getattr(found, name)), name
