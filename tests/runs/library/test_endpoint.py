"""A session whose agents are written on OpenAI's client, and that learns from what they say through it."""

from __future__ import annotations

import pytest

from tests.runs.library.small import sevens, small

openai = pytest.importorskip("openai")
pytest.importorskip("aiohttp")


async def foreign(task, llm):
    """An agent that knows a URL and a key alone."""
    async with openai.AsyncOpenAI(base_url=llm.base_url, api_key=llm.api_key, max_retries=0) as client:
        first = await client.completions.create(model="policy", prompt=task)
        second = await client.completions.create(model="policy", prompt=f"{task}{first.choices[0].text}>")
    return sevens(first.choices[0].text) + sevens(second.choices[0].text)


async def test_an_agent_on_a_foreign_client_learns_and_its_keys_die_with_it(tmp_path):
    seen = []

    async def agent(task, llm):
        seen.append((llm.base_url, llm.api_key))
        return await foreign(task, llm)

    async with small(tmp_path) as session:
        metrics = await session.train(session.gather(["7?", "1?"], agent))
        assert metrics["episodes"] == 8
        assert metrics["episodes/failed"] == 0
        assert metrics["episodes/calls"] == 2
        assert len({key for _, key in seen}) == 8
        async with openai.AsyncOpenAI(base_url=seen[0][0], api_key=seen[0][1], max_retries=0) as client:
            with pytest.raises(openai.AuthenticationError, match=r"episode.*over"):
                await client.completions.create(model="policy", prompt="1?")
        metrics = await session.train(session.gather(["7?", "1?"], agent))  # the same endpoint still listens
        assert metrics["episodes/failed"] == 0
    async with openai.AsyncOpenAI(base_url=seen[0][0], api_key=seen[0][1], max_retries=0) as client:
        with pytest.raises(openai.APIConnectionError):
            await client.completions.create(model="policy", prompt="1?")


async def test_a_served_session_learns_from_feedback_while_it_serves(tmp_path, capsys):
    async with (
        small(tmp_path, algorithm={"name": "reinforce_pp", "kl": None}) as session,
        session.serve(token="t") as served,
        openai.AsyncOpenAI(base_url=served.url, api_key="t", max_retries=0) as client,
    ):
        groups = []
        for _ in range(4):
            done = await client.completions.create(model="policy", prompt="7?")
            assert served.feedback(sevens(done.choices[0].text), response=done.id)
            groups.append(await anext(served))
        await session.train(groups)
        done = await client.completions.create(model="policy", prompt="7?")
        assert served.feedback(1.0, response=done.id)
        (sample,) = (await anext(served)).samples
        assert set(sample.learned(sample.versions).tolist()) == {1}
        for _ in range(2):
            await client.chat.completions.create(model="policy", messages=[{"role": "user", "content": "7?"}])
    said = [line for line in capsys.readouterr().out.splitlines() if "warning: " in line]
    assert len([line for line in said if "joined as they are" in line]) == 1, said
