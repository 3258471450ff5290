"""A tiny model learns to write Python that passes unit tests, which run in a sandbox: who knows what it writes.

    python examples/code_with_tests.py            # half a minute on a CPU
    python launch.py --config configs/agents/code.yaml            # for longer

A task shows one value of a hidden function: `24` says f(2) = 4, which may be x+2 or x*2. Where the first program fails,
the agent is told of a test that it fails (`12`: f(1) = 2), and writes another. You will see more and more tests pass.
"""

import asyncio

import rlinf
from rlinf.sandbox.batched import returned

HIDDEN = ("x+1", "x+2", "x+3", "x*2", "x-1", "x-2")
TESTS = ("f(1)", "f(3)", "f(4)", "f(0)", "f(5)", "f(4) - f(1)")
"""A program of the right slope passes the last one, whatever its offset: something to learn from on the way."""
TASKS = [{"prompt": f"2{eval(each, {'x': 2})}", "answer": each} for each in HIDDEN]
MODEL = {
    "model_type": "qwen2",
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}

_known = {}  # programs that were run: a model that learns writes the same ones again and again


async def results(expression):
    """What the tests' expressions come to, None where one raises."""
    if expression not in _known:
        found = await returned(f"def f(x):\n    return {expression}", TESTS)
        _known[expression] = [each.value for each in found]
    return _known[expression]


async def agent(task, llm):
    """Two attempts; the reward is the share of tests that they pass, on average; who passes all needs no second one."""
    wanted = await results(task.answer)  # compared here: what a test expects never enters the sandbox
    messages, shares = [{"role": "user", "content": task.text}], []
    while len(shares) < 2 and 1.0 not in shares:
        answer = await llm.chat(messages, max_new_tokens=3, min_new_tokens=3)
        passed = [a == b for a, b in zip(await results(answer.text), wanted, strict=True)]
        shares.append(sum(passed) / len(passed))
        failed = passed.index(False) if False in passed[:5] else 0
        hint = f"{TESTS[failed][2]}{wanted[failed]}"  # f(1) = 3 is told as `13`: read by the model, and not learned
        messages += [answer.message, {"role": "user", "content": hint}]
    return (shares[0] + shares[-1]) / 2


async def main(steps=40, seed=0, run_dir="outputs/code"):
    async with rlinf.Session.local(
        model=MODEL,
        tokenizer={"characters": "x0123456789+-*"},
        algorithm={"name": "grpo_clip_higher", "entropy_bonus": 0.06},
        lr=3e-3,
        epochs=2,
        seed=seed,
        data=TASKS,
        max_rows=384,
        run_dir=run_dir,
        log_every=1000,
    ) as session:
        while session.step < steps:
            passed = await session.train(session.gather(await session.draw(len(TASKS)), agent, n=48))
            if session.step % 5 == 0:
                share = passed["reward/mean"]
                print(f"step {session.step:2}   tests passed {share:4.0%} {'#' * round(40 * share)}")


if __name__ == "__main__":
    asyncio.run(main())
