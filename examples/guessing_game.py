"""An episode of your own: a game over several turns, three guesses at a digit, after each "higher" or "lower".

    python examples/guessing_game.py            # half a minute on a CPU
    python launch.py --config configs/guessing-game.yaml            # the same episode as the flow of a configured run

A session keeps the tokens and learns from those that the model wrote. You will see the share of games that it wins: one
that cannot read what it is told comes to 43% at most.
"""

import asyncio

import rlinf

GAMES = [{"prompt": "?", "answer": digit} for digit in "1234567"]


async def play(session, hidden):
    async with session.conversation() as c:
        c.user("?")
        for _ in range(3):
            reply = await c.generate(max_new_tokens=1)
            if reply.text == hidden:
                return c.trajectory(reward=1.0)
            c.user("<" if reply.text > hidden else ">")  # read by the model, and not learned
        return c.trajectory(reward=0.0)


async def game(step, session):
    """One step of a configured run."""

    async def episode(prompt):
        return await play(session, prompt.answer)

    return await session.train(session.gather(step.prompts, episode, n=step.group_size))


async def main(steps=30, run_dir="outputs/guessing"):
    model = {"model_type": "qwen2", "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
    async with rlinf.Session.local(
        model={**model, "num_attention_heads": 4, "num_key_value_heads": 2},
        tokenizer={"characters": "1234567<>?"},
        algorithm="grpo",
        lr=5e-3,
        epochs=4,
        run_dir=run_dir,
        log_every=1000,
    ) as s:
        while s.step < steps:
            won = (await s.train(s.gather([*"1234567"] * 5, lambda hidden: play(s, hidden), n=8)))["reward/mean"]
            if s.step % 5 == 0:
                print(f"step {s.step:2}   won {won:4.0%} {'#' * round(50 * won)}")


if __name__ == "__main__":
    asyncio.run(main())
