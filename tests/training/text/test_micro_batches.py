"""Which samples are computed together: order, budget, balance, and independence of time."""

import itertools
import random
from functools import partial

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlinf.data.packing import Row, cut_tree
from rlinf.data.sample import Group, Prompt
from rlinf.training.policy import advantage_rows
from rlinf.training.schedule import (
    BatchPlan,
    BatchSchedule,
    ForwardBackward,
    InOrder,
    MicroBatchPacker,
    OptimizerStep,
    Packing,
    Recompute,
    tree_rows,
)
from tests.actors import toys


def group(number):
    return Group(Prompt(number, np.array([1])), ())


def through(order, numbers):
    order.begin()
    out = [ready.prompt.id for number in numbers for ready in order.push(group(number))]
    at_once = len(out)
    return out + [ready.prompt.id for ready in order.close()], at_once


@given(st.lists(st.integers(1, 9), min_size=1, max_size=5), st.randoms())
def test_groups_go_on_in_the_order_of_their_ids_as_soon_as_they_can(sizes, random):
    order, start = InOrder(), 0
    for size in sizes:
        numbers = list(range(start, start + size))
        random.shuffle(numbers)
        order.begin()
        seen, released = set(), []
        for number in numbers:
            seen.add(number)
            released += [ready.prompt.id for ready in order.push(group(number))]
            complete = next(n for n in range(start, start + size + 1) if n not in seen)
            assert released == list(range(start, complete))
        assert list(order.close()) == []
        start += size


@given(st.lists(st.lists(st.integers(0, 30), unique=True, min_size=1), min_size=1, max_size=5), st.randoms())
def test_whatever_the_ids_are_nothing_is_lost_and_time_does_not_matter(steps, random):
    one, other = InOrder(), InOrder()
    for numbers in steps:
        expected, _ = through(one, numbers)
        assert sorted(expected) == sorted(numbers)
        shuffled = random.sample(numbers, len(numbers))
        assert through(other, shuffled)[0] == expected
        other = InOrder(other.state)  # as after a resume


def test_ids_that_begin_anew_in_every_step_are_learned():
    order = InOrder()
    at_once = [through(order, range(5))[1] for _ in range(5)]
    assert at_once == [5, 0, 5, 5, 5]


def test_after_a_gap_the_next_step_is_expected_where_the_last_ended():
    order = InOrder()
    assert through(order, [0, 1, 5, 4])[0] == [0, 1, 4, 5]
    assert through(order, [6, 7]) == ([6, 7], 2)


def rows(sizes):
    return [Row(np.zeros(1, np.int64), np.full(size - 1, number)) for number, size in enumerate(sizes)]


SIZES = st.lists(st.integers(2, 20), max_size=40)


@given(SIZES, st.integers(1, 4), st.integers(1, 30), st.randoms())
def test_every_row_is_computed_once_within_the_budget_however_rows_come(sizes, ranks, budget, random):
    made, found = rows(sizes), []
    for pieces in range(2):
        cutter, rest, rounds = MicroBatchPacker(Packing(ranks, budget)), list(made), []
        while rest:
            count = random.randint(1, len(rest)) if pieces else 1
            rounds += cutter.push(rest[:count])
            rest = rest[count:]
        rounds += cutter.close()
        found.append([[tuple(map(id, part)) for part in dealt] for dealt in rounds])
    assert found[0] == found[1]
    assert sorted(key for dealt in found[0] for part in dealt for key in part) == sorted(map(id, made))
    size_of = {id(row): row.size for row in made}
    for dealt in found[0]:
        assert len(dealt) == ranks
        for part in dealt:
            assert len(part) <= 1 or sum(map(size_of.get, part)) <= budget


FORKS = st.lists(st.tuples(st.integers(0, 9), st.integers(0, 12), st.integers(1, 6)), min_size=1, max_size=20)


@given(FORKS, st.integers(1, 3), st.integers(5, 60), st.randoms(use_true_random=False))
def test_of_trees_what_is_read_is_within_the_budget(forks, ranks, budget, random):
    texts = [[1, 2]]
    for number, (other, kept, more) in enumerate(forks):
        texts.append([*texts[other % len(texts)][: 1 + kept], *range(100 * number, 100 * number + more)])
    made, packing = [Row(np.array(text[:1]), np.array(text[1:])) for text in texts], Packing(ranks, budget, trees=True)
    found = []
    for at_once in (len(made), 1):
        cutter, rounds = MicroBatchPacker(packing), []
        for start in range(0, len(made), at_once):
            rounds += cutter.push(tree_rows(made, packing)[start : start + at_once])
        rounds += cutter.close()
        found.append([[[id(row) for row in part] for part in dealt] for dealt in rounds])
    assert found[0] == found[1]
    assert sorted(key for dealt in rounds for part in dealt for key in map(id, part)) == sorted(map(id, made))
    read = 0
    for part in itertools.chain(*rounds):
        texts = [(*row.prompt_ids, *row.response_ids) for row in part]
        tokens = len({text[: end + 1] for text in texts for end in range(len(text))})
        assert len(part) == 1 or tokens <= budget
        read += tokens
    numbers = cutter.numbers()
    assert read <= cutter.fresh <= sum(row.size for row in made)
    assert numbers["tokens_read/saved"] == 1 - cutter.fresh / sum(row.size for row in made)


@given(FORKS, st.integers(1, 3), st.integers(2, 3), st.integers(12, 90), st.randoms(use_true_random=False))
def test_rows_that_one_rank_has_no_room_for_are_computed_apart(forks, ranks, context, budget, random):
    texts = [[1, 2]]
    for number, (other, kept, more) in enumerate(forks):
        texts.append([*texts[other % len(texts)][: 1 + kept], *range(100 * number, 100 * number + 4 * more)])
    made = [Row(np.array(text[:1]), np.array(text[1:])) for text in texts]
    packing = Packing(ranks, budget, trees=random.random() < 0.5, context=context)
    rest, found = list(tree_rows(made, packing)), []
    for at_once in (len(made), 1):
        cutter, rounds = MicroBatchPacker(packing), []
        for start in range(0, len(made), at_once):
            rounds += cutter.push(rest[start : start + at_once])
        rounds += cutter.close()
        found.append(sorted([[id(row) for row in part] for part in dealt] for dealt in rounds))
        assert all(len(dealt) == ranks for dealt in rounds)
    assert found[0] == found[1]
    assert sorted(key for dealt in rounds for part in dealt for key in map(id, part)) == sorted(map(id, made))
    for part in itertools.chain(*rounds):
        size_of = {row: row.size for row in part}
        long = max(size_of.values(), default=0) > budget // context
        texts = [(*row.prompt_ids, *row.response_ids) for row in part]
        read = (
            {text[: end + 1] for text in texts for end in range(len(text))}
            if packing.trees
            else range(sum(size_of.values()))
        )
        assert len(part) < 2 or len(read) <= budget
        assert packing.trees or not long or min(size_of.values()) > budget // context


def test_a_tree_is_cut_where_least_is_read_again():
    sizes = [20, 3, 3, 3]
    assert list(cut_tree("abcd", sizes, [0, 1, 2, 2], 23)) == [["a"], ["b", "c", "d"]]
    assert list(cut_tree("abcd", sizes, [0, 2, 2, 2], 22)) == [["a", "b", "c"], ["d"]]
    assert list(cut_tree("abcd", sizes, [0, 0, 2, 2], 26)) == [["a", "b", "c", "d"]]


def test_a_round_comes_out_as_soon_as_the_next_row_cannot_join_it():
    cutter = MicroBatchPacker(Packing(2, 10))
    assert list(cutter.push(rows([5, 5, 5, 5]))) == []
    (dealt,) = cutter.push(rows([2]))
    assert [sum(row.size for row in part) for part in dealt] == [10, 10]
    (last,) = cutter.close()
    assert [len(part) for part in last] == [1, 0]


@given(SIZES.filter(bool), st.integers(2, 4))
def test_no_rank_has_more_than_a_row_beyond_another(sizes, ranks):
    cutter = MicroBatchPacker(Packing(ranks, sum(sizes)))
    assert list(cutter.push(rows(sizes))) == []
    (dealt,) = cutter.close()
    loads = [sum(row.size for row in part) for part in dealt]
    assert max(loads) - min(loads) <= max(sizes)


@given(
    st.lists(st.integers(1, 30), max_size=20), st.integers(1, 3), st.integers(1, 40), st.randoms(use_true_random=False)
)
def test_the_rows_of_a_pair_are_never_parted(sizes, ranks, budget, random):
    made = rows([size for size in sizes for _ in range(2)])
    cutter, rest, rounds = MicroBatchPacker(Packing(ranks, budget, together=2)), list(made), []
    while rest:
        take = 2 * random.randint(0, 4)
        rounds += cutter.push(rest[:take])
        rest = rest[take:]
    rounds += cutter.close()
    places = {id(row): number for number, row in enumerate(made)}
    batches = [[places[id(row)] for row in batch] for dealt in rounds for batch in dealt]
    assert sorted(number for batch in batches for number in batch) == list(range(len(made)))
    assert all(batch[1::2] == [number + 1 for number in batch[::2]] for batch in batches)
    assert all(number % 2 == 0 for batch in batches for number in batch[::2])
    for batch in batches:
        assert len(batch) <= 2 or sum(made[number].size for number in batch) <= budget


def test_advantages_are_relative_to_the_group():
    batch = toys.groups(4)
    found = advantage_rows(toys.SPEC, batch)
    assert [len(rows) for rows in found.rows] == [len(judged.scored) for judged in batch]
    expected = [gain for judged in batch for gain in toys.advantages(judged)]
    assert found.advantages == pytest.approx(expected, abs=1e-5)
    assert [row.advantage for rows in found.rows for row in rows] == found.advantages


async def at_once(fn, *arguments, **more):
    return fn(*arguments, **more)


async def commands_of(batch, ranks=2, in_order=None, **steps):
    plan, rows_of = BatchPlan("train", (1, 0), **steps), partial(advantage_rows, toys.SPEC)
    made = BatchSchedule(rows_of, plan, Packing(ranks, 25), at_once, in_order=in_order)
    return made, [command async for command in made.commands(batch)]


async def test_each_epoch_goes_over_the_same_rows_and_ends_in_a_step():
    made, commands = await commands_of(toys.groups(7), in_order=InOrder(), epochs=3)
    per_epoch = len(commands) // 3
    epochs = [commands[start : start + per_epoch] for start in range(0, len(commands), per_epoch)]
    for number, epoch in enumerate(epochs):
        *learn, (one, other) = epoch
        assert isinstance(one, OptimizerStep)
        assert isinstance(other, OptimizerStep)
        if number:
            assert learn == [(Recompute(i), Recompute(i)) for i in range(per_epoch - 1)]
        else:
            assert all(part.compare and part.keep for command in learn for part in command)
    assert sum(len(part.rows) for command in epochs[0][:-1] for part in command) == sum(map(len, made.learned.rows))


async def test_minibatches_split_the_groups_anew_in_each_epoch():
    made, commands = await commands_of(toys.groups(9), epochs=2, minibatches=3, ranks=1, in_order=InOrder())
    parts, current = [], []
    for (command,) in commands:
        if isinstance(command, ForwardBackward):
            current += [id(row) for row in command.rows]
        else:
            parts.append(current)
            current = []
    assert len(parts) == 6
    everything = sorted(id(row) for rows in made.learned.rows for row in rows)
    assert sorted(parts[0] + parts[1] + parts[2]) == sorted(parts[3] + parts[4] + parts[5]) == everything
    assert {frozenset(part) for part in parts[:3]} != {frozenset(part) for part in parts[3:]}
    fresh = [command.compare for (command,) in commands if isinstance(command, ForwardBackward)]
    assert fresh.index(False) == sum(fresh)  # only while the weights are those that sampled
    assert any(fresh)
    again = (await commands_of(toys.groups(9), epochs=2, minibatches=3, ranks=1, in_order=InOrder()))[1]
    assert [len(o.rows) for (o,) in commands if isinstance(o, ForwardBackward)] == [
        len(o.rows) for (o,) in again if isinstance(o, ForwardBackward)
    ]


async def test_more_minibatches_than_groups_are_as_many_as_there_are_groups():
    _, commands = await commands_of(toys.groups(2), in_order=InOrder(), minibatches=5)
    assert sum(isinstance(command[0], OptimizerStep) for command in commands) == 2


async def test_by_arrival_groups_are_taken_as_they_come():
    batch = toys.groups(5)
    random.Random(1).shuffle(batch)
    made, _ = await commands_of(batch)
    assert [judged.prompt.id for judged in made.groups] == [judged.prompt.id for judged in batch]
