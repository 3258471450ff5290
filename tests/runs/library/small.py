"""A session that starts in a moment: a new model of a few thousand weights that speaks digits."""

from __future__ import annotations

from typing import Any

from rlinf import Session
from rlinf.rewards.base import trusted

MODEL = {
    "model_type": "qwen2", "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2,
    "num_key_value_heads": 1, "max_position_embeddings": 64,
}  # fmt: skip
TOKENIZER = {"characters": "0123456789<>?"}


def small(directory: Any, **more: Any) -> Session:
    """It writes no trace, and one line per ten steps."""
    given = {"model": MODEL, "tokenizer": TOKENIZER, "lr": 1e-2, "max_new_tokens": 3, "group_size": 4, "trace": False}
    return Session.local(run_dir=directory / "run", **{**given, **more})


@trusted
def sevens(response: str) -> float:
    """Rewards every 7."""
    return response.count("7") / 3


def playing(session: Session, turns: int = 2) -> Any:
    """An episode of so many turns, rewarded for every 7."""

    async def episode(task: Any) -> Any:
        async with session.conversation() as c:
            c.user(str(task))
            for _ in range(turns):
                reply = await c.generate()
                c.reward(sevens(reply.text))
                c.user(">")
            return c.trajectory()

    return episode
