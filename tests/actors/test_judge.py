"""The judge: every sample gets a reward or a reason."""

import asyncio
from textwrap import dedent

import numpy as np
import pytest

from rlinf.actors.judge import Judge, RewardError
from rlinf.data.sample import Group, Prompt, Sample
from rlinf.joining.address import read
from rlinf.joining.connection import connect
from rlinf.joining.listener import Sent
from rlinf.rewards.base import Score, over_group, trusted
from rlinf.rewards.far_side import score
from rlinf.runtime.base.errors import UserError
from rlinf.runtime.system.system import ActorSystem
from tests.rewards.own_rewards import failing, graded, ranked, ranked_in_time, slowly


@pytest.fixture
async def system():
    async with ActorSystem.local() as running:
        yield running


def answered(*texts, truncated=False, **row):
    prompt = Prompt(0, np.array([1]), "21>", "12", {"level": 2, **row})
    return Group(
        prompt,
        tuple(
            Sample(prompt, i, np.array([1, 2]), np.zeros(2), np.zeros(2), text, truncated)
            for i, text in enumerate(texts)
        ),
    )


async def judge_of(system, reward=None, *, name="judge", **more):
    given = {} if reward is None else {"reward": reward}
    return (await system.spawn(Judge, name=name, **given, **more))[0]


@pytest.mark.parametrize(
    ("reward", "expected"),
    [
        (None, [1, 0]),
        (graded, [2, 0]),
        (slowly, [2, 3]),
        ("rlinf.rewards.exact", [1, 0]),
        ({"right": "rlinf.rewards.exact", "long": {"function": slowly, "weight": 10}}, [21, 30]),
    ],
)
@pytest.mark.parametrize("isolate", ["never", "always"])
async def test_rewards_are_filled_in(system, reward, expected, isolate):
    judge = await judge_of(system, reward, isolate=isolate, workers=1)
    group = await judge.score(answered("12", "212"))
    assert group.rewards == expected
    assert [sample.text for sample in group.samples] == ["12", "212"]
    assert {sample.outcome for sample in group.samples} == {"ok"}


async def test_workers_of_other_processes_join_the_rank_that_has_fewest_and_are_counted(tmp_path, monkeypatch):
    async def helps(where):
        try:
            return await score(await connect(*where.split(":"), "of this job"), ready.release, asyncio.Event())
        except Sent as elsewhere:
            return await helps(str(elsewhere))

    monkeypatch.setenv("RLINF_JOIN_TOKEN", "of this job")
    ready = asyncio.Semaphore(0)
    async with ActorSystem.local(3) as system:
        many = {"workers": 1, "isolate": "always", "join": "127.0.0.1:0", "directory": str(tmp_path)}
        judges = await system.spawn(Judge, name="judge", hosts=[0, 1, 2], **many)
        helpers = [asyncio.create_task(helps(read(tmp_path, "reward")[0])) for _ in judges]  # all at once
        for _ in judges:
            await ready.acquire()
        groups = await asyncio.gather(*(judge.score(answered("12", "21")) for judge in judges))
        assert [group.rewards for group in groups] == [[1, 0]] * 3
        assert [scored.joined for scored in await judges.scored()] == [1, 1, 1]
    assert await asyncio.gather(*helpers) == ["the job has ended"] * 3
    async with ActorSystem.local() as system:
        with pytest.raises(UserError, match=r"reward\.join.*reward\.isolate=always"):
            await judge_of(system, join="127.0.0.1:0")


async def test_a_sample_that_was_cut_says_so_and_is_scored(system):
    group = await (await judge_of(system)).score(answered("12", truncated=True))
    assert [(sample.reward, sample.outcome) for sample in group.samples] == [(1.0, "truncated")]


@pytest.mark.parametrize("isolate", ["never", "always"])
async def test_a_failure_is_an_outcome_with_a_remark_and_never_a_zero(system, isolate):
    judge = await judge_of(system, failing, isolate=isolate, workers=1)
    group = await judge.score(answered("0", "raise", "none", "5", truncated=True))
    assert [(sample.reward, sample.outcome) for sample in group.samples] == [
        (0.0, "truncated"), (None, "error"), (None, "error"), (5.0, "truncated"),
    ]  # fmt: skip
    assert "KeyError: 'raise'" in group.samples[1].remark
    assert "finite number" in group.samples[2].remark
    assert [sample.index for sample in group.scored] == [0, 3]


async def test_failures_are_counted_and_shown_until_asked_for(system):
    judge = await judge_of(system, failing, isolate="never")
    for texts in (("0", "raise"), ("1", "2"), ("raise", "none")):
        await judge.score(answered(*texts))
    found = await judge.scored()
    assert (found.answers, found.timeouts, found.errors) == (6, 0, 3)
    assert "KeyError: 'raise'" in found.remark
    assert [(row["response"], row["outcome"], row["reward"]) for row in found.rows] == [
        ("raise", "error", None), ("raise", "error", None), ("none", "error", None),
    ]  # fmt: skip
    assert all(row["remark"] for row in found.rows)
    assert (await judge.scored()).answers == 0


async def test_parts_and_what_was_extracted_come_along(system):
    judge = await judge_of(system, lambda response: Score(1, {"form": 0.5}, "x"), isolate="never")
    (sample,) = (await judge.score(answered("12"))).samples
    assert (sample.scores, sample.extracted) == ({"form": 0.5}, "x")


async def test_token_ids_reach_who_asks_for_them(system):
    judge = await judge_of(system, lambda response_ids, **row: sum(response_ids), isolate="never")
    assert (await judge.score(answered("12"))).rewards == [3]


async def test_an_async_reward_in_this_process_has_its_deadline(system):
    async def never(response):
        await asyncio.Event().wait()

    judge = await judge_of(system, never, isolate="never", timeout=0.05)
    (sample,) = (await judge.score(answered("12"))).samples
    assert (sample.reward, sample.outcome) == (None, "timeout")


async def test_functions_that_are_not_trusted_run_elsewhere(system, tmp_path, monkeypatch):
    (tmp_path / "elsewhere.py").write_text("import os\ndef pid(response):\n    return os.getpid()\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend("")  # a user's own file in the directory where the run was started
    here = await judge_of(system, "elsewhere.pid", name="here", isolate="never")
    there = await judge_of(system, "elsewhere.pid", workers=1)
    assert (await here.score(answered("1"))).rewards != (await there.score(answered("1"))).rewards


async def test_a_hang_and_a_crash_cost_one_sample_each(system, tmp_path, monkeypatch):
    (tmp_path / "rude.py").write_text(
        dedent("""
        import os, time
        def rude(response):
            if response == "hang": time.sleep(1000)
            if response == "exit": os._exit(1)
            return 1.0
    """)
    )
    monkeypatch.syspath_prepend(tmp_path)
    judge = await judge_of(system, "rude.rude", workers=2, timeout=2.0)
    groups = [answered("a", "hang"), answered("exit", "b"), answered("c", "d")]
    found = await asyncio.gather(*(judge.score(group) for group in groups))
    assert [[sample.outcome for sample in group.samples] for group in found] == [
        ["ok", "timeout"], ["error", "ok"], ["ok", "ok"],
    ]  # fmt: skip


async def test_a_column_that_is_not_there_is_one_clear_error(system):
    judge = await judge_of(system, lambda response, grade: 1, isolate="never")
    with pytest.raises(ValueError, match=r"'grade'.*'answer', 'level'"):
        await judge.score(answered("12"))


async def test_columns_that_are_known_are_checked_at_the_start(system):
    with pytest.raises(ValueError, match=r"takes \['grade'\]"):
        await judge_of(system, lambda response, grade: 1, isolate="never", columns=["level"])


async def test_a_reward_that_always_fails_ends_the_job_with_the_first_cause(system):
    calls = 0

    def broken(response):
        nonlocal calls
        calls += 1
        raise KeyError(calls)

    judge = await judge_of(system, broken, isolate="never")
    for _ in range(7):
        await judge.score(answered(*"12345678"))
    with pytest.raises(RewardError, match=r"broken.*64.*KeyError: 1(?s:.*)raise KeyError"):
        await judge.score(answered(*"12345678"))


async def test_one_success_among_the_failures_keeps_the_job_going(system):
    judge = await judge_of(system, lambda response: 1.0 if response == "ok" else None, isolate="never")
    for _ in range(5):
        await judge.score(answered("ok", *["no"] * 60))


async def test_a_module_that_is_not_installed_ends_the_job_at_once(system):
    def needy(response):
        import no_such_module  # noqa: F401

    judge = await judge_of(system, needy, isolate="never")
    with pytest.raises(RewardError, match=r"module named 'no_such_module'") as error:
        await judge.score(answered("12"))
    assert "\n" not in str(error.value)


async def test_a_function_that_cannot_be_sent_is_refused_with_advice(system):
    with pytest.raises(ValueError, match=r"isolate.*never"):
        await judge_of(system, lambda response: 1.0)


async def test_a_trusted_function_of_one_s_own_stays_here(system):
    seen = []

    @trusted
    def noted(response):
        seen.append(response)
        return 1.0

    assert (await (await judge_of(system, noted)).score(answered("12"))).rewards == [1.0]
    assert seen == ["12"]


# Rewards over groups --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("isolate", ["never", "always"])
@pytest.mark.parametrize("reward", [ranked, ranked_in_time])
async def test_a_reward_over_a_group_compares_its_answers(system, reward, isolate):
    judge = await judge_of(system, reward, isolate=isolate, workers=1)
    first, second = await asyncio.gather(judge.score(answered("123", "1", "12")), judge.score(answered("7")))
    assert (first.rewards, second.rewards) == ([2, 0, 1], [0])


@pytest.mark.parametrize("isolate", ["never", "always"])
async def test_rewards_over_groups_and_over_answers_are_summed(system, isolate):
    parts = {"rank": {"function": ranked, "weight": 10}, "right": "rlinf.rewards.exact", "length": slowly}
    judge = await judge_of(system, parts, isolate=isolate, workers=1)
    group = await judge.score(answered("123", "12"))
    assert group.rewards == [13, 3]
    assert group.samples[1].scores == {"rank": 0, "right": 1, "length": 2}


@pytest.mark.parametrize("isolate", ["never", "always"])
async def test_what_goes_wrong_over_a_group_is_the_outcome_of_its_answers_and_of_no_others(system, isolate):
    judge = await judge_of(system, {"rank": ranked, "own": failing}, isolate=isolate, workers=1)
    one_is_none = await judge.score(answered("none", "1", "23"))
    assert [sample.outcome for sample in one_is_none.samples] == ["error", "ok", "ok"]
    assert one_is_none.rewards == [1, 24]
    for text, remark in (("raise", "KeyError: '12'"), ("few", r"returned 1 scores for 2 answers")):
        group = await judge.score(answered(text, "1"))
        assert [sample.outcome for sample in group.samples] == ["error", "error"]
        assert remark in group.samples[1].remark
    assert (await judge.score(answered("4"))).rewards == [4]


async def test_a_group_over_which_a_reward_hangs_is_killed_at_its_deadline(system):
    judge = await judge_of(system, ranked, isolate="always", workers=1, timeout=3.0)
    hung, fine = await asyncio.gather(judge.score(answered("hang", "1")), judge.score(answered("12", "1")))
    assert [sample.outcome for sample in hung.samples] == ["timeout", "timeout"]
    assert fine.rewards == [1, 0]


async def test_functions_of_trl_and_with_keywords_get_groups_where_they_are_marked(system):
    @over_group
    def longest(prompts, completions, level, completion_ids, scale, **rest):
        assert (prompts, level, completion_ids) == (["21>"] * 2, [2, 2], [[1, 2], [1, 2]])
        assert rest["truncated"] == [False, False]
        return [scale * (len(one) == max(map(len, completions))) for one in completions]

    @over_group
    def everything(**row):
        assert "response" not in row
        return [row["level"] + len(response) for response in row["responses"]]

    judge = await judge_of(system, longest, isolate="never", args={"scale": 5})
    assert (await judge.score(answered("12", "3"))).rewards == [5, 0]
    judge = await judge_of(system, everything, isolate="never", name="other")
    assert (await judge.score(answered("12", "3"))).rewards == [4, 3]


async def test_a_group_reward_that_asks_for_one_response_is_told_what_there_is(system):
    with pytest.raises(ValueError, match=r"takes \['response'\].*'responses'"):
        await judge_of(system, over_group(lambda response: [1.0]), isolate="never", columns=["level"])


@pytest.mark.parametrize("isolate", ["never", "auto"])
async def test_answers_to_a_benchmark_are_scored_by_its_own_function(system, isolate):
    named = {
        "letters": ("rlinf.rewards.regex", {"pattern": "(?P<answer>[A-D])"}),
        "same": ("rlinf.rewards.exact.exact", {}),
    }
    judge = await judge_of(system, function="rlinf.rewards.exact.exact", isolate=isolate, workers=1, named=named)

    async def rewards(**row):
        return [sample.reward for sample in (await judge.score(answered("12", "so A", **row))).samples]

    assert await rewards() == [1.0, 0.0]
    assert await rewards(scored_by="same") == [1.0, 0.0]
    assert await rewards(scored_by="letters") == [0.0, 0.0]  # A is not 12
    assert (await judge.scored()).answers == 6
