"""What is said when answers cannot be scored: at once, again when it changes, and at the end."""

from rlinf.metrics.alarms import FailureAlarm, failures_text
from rlinf.rewards.base import MOST_ROWS, ScoreCounts


def failing(errors=0, timeouts=0, answers=100, remark="KeyError: 'x' (mine.py:3)"):
    return ScoreCounts(answers, timeouts, errors, remark if errors or timeouts else "")


def test_the_first_failure_is_told_at_once_with_its_remark():
    told = FailureAlarm().check("step 1", failing(errors=46, timeouts=1))
    assert told.startswith(
        "step 1: 47% of 100 answers were not scored: 1 timeout, 46 errors; first: KeyError: 'x' (mine.py:3)."
    )


def test_a_rate_that_stays_is_told_once_and_one_that_changes_a_lot_again():
    alarm = FailureAlarm()
    rates = [0, 40, 45, 35, 70, 72, 0, 0, 30]
    told = [alarm.check(f"step {step}", failing(errors=rate)) for step, rate in enumerate(rates)]
    assert [text is not None for text in told] == [False, True, False, False, True, False, True, False, True]
    assert told[6].startswith("step 6: ")


def test_few_answers_that_vary_by_chance_are_told_once():
    alarm = FailureAlarm()
    told = [alarm.check("step", failing(errors=errors, answers=4)) for errors in (2, 1, 3, 2)]
    assert [text is not None for text in told] == [True, False, False, False]


def test_another_kind_of_failure_is_news_once():
    alarm = FailureAlarm()
    found = (failing(errors=5), failing(errors=5, timeouts=1), failing(errors=5), failing(errors=5, timeouts=1))
    assert [alarm.check("step", each) is not None for each in found] == [True, True, False, False]


def test_the_end_has_the_sums_of_all_steps_and_the_first_remark_of_all():
    alarm = FailureAlarm()
    for found in (failing(), failing(timeouts=2, remark="took longer than 2 s; killed\nTraceback"), failing(errors=1)):
        alarm.check("step", found)
    assert failures_text(alarm.total) == (
        "1% of 300 answers were not scored: 2 timeouts, 1 error; first: took longer than 2 s; killed"
    )


def test_a_step_without_an_answer_says_nothing():
    alarm = FailureAlarm()
    alarm.check("step 1", failing(errors=100))
    assert alarm.check("step 2", ScoreCounts()) is None


def test_what_several_judges_counted_adds_up_and_stays_small():
    rows = tuple({"index": index} for index in range(6))
    total = ScoreCounts.total([ScoreCounts(8, 1, 5, "a", rows), ScoreCounts(8, 0, 6, "b", rows), ScoreCounts(8)])
    assert (total.answers, total.timeouts, total.errors, total.remark) == (24, 1, 11, "a")
    assert total.failed == 0.5
    assert len(total.rows) == MOST_ROWS
