"""From dialogues to token ids, with the tokens that are learned: by the chat template, or of plain text.

In: a `Dialogue`. Out: `Rendered` ids and a weight per token, 0 where a token is only read. The ids are those of the
whole text rendered once. Which of them the assistant said is told by the template's own `{% generation %}` blocks or,
where it has none, by what each of its turns adds to the rendering.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
from transformers import PreTrainedTokenizerBase

from rlinf.data.conversations.formats import Dialogue, Message
from rlinf.data.datasets.rows import DataError, Mismatch

Learn = Literal["assistant", "last", "all"]
"""Which tokens are learned: those of the assistant's turns; of its last turn; all, prompts included."""
_GENERATION = re.compile(r"\{%-?\s*generation\b")


@dataclass(frozen=True, slots=True, eq=False)
class Rendered:
    """A dialogue as a model reads it."""

    ids: np.ndarray
    """int64 [tokens]"""
    weights: np.ndarray
    """How much each token counts in the loss; 0: it is only read, float32 [tokens]."""
    prompt: int
    """Tokens before the first that is learned, at least one where there is a learned one."""


@dataclass(frozen=True, slots=True)
class Renderer:
    """Renders dialogues.

    Raises by its methods:
        DataError: a chat, and there is no chat template or none that tells the assistant's turns.
    """

    tokenizer: PreTrainedTokenizerBase
    """The model's."""
    learn: Learn = "assistant"
    """Which tokens are learned."""
    chat_args: Mapping[str, Any] = field(default_factory=dict)
    """Further arguments of the chat template."""

    def render(self, dialogue: Dialogue) -> Rendered:
        """A whole dialogue."""
        if isinstance(dialogue.completion, str):
            ids, weights = self._text(str(dialogue.prompt), dialogue.completion)
        else:
            ids, weights = self._chat(dialogue)
        if self.learn == "all":
            weights = np.ones(len(ids), np.float32)
        weights[:1] = 0.0  # nothing comes before it to tell it from
        learned = np.flatnonzero(weights)
        return Rendered(ids, weights, int(learned[0]) if len(learned) else len(ids))

    # Plain text --------------------------------------------------------------------------------------------------

    def _text(self, prompt: str, completion: str) -> tuple[np.ndarray, np.ndarray]:
        """The completion with an end token is learned; without a prompt, the whole text."""
        end = self.tokenizer.eos_token
        if end is None:
            raise Mismatch("the tokenizer has no end token (eos_token), so texts cannot be ended")
        if not completion.endswith(str(end)):
            completion += str(end)
        if not prompt:
            ids = self._ids(completion, special=True)
            return ids, np.ones(len(ids), np.float32)
        begun = self._open_ended(prompt)
        whole = self._ids(prompt + completion, special=True)
        if not np.array_equal(whole[: len(begun)], begun):  # a token reaches over the border, as none can that is made
            whole = np.concatenate([begun, self._ids(completion, special=False)])
        weights = np.zeros(len(whole), np.float32)
        weights[len(begun) :] = 1.0
        return whole, weights

    def _ids(self, text: str, *, special: bool) -> np.ndarray:
        ids = list(self.tokenizer(text, add_special_tokens=special)["input_ids"])
        end = self.tokenizer.eos_token_id
        if len(ids) > 1 and ids[-1] == ids[-2] == end:  # some tokenizers add one to the one that is there
            ids.pop()
        return np.asarray(ids, dtype=np.int64)

    def _open_ended(self, prompt: str) -> np.ndarray:
        ids = self._ids(prompt, special=True)
        ended = len(ids) and ids[-1] == self.tokenizer.eos_token_id and not prompt.endswith(self.tokenizer.eos_token)
        return ids[:-1] if ended else ids

    # Chats -------------------------------------------------------------------------------------------------------

    def _chat(self, dialogue: Dialogue) -> tuple[np.ndarray, np.ndarray]:
        template = self.tokenizer.chat_template
        if not template:
            name = self.tokenizer.name_or_path or type(self.tokenizer).__name__
            raise Mismatch(
                f"this is a chat, and the tokenizer {name} has no chat template: set data.chat_template to one (the "
                "Jinja text, or a file with it), or take a model that was trained on chats"
            )
        messages = [*dialogue.prompt, *dialogue.completion]  # type: ignore[list-item]  # both are messages
        given = {**self.chat_args, **dialogue.template_args, "tools": dialogue.tools}
        first = len(dialogue.prompt)
        spoken = [number for number, message in enumerate(messages) if message["role"] == "assistant"]
        learned = [number for number in spoken if number >= first and (self.learn != "last" or number == spoken[-1])]
        learned = [number for number in learned if _weight(messages[number]) > 0]
        if self.learn == "all":
            learned = []  # no turn is told from the rest
        if isinstance(template, str) and _GENERATION.search(template):
            ids, turns = self._by_blocks(messages, given)
        else:
            ids, turns = self._by_difference(messages, learned, given)
        weights = np.zeros(len(ids), np.float32)
        for number in learned:
            weights[turns[number]] = _weight(messages[number])
        return ids, weights

    def _rendered(self, messages: Sequence[Message], given: Mapping[str, Any], **how: Any) -> Any:
        try:
            return self.tokenizer.apply_chat_template(list(messages), **{"tokenize": False, **given, **how})
        except Exception as error:  # of Jinja, many types: a role that the template does not know, turns out of order
            raise DataError(f"the chat template refuses this conversation: {error}") from error

    def _by_blocks(self, messages: list[Message], given: Mapping[str, Any]) -> tuple[np.ndarray, dict[int, np.ndarray]]:
        """Ids, and places of those of each of the assistant's turns by their messages' numbers, by the template's
        generation blocks."""
        found = self._rendered(
            messages, given, tokenize=True, return_dict=True, return_assistant_tokens_mask=True
        )  # fmt: skip
        mask = np.asarray(found["assistant_masks"], dtype=bool)
        edges = np.flatnonzero(np.diff(np.concatenate([[False], mask, [False]]).astype(np.int8)))
        turns = [np.arange(start, end) for start, end in zip(edges[::2], edges[1::2], strict=True)]
        spoken = [number for number, message in enumerate(messages) if message["role"] == "assistant"]
        if len(turns) != len(spoken):
            raise DataError(
                f"the chat template's generation blocks mark {len(turns)} turns, and the assistant has {len(spoken)}: "
                "put one such block around each"
            )
        return np.asarray(found["input_ids"], dtype=np.int64), dict(zip(spoken, turns, strict=True))

    def _by_difference(
        self, messages: list[Message], learned: Sequence[int], given: Mapping[str, Any]
    ) -> tuple[np.ndarray, dict[int, np.ndarray]]:
        """Ids, and places of those of the messages that are learned, by what each adds to the rendering."""
        whole = str(self._rendered(messages, given))
        spans = {number: self._span(messages, number, whole, given) for number in learned}
        if not self.tokenizer.is_fast:
            raise Mismatch("the tokenizer is a slow one, which does not tell where its tokens begin: take a fast one")
        encoded = self.tokenizer(whole, add_special_tokens=False, return_offsets_mapping=True)
        starts = np.asarray([start for start, _ in encoded["offset_mapping"]])
        turns = {number: np.flatnonzero((starts >= start) & (starts < end)) for number, (start, end) in spans.items()}
        return np.asarray(encoded["input_ids"], dtype=np.int64), turns

    def _span(self, messages: list[Message], number: int, whole: str, given: Mapping[str, Any]) -> tuple[int, int]:
        """Where one of the assistant's turns is in the whole rendering, in characters, its end token included."""
        before = str(self._rendered(messages[:number], given, add_generation_prompt=True)) if number else ""
        after = whole if number + 1 == len(messages) else str(self._rendered(messages[: number + 1], given))
        if not whole.startswith(before) or not whole.startswith(after):
            raise DataError(
                f"the chat template renders message {number + 1} otherwise when others follow it, so the assistant's "
                "tokens cannot be told: put {% generation %} and {% endgeneration %} around them in a template of your "
                "own (data.chat_template), or learn the last turn alone (supervised.learn=last)"
            )
        said = after[len(before) :]
        stripped = said.rstrip()
        if any(stripped.endswith(token) for token in self.tokenizer.all_special_tokens):
            said = stripped  # what a template writes behind the end token, nobody generates
        return len(before), len(before) + len(said)


def _weight(message: Message) -> float:
    """How much a message counts: its `weight`, unless its `train` says that it is only read."""
    weight = message.get("weight", 1.0)
    if not isinstance(weight, int | float) or weight < 0:
        raise DataError(f"a message has the weight {weight!r}: it must be a number from 0")
    return float(weight) if message.get("train", True) else 0.0
