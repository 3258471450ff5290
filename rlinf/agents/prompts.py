"""What a program passes as prompts, as `Prompt`s: texts, messages, token ids, rows with a prompt and an answer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from rlinf.agents.chat import ChatFormat, copied
from rlinf.agents.checks import WrongType, WrongValue, shown, token_ids
from rlinf.data.sample import Prompt, read_only


def prompt_of(given: Any, id: int, chat: ChatFormat, vocabulary: int | None, call: str) -> Prompt:
    """A prompt.

    Args:
        given: a text, which stands as it is; messages, which get the chat template; token ids; a mapping with `prompt`
            (one of those) and perhaps `answer` and other columns; or a `Prompt`, whose tokens are checked.
        id: of the prompt, unless it is one already.
        chat: encodes it.
        vocabulary: the model has ids below it; None: nobody knows.
        call: for errors.

    Raises:
        TypeError: something else.
        ValueError: there is no token, or one that the model does not have.
        UserError: the chat template refuses the messages.
    """
    if isinstance(given, Prompt):
        token_ids(given.token_ids, vocabulary, call)
        return given
    if isinstance(given, Mapping):
        if "prompt" not in given:
            raise WrongType(f"{call}: the row {shown(dict(given))} has no `prompt`; give it one, and an `answer`")
        rest = {name: value for name, value in given.items() if name not in ("prompt", "answer")}
        made = prompt_of(given["prompt"], id, chat, vocabulary, call)
        return replace(made, answer=str(given.get("answer", "")), row={**made.row, **rest})
    if isinstance(given, str):
        return Prompt(id, _some(chat.ids(given, first=True), given, call), given)
    if are_messages(given, call):
        ids = _some(chat.opening(given), given, call)
        return Prompt(id, ids, str(chat.tokenizer.decode(ids)), row={"messages": copied(given)})
    if isinstance(given, (list, tuple, np.ndarray)):
        ids = token_ids(given, vocabulary, call)
        return Prompt(id, ids, str(chat.tokenizer.decode(ids)))
    raise WrongType(f"{call}: {shown(given)} is no prompt; give a text, a list of messages, token ids or a Prompt")


def handed_out(task: Any) -> Any:
    """A task as a program is given it: of a prompt a copy, so that nothing the program does to it reaches the reward,
    the record, or the other attempts at it. Tasks of one's own are passed as they are."""
    if not isinstance(task, Prompt):
        return task
    return replace(task, token_ids=read_only(task.token_ids), row=copied(task.row))


def are_messages(given: Any, call: str) -> bool:
    """Whether it is a list of messages.

    Raises:
        TypeError: of messages that have no role.
    """
    if not isinstance(given, (list, tuple)) or not given or not all(isinstance(message, Mapping) for message in given):
        return False
    if any("role" not in message for message in given):
        raise WrongType(f"{call}: {shown(given)}: every message needs a `role` and a `content`")
    return True


def _some(ids: np.ndarray, given: Any, call: str) -> np.ndarray:
    if not len(ids):
        raise WrongValue(f"{call}: the prompt {shown(given)} has no token; give at least one")
    return ids
