"""An agent written on a framework of other people is trained as it is: it is given a base URL and a key."""

from __future__ import annotations

import pytest

import rlinf
from tests.runs.library import small

agents = pytest.importorskip("agents", reason="the framework `openai-agents` is not installed (extra [dev])")
openai = pytest.importorskip("openai")
agents.set_tracing_disabled(True)


@agents.function_tool(strict_mode=False)
def double(x: int = 0) -> str:
    """Twice a number."""
    return str(2 * x)


async def worker(task, llm):
    """As its documentation has it; the model is too small to call the tool."""
    client = openai.AsyncOpenAI(base_url=llm.base_url, api_key=llm.api_key)
    model = agents.OpenAIChatCompletionsModel("policy", client)
    settings = agents.ModelSettings(max_tokens=4)
    one = agents.Agent(name="one", model=model, model_settings=settings)
    first = await agents.Runner.run(one, task.text)
    second = await agents.Runner.run(one, [*first.to_input_list(), {"role": "user", "content": ">"}])
    await client.close()
    return str(second.final_output).count("7") / 4


@pytest.mark.slow
def test_an_agent_of_openais_framework_learns(tmp_path):
    more = {"algorithm.prompts_per_step": 8, "algorithm.group_size": 4, "evaluation.problems": 4, "lr": 3e-2}
    found = rlinf.train(small.MODEL, agent=worker, steps=6, run_dir=tmp_path / "run", trace=False, **more)
    rows = [row for row in found.metrics if "reward/mean" in row]
    assert all(row["episodes/calls"] == 2 for row in rows)
    assert all(row["episodes/failed"] == 0 for row in rows)
    assert all(row["episodes/branches"] < 0.2 for row in rows)  # it leaves out answers without a word
    assert rows[-1]["reward/mean"] > rows[0]["reward/mean"] + 0.1
