"""Turns dialogues into token ids with loss weights, and rows of conversations and preference pairs into groups.

A `Dialogue` is rendered by the chat template, or as plain text, to `Rendered` ids and a weight per token, 0 where a
token is only read. The ids are those of the whole text rendered once. Which of them the assistant said is told by the
template's own `{% generation %}` blocks or, where it has none, by what each of its turns adds to the rendering.

In: rows. Out: a `Group` per row, as trainers and reference policies take it: of one sample for supervised training, of
the chosen and the rejected one of a pair. Their `loss_mask` tells what is learned; nobody sampled them, so their
log-probs are NaN and their versions -1.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import numpy as np

from rlinf.data.datasets.conversations import Dialogue, Format, Kind, Message
from rlinf.data.datasets.prompts import Batch, Drawn, Room, RowOptions, unknown_in
from rlinf.data.datasets.source import DataError, Mismatch, Row, unwritable
from rlinf.data.images import Pictures, image_refs, pictured
from rlinf.data.sample import Group, ImageRef, Prompt, Sample

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Learn = Literal["assistant", "last", "all"]
"""Which tokens are learned: those of the assistant's turns; of its last turn; all, prompts included."""
_GENERATION = re.compile(r"\{%-?\s*generation\b")


@dataclass(frozen=True, slots=True, kw_only=True)
class ConversationOptions(RowOptions):
    """How rows become conversations; `columns` are of `conversations.OURS`."""

    kind: Kind = "sft"
    """One conversation of each row, or a preference pair."""
    scored: bool = False
    """Each conversation is scored as a whole: one token is added to it, and only that is learned, since a score is read
    from where it would be predicted."""
    learn: Learn = "assistant"
    """Which tokens are learned."""
    max_tokens: int | None = None
    """Longest conversation; None for as long as there is room for."""
    room: Room = Room()
    """Limits that the model puts on a conversation."""
    pictures: Pictures | None = None
    """Reads pictures for the model; None if it reads text alone."""


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
        prompt_ids = self._open_ended(prompt)
        whole = self._ids(prompt + completion, special=True)
        # a token may reach over the border, as none can that is sampled
        if not np.array_equal(whole[: len(prompt_ids)], prompt_ids):
            whole = np.concatenate([prompt_ids, self._ids(completion, special=False)])
        weights = np.zeros(len(whole), np.float32)
        weights[len(prompt_ids) :] = 1.0
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
        template_args = {**self.chat_args, **dialogue.template_args, "tools": dialogue.tools}
        first = len(dialogue.prompt)
        spoken = [number for number, message in enumerate(messages) if message["role"] == "assistant"]
        learned = [number for number in spoken if number >= first and (self.learn != "last" or number == spoken[-1])]
        learned = [number for number in learned if _weight(messages[number]) > 0]
        if self.learn == "all":
            learned = []  # no turn is told from the rest
        if isinstance(template, str) and _GENERATION.search(template):
            ids, turns = self._by_blocks(messages, template_args)
        else:
            ids, turns = self._by_difference(messages, learned, template_args)
        weights = np.zeros(len(ids), np.float32)
        for number in learned:
            weights[turns[number]] = _weight(messages[number])
        return ids, weights

    def _rendered(self, messages: Sequence[Message], template_args: Mapping[str, Any], **how: Any) -> Any:
        try:
            return self.tokenizer.apply_chat_template(list(messages), **{"tokenize": False, **template_args, **how})
        except Exception as error:  # of Jinja, many types: a role that the template does not know, turns out of order
            raise DataError(f"the chat template refuses this conversation: {error}") from error

    def _by_blocks(
        self, messages: list[Message], template_args: Mapping[str, Any]
    ) -> tuple[np.ndarray, dict[int, np.ndarray]]:
        """Ids, and places of those of each of the assistant's turns by their messages' numbers, by the template's
        generation blocks."""
        how = {"tokenize": True, "return_dict": True, "return_assistant_tokens_mask": True}
        encoded = self._rendered(messages, template_args, **how)
        mask = np.asarray(encoded["assistant_masks"], dtype=bool)
        edges = np.flatnonzero(np.diff(np.concatenate([[False], mask, [False]]).astype(np.int8)))
        turns = [np.arange(start, end) for start, end in zip(edges[::2], edges[1::2], strict=True)]
        spoken = [number for number, message in enumerate(messages) if message["role"] == "assistant"]
        if len(turns) != len(spoken):
            raise DataError(
                f"the chat template's generation blocks mark {len(turns)} turns, and the assistant has {len(spoken)}: "
                "put one such block around each"
            )
        return np.asarray(encoded["input_ids"], dtype=np.int64), dict(zip(spoken, turns, strict=True))

    def _by_difference(
        self, messages: list[Message], learned: Sequence[int], template_args: Mapping[str, Any]
    ) -> tuple[np.ndarray, dict[int, np.ndarray]]:
        """Ids, and places of those of the messages that are learned, by what each adds to the rendering."""
        whole = str(self._rendered(messages, template_args))
        spans = {number: self._span(messages, number, whole, template_args) for number in learned}
        if not self.tokenizer.is_fast:
            raise Mismatch("the tokenizer is a slow one, which does not tell where its tokens begin: take a fast one")
        encoded = self.tokenizer(whole, add_special_tokens=False, return_offsets_mapping=True)
        starts = np.asarray([start for start, _ in encoded["offset_mapping"]])
        turns = {number: np.flatnonzero((starts >= start) & (starts < end)) for number, (start, end) in spans.items()}
        return np.asarray(encoded["input_ids"], dtype=np.int64), turns

    def _span(
        self, messages: list[Message], number: int, whole: str, template_args: Mapping[str, Any]
    ) -> tuple[int, int]:
        """Where one of the assistant's turns is in the whole rendering, in characters, its end token included."""
        before = str(self._rendered(messages[:number], template_args, add_generation_prompt=True)) if number else ""
        after = whole if number + 1 == len(messages) else str(self._rendered(messages[: number + 1], template_args))
        if not whole.startswith(before) or not whole.startswith(after):
            raise DataError(
                f"the chat template renders message {number + 1} otherwise when others follow it, so the assistant's "
                "tokens cannot be told: put {% generation %} and {% endgeneration %} around them in a template of your "
                "own (data.chat_template), or learn the last turn alone (supervised.learn=last)"
            )
        turn = after[len(before) :]
        stripped = turn.rstrip()
        if any(stripped.endswith(token) for token in self.tokenizer.all_special_tokens):
            turn = stripped  # what a template writes behind the end token, nobody generates
        return len(before), len(before) + len(turn)


def _weight(message: Message) -> float:
    """How much a message counts: its `weight`, unless its `train` says that it is only read."""
    weight = message.get("weight", 1.0)
    if not isinstance(weight, int | float) or weight < 0:
        raise DataError(f"a message has the weight {weight!r}: it must be a number from 0")
    return float(weight) if message.get("train", True) else 0.0


WEIGHT = "weight"
"""Key of `Sample.per_token`: how much each learned token counts, where not all count as 1."""
MARGIN = "margin"
"""Key of `Prompt.row`: by how much the chosen one of a pair is better, where the data tell."""
REF = "ref_logprobs"
"""Key of `Sample.per_token`: log-probs by the reference policy."""


@dataclass(frozen=True, slots=True)
class GroupMaker:
    """Makes groups of rows."""

    renderer: Renderer
    """Makes token ids."""
    format: Format
    """The layout of the rows."""
    how: ConversationOptions
    """Limits, pictures, and what becomes of rows that do not fit."""
    unit: ClassVar[str] = "row has nothing to learn, or"
    units: ClassVar[str] = "rows with nothing to learn, or longer than"
    too_long: ClassVar[str] = "too long, or nothing to learn"
    cut_at: ClassVar[str] = "end"

    @property
    def limit(self) -> str:
        """The longest conversation, as a person knows it."""
        return self.how.room.limit(self.how.max_tokens, "supervised.max_tokens")[1]

    @property
    def layout(self) -> Format:
        """Which column is what."""
        return self.format

    @property
    def sources(self) -> Mapping[str, str]:
        """The column that each field is made of."""
        return self.format.columns

    def make(self, rows: Sequence[Drawn]) -> Batch[Group]:
        """Make groups; rows with nothing to learn are left out and counted, like those that are too long.

        Raises:
            Mismatch: pictures, and a model of text alone; a chat, and a tokenizer without a chat template.
            DataError: a row of which no group can be made, or one that is too long, where `unusable` or `overlong` is
                "error".
        """
        groups: list[Group] = []
        dropped, cut = 0, set()
        unusable: dict[int, str] = {}
        unknown: dict[int, str] = {}
        for item in rows:
            try:
                images, rendered = self._read(item)
            except DataError as error:
                if self.how.unusable == "error" or isinstance(error, Mismatch):
                    raise
                unusable[item.id] = str(error)
                continue
            longest = max(len(each.ids) for each in rendered)
            most, limit = self.how.room.limit(self.how.max_tokens, "supervised.max_tokens")
            if most is not None and longest > most:
                if self.how.overlong == "error":
                    raise DataError(
                        f"{item.where}: the conversation has {longest} tokens, more than {limit}; change that, or set "
                        "data.overlong to drop or truncate"
                    )
                if self.how.overlong == "drop":
                    dropped += 1
                    continue
                cut.add(item.id)
                rendered = [_cut(each, most) for each in rendered]
            if not all(each.weights.any() for each in rendered):
                cut.discard(item.id)
                dropped += 1
                continue
            groups.append(self._group(item, rendered, images))
            if (words := self._unknown(item.row, rendered)) is not None:
                unknown[item.id] = f"{item.where}: {words}"
        return Batch(groups, dropped, frozenset(cut), unusable, unknown)

    def _read(self, item: Drawn) -> tuple[tuple[ImageRef, ...], list[Rendered]]:
        """The pictures of a row, and its conversations as the model reads them. Its errors say where the row is."""
        if item.problem:
            raise DataError(item.problem)
        try:
            images = image_refs(self.format.value(item.row, "images"), "column images")
            rendered = [self._expanded(each, images) for each in self._rendered(item.row, images)]
            if (
                wrong := next((why for each in rendered if (why := self.how.room.refusal(each.ids))), None)
            ) is not None:
                raise DataError(wrong)
        except DataError as error:
            raise type(error)(f"{item.where}: {error}") from error
        return images, rendered

    def numbered(self, group: Group, number: int) -> Group:
        """Copy of a group at another position of its stream."""
        prompt = replace(group.prompt, id=number)
        return Group(prompt, tuple(replace(sample, prompt=prompt) for sample in group.samples))

    def _unknown(self, row: Row, rendered: Sequence[Rendered]) -> str | None:
        """Words on a row of which the tokenizer does not know most, in all or in what is learned; None if it does."""
        tokenizer = self.renderer.tokenizer
        for one in rendered:
            for ids, what in ((one.ids, ""), (one.ids[one.weights > 0], "of what is learned, ")):
                if (words := unknown_in(tokenizer, ids)) is not None:
                    texts = [text for dialogue in self._dialogues(row) for text in _texts(dialogue)]
                    return what + (unknown_in(tokenizer, ids, *texts) or words)
        return None

    def _dialogues(self, row: Row) -> Sequence[Dialogue]:
        return self.format.pair(row) if self.format.kind == "pairs" else [self.format.dialogue(row)]

    def _rendered(self, row: Row, images: Sequence[ImageRef]) -> list[Rendered]:
        dialogues = self._dialogues(row)
        for dialogue in dialogues:
            if (wrong := unwritable(dialogue.prompt) or unwritable(dialogue.completion)) is not None:
                raise DataError(wrong)
        return [self.renderer.render(self._shown(dialogue, len(images))) for dialogue in dialogues]

    def _shown(self, dialogue: Dialogue, images: int) -> Dialogue:
        """Copy of a dialogue with the model's tokens where pictures stand."""
        if not images:
            return dialogue
        if self.how.pictures is None:
            raise Mismatch(
                f"the row has {images} pictures, and the model reads text alone: take one that reads pictures, or "
                "leave them out by data.columns: {images: null}"
            )
        if isinstance(dialogue.prompt, str):
            if not dialogue.prompt:  # one whole text
                return replace(dialogue, completion=pictured(str(dialogue.completion), images, self.how.pictures))
            return replace(dialogue, prompt=pictured(dialogue.prompt, images, self.how.pictures))
        messages = list(pictured([*dialogue.prompt, *dialogue.completion], images, self.how.pictures))
        return replace(dialogue, prompt=messages[: len(dialogue.prompt)], completion=messages[len(dialogue.prompt) :])

    def _expanded(self, rendered: Rendered, images: Sequence[ImageRef]) -> Rendered:
        """Copy of a rendering with as many placeholders as pictures need, none of which is learned."""
        if self.how.pictures is None:
            return rendered
        repeats, first = self.how.pictures.repeats(rendered.ids, images), rendered.prompt
        last = max(np.flatnonzero(rendered.ids == self.how.pictures.placeholder), default=-1)
        weights = rendered.weights.copy()
        if self.renderer.learn == "all":
            weights[: last + 1] = 0.0
            first = max(first, int(last) + 1)
        if first <= last:
            raise DataError(
                "a picture stands behind what is learned: learn the last turn alone (supervised.learn=last), or put "
                "pictures before the first answer"
            )
        return Rendered(np.repeat(rendered.ids, repeats), np.repeat(weights, repeats), int(repeats[:first].sum()))

    def _group(self, item: Drawn, rendered: Sequence[Rendered], images: tuple[ImageRef, ...]) -> Group:
        first, last = rendered[0], rendered[-1]
        shared = min(each.prompt for each in rendered)
        if len(rendered) > 1:  # a prompt's last tokens may depend on what follows
            apart = np.flatnonzero(first.ids[:shared] != last.ids[:shared])
            shared = max(1, int(apart[0])) if len(apart) else shared
        margin = self.format.value(item.row, MARGIN)
        row: Mapping[str, Any] = {} if margin is None else {MARGIN: float(margin)}
        prompt = Prompt(item.id, first.ids[:shared], row=row, images=images)
        samples = [self._sample(prompt, number, each, shared) for number, each in enumerate(rendered)]
        totals = [self.format.value(item.row, f"ref_{which}_logps") for which in ("chosen", "rejected")]
        if len(samples) == 2 and None not in totals:
            samples = [_told(sample, float(total)) for sample, total in zip(samples, totals, strict=True)]
        return Group(prompt, tuple(samples))

    def _sample(self, prompt: Prompt, index: int, rendered: Rendered, shared: int) -> Sample:
        ids, weights = rendered.ids[shared:], rendered.weights[shared:]
        if self.how.scored:
            tokenizer = self.renderer.tokenizer
            while len(ids) > 1 and ids[-1] == tokenizer.pad_token_id:  # transformers scores the last that is no padding
                ids = ids[:-1]
            ids = np.append(ids, 0)
            weights = np.zeros(len(ids), np.float32)
            weights[-1] = 1.0
        learned = weights > 0
        uneven = bool((weights[learned] != 1.0).any())
        return Sample(
            prompt,
            index,
            ids,
            np.full(len(ids), np.nan, np.float32),
            np.full(len(ids), -1, np.int32),
            "",
            truncated=False,
            loss_mask=None if learned.all() else learned,
            per_token={WEIGHT: weights} if uneven else {},
        )


def _texts(dialogue: Dialogue) -> Iterator[str]:
    """The texts of a dialogue."""
    for part in (dialogue.prompt, dialogue.completion):
        yield from [part] if isinstance(part, str) else [str(each.get("content") or "") for each in part]


def _told(sample: Sample, total: float) -> Sample:
    """With the log-prob of the whole completion under the reference, of which only the sum counts."""
    column = np.zeros(len(sample.response_ids), np.float32)
    column[0 if sample.loss_mask is None else int(np.flatnonzero(sample.loss_mask)[0])] = total
    return replace(sample, per_token={**sample.per_token, REF: column})


def _cut(rendered: Rendered, longest: int) -> Rendered:
    ids, weights = rendered.ids[:longest], rendered.weights[:longest]
    return Rendered(ids, weights, min(rendered.prompt, len(ids)))
