"""A team that shares one model: a planner splits a list, workers add up its parts at the same time, an answerer joins.

    python examples/team.py            # half a minute on a CPU
    python launch.py --config configs/agents/team.yaml            # for longer

What is wanted is the sum of three or four digits, modulo 4, and each agent reads at most two. You will see the reward
of each role rise: each is rewarded for its own part of the work, the planner for the whole.
"""

import asyncio
import itertools
import random

import rlinf

MODEL = {"model_type": "qwen2", "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 1}
MODEL |= {"num_attention_heads": 4, "num_key_value_heads": 2}
BASE = 4
MOST = 2  # digits that a worker or the answerer reads


def _sum(digits):
    return str(sum(int(digit) for digit in digits) % BASE)


def _parts(digits, count):
    """The list in so many parts of about equal length."""
    length = -(-len(digits) // count)
    return [digits[start : start + length] for start in range(0, len(digits), length)]


_ALL = ["".join(digits) for length in (3, 4) for digits in itertools.product("0123", repeat=length)]
random.Random(0).shuffle(_ALL)
LISTS = [{"prompt": digits, "answer": _sum(digits)} for digits in _ALL[60:]]
HELD_OUT = [{"prompt": digits, "answer": _sum(digits)} for digits in _ALL[:60]]


async def team(task, llm):
    """Works on a list; each role is rewarded for its own part of the work, the planner for the whole."""
    planner, worker, answerer = llm.agent("planner"), llm.agent("worker"), llm.agent("answerer")

    async def ask(agent, text):
        return (await agent.generate(text, max_new_tokens=1)).text

    plan = await ask(planner, f"p{'*' * len(task.text)}=")
    if plan not in ("1", "2", "3"):
        return {"planner": -1.0}
    parts = [part[:MOST] for part in _parts(task.text, int(plan))]
    said = await asyncio.gather(*(ask(worker, f"w{part}=") for part in parts))
    sums = "".join(one for one in said if one.isdigit())[:MOST]
    answer = await ask(answerer, f"a{sums}=")
    return {
        "planner": float(answer == task.answer),
        "worker": sum(one == _sum(part) for one, part in zip(said, parts, strict=True)) / len(parts),
        "answerer": float(answer == _sum(sums)),
    }


def told(step, metrics):
    if step % 3 == 0:
        roles = {name: max(0.0, metrics[f"agent/{name}/reward"]) for name in ("planner", "worker", "answerer")}
        print(f"step {step:2}", *(f"  {name} {x:4.0%} {'#' * round(15 * x):15}" for name, x in roles.items()))


if __name__ == "__main__":
    rlinf.train(
        MODEL,
        data=LISTS,
        agent=team,
        tokenizer={"characters": "0123paw*="},
        algorithm={"name": "grpo", "entropy_bonus": 0.03},
        steps=30,
        prompts_per_step=16,
        group_size=16,
        epochs=4,
        lr=1e-3,
        max_new_tokens=1,
        run_dir="outputs/team",
        callbacks=[told],
    )
