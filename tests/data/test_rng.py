"""Keyed randomness."""

from hypothesis import given
from hypothesis import strategies as st

from rlinf.data.rng import mix, mixed, permutation


def test_the_key_decides():
    assert mix(1, 2, 3) == mix(1, 2, 3)
    numbers = {mix(a, b, c) for a in range(10) for b in range(10) for c in range(10)}
    assert len(numbers) == 1000
    assert mix(0) != mix(0, 0)


@given(st.lists(st.integers(-(2**70), 2**70)))
def test_it_fits_an_int64(key):
    assert 0 <= mix(*key) < 2**63


def test_neighbouring_keys_have_nothing_in_common():
    changed = [bin(mix(5, i) ^ mix(5, i + 1)).count("1") for i in range(500)]
    assert 30 < sum(changed) / 500 < 33  # half of 63 bits


def test_orders_differ_by_every_part_of_the_key():
    orders = {tuple(permutation(20, *key)) for key in [(0, 0, 0), (1, 0, 0), (0, 1, 0), (0, 0, 1)]}
    assert len(orders) == 4
    assert tuple(permutation(20, 3, 1)) == tuple(permutation(20, 3, 1))
    assert sorted(permutation(20, 3)) == list(range(20))


@given(st.integers(-(2**70), 2**70), st.lists(st.integers(0, 2**40), min_size=1), st.integers(0, 2**40))
def test_many_keys_at_once_give_what_each_gives_alone(seed, envs, time):
    assert mixed(seed, envs, time).tolist() == [mix(seed, env, time) for env in envs]
