"""Clients without a key of an agent: conversations become sessions, and feedback makes them groups."""

from __future__ import annotations

import asyncio

import pytest

from rlinf.agents.endpoint.endpoint import Served, serving_config
from rlinf.config.text import EndpointConfig
from rlinf.runtime.base.errors import UserError
from tests.agents.endpoint.serving import CALL as CALLED
from tests.agents.endpoint.serving import THINKING, stand
from tests.agents.endpoint.test_limits import CHAT, COMPLETIONS, HI, post, saying

pytest.importorskip("aiohttp")


def going_on(told, text="more"):
    message = told["choices"][0]["message"]
    return {**HI, "messages": [*HI["messages"], message, {"role": "user", "content": text}]}


async def test_a_conversation_is_a_session_whatever_client_goes_on_with_it():
    async with stand("ab", "a", "b") as here, Served(EndpointConfig(), here.make) as served:
        _, first, _ = await post(here, CHAT, url=served.url)
        _, other, _ = await post(here, CHAT, saying("Ho"), url=served.url)
        _, second, _ = await post(here, CHAT, going_on(first), url=served.url, Authorization="Bearer x")
        assert [each.llm.counts().calls for each in served.sessions.values()] == [1, 2]  # last asked, last
        assert served.feedback(0.5, response=second["id"])
        group = await anext(served)
        (sample,) = group.samples
        said = [int(token) for number in (0, 2) for token in here.model.calls[number][1]]
        assert sample.learned(sample.response_ids).tolist() == said
        assert sample.reward == 0.5
        assert served.feedback(1.0, response=other["id"])
        assert (await anext(served)).prompt.id != group.prompt.id
        assert served.sessions == {}


async def test_an_answer_at_the_second_try_and_without_its_reasoning_is_gone_on_from_in_its_session():
    thought = "<think>\nso\n</think>\n\n"
    texts = (f"{thought}ab", f"{thought}{CALLED}", f"{thought}ba")
    tool = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
    async with stand(*texts, template=THINKING) as here, Served(EndpointConfig(), here.make) as served:
        asked = {**HI, "max_tokens": 400, "tools": [tool], "tool_choice": "required"}
        _, told, _ = await post(here, CHAT, asked, url=served.url)
        message = told["choices"][0]["message"]
        assert message.pop("reasoning_content") == "so"
        result = {"role": "tool", "tool_call_id": message["tool_calls"][0]["id"], "content": "3"}
        more = {**asked, "messages": [*HI["messages"], message, result], "tool_choice": "auto"}
        _, last, _ = await post(here, CHAT, more, url=served.url)
        assert len(served.sessions) == 1
        assert served.feedback(1.0, response=last["id"])
        (sample,) = (await anext(served)).samples
        assert sample.learned(sample.response_ids).tolist() == [
            int(t) for _, said, *_ in here.model.calls for t in said
        ]


async def test_clients_that_say_the_same_and_are_answered_the_same_go_on_in_sessions_of_their_own():
    async with stand("ab", "ab", "a", "b") as here, Served(EndpointConfig(), here.make) as served:
        firsts = [(await post(here, CHAT, url=served.url))[1] for _ in range(2)]
        asked = await asyncio.gather(*(post(here, CHAT, going_on(first), url=served.url) for first in firsts))
        seconds = [told for _, told, _ in asked]
        assert [each.llm.counts().calls for each in served.sessions.values()] == [2, 2]
        for told in seconds:
            assert served.feedback(1.0, response=told["id"])
        assert served.judged == 2
        assert served.sessions == {}


async def test_a_branch_that_nobody_judged_is_not_learned_where_a_session_is_ended():
    async with stand("ab", "a", "b") as here, Served(EndpointConfig(), here.make) as served:
        _, told, _ = await post(here, CHAT, {**HI, "n": 2}, url=served.url)
        assert served.feedback(1.0, response=told["id"], choice=1, end=True)
        assert [sample.reward for sample in (await anext(served)).samples] == [1.0]


async def test_names_tie_calls_to_a_session_and_its_reward_ends_it():
    async with stand("ab", "a") as here, Served(EndpointConfig(), here.make) as served:
        root = served.url.removesuffix("/v1")
        await post(here, CHAT, url=f"{root}/s/mine/v1")
        await post(here, CHAT, saying("Ho"), url=served.url, **{"X-Session-Id": "mine"})
        assert [*served.sessions] == ["mine"]
        status, _, _ = await post(here, "/feedback", {"session": "mine", "reward": 1}, url=served.url)
        assert status == 200
        group = await anext(served)
        assert [(sample.reward, sample.index) for sample in group.samples] == [(1.0, 0), (1.0, 1)]


async def test_choices_are_judged_one_by_one_and_the_last_one_ends_the_session():
    async with stand("ab", "a", "b") as here, Served(EndpointConfig(), here.make) as served:
        _, told, _ = await post(here, CHAT, {**HI, "n": 3}, url=served.url)
        for choice in range(3):
            body = {"response": told["id"], "choice": choice, "reward": choice}
            assert (await post(here, "/feedback", body, url=served.url))[0] == 200
        group = await anext(served)
        assert sorted(sample.reward for sample in group.samples) == [0.0, 1.0, 2.0]
        assert len({sample.prompt.id for sample in group.samples}) == 1


async def test_feedback_that_fits_nothing_is_counted_and_said():
    async with stand() as here, Served(EndpointConfig(), here.make) as served:
        _, told, _ = await post(here, COMPLETIONS, {"model": "policy", "prompt": "Hi"}, url=served.url)
        good = {"response": told["id"], "reward": 1.0, "end": False}
        assert (await post(here, "/feedback", good, url=served.url))[0] == 200
        for body, status in [
            (good, 404),
            ({"response": "x", "reward": 1}, 404),
            ({"session": "x", "reward": 1}, 404),
            ({"response": told["id"], "session": "x", "reward": 1}, 400),
            ({"response": told["id"]}, 400),
            ({"response": told["id"], "reward": "good"}, 400),
            ({"response": told["id"], "reward": 1, "choice": 5}, 404),
            ({"response": told["id"], "reward": 1, "chioce": 0}, 400),
        ]:
            assert (await post(here, "/feedback", body, url=served.url))[0] == status, body
        assert served.unmatched == 4
        assert len(served.sessions) == 1
        assert served.feedback(0.0, session=next(iter(served.sessions)))
        assert (await anext(served)).samples[0].reward == 0.0


async def test_pages_in_browsers_and_other_machines_are_answered_with_a_token_alone():
    async with stand() as here, Served(EndpointConfig(), here.make) as served:
        status, told, _ = await post(here, CHAT, url=served.url, Origin="https://example.org")
        assert (status, served.sessions) == (403, {})
        assert "agent.endpoint.token" in told["error"]["message"]
    with pytest.raises(UserError, match=r"whoever reaches 0\.0\.0\.0"):
        serving_config(EndpointConfig(), {"host": "0.0.0.0"})
    assert serving_config(EndpointConfig(), {"host": "0.0.0.0", "token": "t"}).token == "t"
    assert serving_config(EndpointConfig(), {"host": "[::1]"}).host == "::1"
    with pytest.raises(UserError, match=r"ports.*host"):
        serving_config(EndpointConfig(), {"ports": 1})


async def test_a_token_is_asked_for():
    async with stand() as here, Served(EndpointConfig(token="secret"), here.make) as served:
        assert (await post(here, CHAT, url=served.url))[0] == 401
        assert (await post(here, CHAT, url=served.url, Authorization="Bearer wrong"))[0] == 401
        assert (await post(here, "/feedback", {"session": "x", "reward": 1}, url=served.url))[0] == 401
        assert (await post(here, CHAT, url=served.url, **{"X-Api-Key": "secret"}))[0] == 200
        assert here.endpoint.sessions.keys() == {here.key}


async def test_what_nobody_judges_is_forgotten_and_closing_ends_who_waits():
    async with stand() as here:
        async with Served(EndpointConfig(), here.make) as served:
            await post(here, CHAT, url=served.url)
            next(iter(served.sessions.values())).used -= 4000
            await post(here, CHAT, saying("Ho"), url=served.url)
            assert (served.forgotten, len(served.sessions)) == (1, 1)
            taking = asyncio.create_task(anext(served, None))
            await asyncio.sleep(0)
        assert await taking is None
        assert [group async for group in served] == []
