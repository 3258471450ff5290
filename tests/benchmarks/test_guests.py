"""The model of guest engines: they decode as a sum over steps says, and where they make room no token is lost."""

from dataclasses import replace

import pytest

from benchmarks import guests
from benchmarks.changing_hands_modelled import Lengths

SMALL = replace(guests.CASES[0], lengths=Lengths(800, 0.6, 8_192), prompts=6, n=4, steps=5)


@pytest.mark.parametrize(("count", "tokens"), [(1, 700), (5, 90)])
def test_an_engine_takes_as_long_as_its_steps_one_by_one(count, tokens):
    engine = guests.Engine(count, 0.0)
    for number in range(count):
        engine.begin(guests.Answer(number, tokens))
    read = guests.PUBLISHED.token * guests.PROMPT * count
    rows = [guests.PUBLISHED.step + count * (guests.ROW + guests.CACHE * (guests.PROMPT + k)) for k in range(tokens)]
    # A step's cost is of its beginning; the model lets contexts grow during it: half a step's growth each.
    assert engine.next() == pytest.approx(read + sum(rows) + tokens * count * guests.CACHE / 2, rel=1e-9)
    assert len(engine.pass_to(engine.next())) == count


@pytest.mark.parametrize("guest", [None, guests.RESIDENT, guests.KEEPS, guests.PARKED])
@pytest.mark.parametrize("replan", [None, 0.05])
def test_every_answer_ends_with_its_tokens_whoever_generates_it(guest, replan):
    run = guests.Run(SMALL, 12, guest, 0.5, replan)
    run.seconds()
    whole = [group for group, count in run.answers.items() if count == SMALL.n]
    assert len(whole) >= SMALL.prompts * SMALL.steps
    for group in whole:
        lengths = run.lengths(group)
        assert run.tokens[group] == pytest.approx(sum(lengths) + SMALL.n * guests.PROMPT, abs=1e-3)
