"""Players: programs that answer in the model's place, whose words the model imitates before it learns by rewards.

In: `player(task, messages) -> text`, plain or async: a rule, a search, answers that somebody wrote, a call of another
model. Out: answers as an engine gives them, so an episode records what a player says as if the model had said it.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from transformers import PreTrainedTokenizerBase

from rlinf.agents.arguments import WrongType, shown
from rlinf.data.sample import Prompt
from rlinf.engines.base import Completion
from rlinf.runtime.base.errors import UserError
from rlinf.runtime.base.tasks import in_thread

Player = Callable[..., Any]
"""`player(task, messages) -> text`: the answer to what was said so far in an episode of the task. A plain one works in
a thread."""


@dataclass(frozen=True, slots=True)
class Seat:
    """The model's place in an episode, with a player on it."""

    player: Player
    """Answers."""
    tokenizer: PreTrainedTokenizerBase
    """The model's."""

    async def answer(self, task: Prompt, messages: Sequence[Mapping[str, Any]], most: int) -> Completion:
        """Answer once, with an end token.

        Args:
            task: that is worked on.
            messages: all that was said.
            most: tokens of the longest answer.

        Raises:
            TypeError: the player returned no text.
            UserError: the model could not say it: it is too long, or has characters that the tokenizer does not know.
        """
        player, own = self.player, [dict(message) for message in messages]
        if inspect.iscoroutinefunction(player) or inspect.iscoroutinefunction(type(player).__call__):
            text = await player(task, own)
        else:
            text = await in_thread(lambda: player(task, own))
        if not isinstance(text, str):
            raise WrongType(f"agent.player: it returned {shown(text)}; return a text, the answer to the messages")
        end, unknown = self.tokenizer.eos_token_id, self.tokenizer.unk_token_id
        if end is None:
            raise UserError("agent.player: the tokenizer has no end token (eos_token), so no answer can be ended")
        ids = np.asarray([*self.tokenizer(text, add_special_tokens=False)["input_ids"], end], np.int64)
        if unknown is not None and unknown != end and unknown in ids:
            raise UserError(f"agent.player: it said {shown(text)}, of which the tokenizer does not know each character")
        if len(ids) > most:
            raise UserError(
                f"agent.player: it said {shown(text)}, {len(ids)} tokens with the end, and an answer has at most "
                f"rollout.max_new_tokens={most}"
            )
        return Completion(0, ids, np.zeros(len(ids), np.float32), np.zeros(len(ids), np.int32), "stop")
