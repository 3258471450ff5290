"""Nim, learned by playing against oneself: two players take one to three stones in turn, and the last stone wins.

    python examples/self_play.py            # half a minute on a CPU
    python launch.py --config configs/agents/self-play.yaml            # for longer

One model plays both. You will see how it does, before and after, against an opponent that plays at random and one that
makes no mistake; from those games it does not learn.
"""

import random

import rlinf

PILES = "0ABCDEFGHIJKL"  # how a pile of so many stones is written
MOVES = "123"

MODEL = {"model_type": "qwen2", "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1}
MODEL |= {"num_attention_heads": 4, "num_key_value_heads": 2}
OPPONENTS = {
    "perfect": lambda pile, draw: pile % 4 or 1,  # leaves a multiple of 4 wherever that can be done
    "random": lambda pile, draw: draw.randint(1, min(3, pile)),
}
GAMES = [{"prompt": PILES[stones], "answer": "itself"} for stones in range(5, 13)]
MATCHES = [
    {"prompt": PILES[stones], "answer": opponent}  # whoever begins can win these
    for opponent, times in (("perfect", 1), ("random", 4))
    for stones in (5, 6, 7, 9, 10, 11)
    for _ in range(times)
]


async def nim(task, llm):
    """Plays a game from a pile, against itself or the opponent that the task names."""
    stones, draw = PILES.index(task.text), random.Random(task.id)
    if (opponent := OPPONENTS.get(task.answer)) is not None:
        player = llm.agent(f"against-{task.answer}")
        return {player.name: float(await _won(stones, player, lambda pile: opponent(pile, draw)))}
    seats = (llm.agent, llm.past) if task.id % 2 else (llm.past, llm.agent)
    first, second = seats[0]("first"), seats[1]("second")
    won = await _won(stones, first, second)
    return {"first": 1.0, "second": -1.0} if won else {"first": -1.0, "second": 1.0}


async def _won(pile, first, second):
    """Whether the first of two players wins; one that takes what it may not loses."""
    players, turn = (first, second), 0
    while True:
        player = players[turn % 2]
        if hasattr(player, "generate"):
            said = (await player.generate(PILES[pile] + "=", max_new_tokens=1)).text
            taken = int(said) if said in MOVES and said else pile + 1
        else:
            taken = player(pile)
        if taken > pile:
            return turn % 2 == 1
        pile -= taken
        if pile == 0:
            return turn % 2 == 0
        turn += 1


if __name__ == "__main__":
    result = rlinf.train(
        MODEL,
        data=GAMES,
        evaluation=MATCHES,
        agent=nim,
        tokenizer={"characters": f"{MOVES}={PILES[1:]}"},
        steps=35,
        prompts_per_step=8,
        group_size=32,
        epochs=2,
        lr=5e-3,
        max_new_tokens=1,
        run_dir="outputs/self_play",
        log_every=1000,
    )
    for opponent in OPPONENTS:
        was, now = (each.metrics[f"agent/against-{opponent}/reward"] for each in (result.before, result.after))
        print(f"against {opponent:7}   before {was:4.0%}   after {now:4.0%} {'#' * round(40 * now)}")
