"""Makes prompts of rows: texts, chats, templates, token ids, limits.

In: rows of a data set. Out: `Prompt`s as the model reads them, and how many were too long.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, ClassVar, Generic, Literal, Protocol

import numpy as np
from typing_extensions import TypeVar

from rlinf.data.datasets.conversations import message_of
from rlinf.data.datasets.source import Columns, DataError, Mismatch, Row, Rows, fill, lookup, unwritable
from rlinf.data.images import Pictures, image_refs, pictured
from rlinf.data.sample import Example, ImageRef, Prompt

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_ALIEN = 8
"""Characters that a warning shows of those that a tokenizer does not know."""
_BEGINNING = 200
"""Characters of an answer by which it is judged: right answers may be long, such as a program's tests."""
Overlong = Literal["drop", "truncate", "error"]
"""Treatment of a prompt that is too long: left out and counted; cut at its beginning and counted; refused."""

Unusable = Literal["drop", "error"]
"""Treatment of a row that turns out not to fit when its prompt is made: left out and counted; refused."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RowOptions:
    """How rows become what a model reads."""

    columns: Mapping[str, Any] = field(default_factory=dict)
    """Ours to theirs."""
    chat: bool = False
    """Plain texts are turns of a chat, to be put into the chat template; lists of messages always are."""
    system: str | None = None
    """System message for chats that have none; makes every row a chat."""
    chat_template: str | None = None
    """Jinja text, or a file with it; None takes the tokenizer's."""
    chat_args: Mapping[str, Any] = field(default_factory=dict)
    """Further arguments of the chat template, such as {enable_thinking: false}."""
    overlong: Overlong = "drop"
    """Treatment of rows that are too long; prompts with pictures are left out rather than cut."""
    unusable: Unusable = "drop"
    """Treatment of rows of which nothing can be made."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptOptions(RowOptions):
    """How rows become prompts; `columns` are of `source.OURS`."""

    template: str | None = None
    """Makes the prompt's text from columns, such as "Question: {question}\\nAnswer:"; None takes the prompt column."""
    max_prompt_tokens: int | None = None
    """Longest prompt; None for as long as there is room for."""


@dataclass(frozen=True, slots=True)
class Room:
    """Limits that a model and its engine put on a text: its length, and its token ids."""

    tokens: int | None = None
    """The most; None for no limit."""
    why: str = ""
    """Where that comes from, in words behind `since`."""
    ids: int | None = None
    """The model has token ids below it; None: not known."""

    def limit(self, most: int | None, key: str) -> tuple[int | None, str]:
        """The lower of this and a limit of the user's, and how a person knows it.

        Args:
            most: the user's; None for none.
            key: that has it.
        """
        if self.tokens is None or (most is not None and most <= self.tokens):
            return most, f"{key}={most}"
        return self.tokens, f"{self.tokens:,} tokens ({self.why})"

    def refusal(self, ids: Sequence[int] | np.ndarray) -> str | None:
        """Why the model cannot read these tokens; None if it can."""
        if self.ids is None or not len(ids) or (largest := int(np.max(ids))) < self.ids:
            return None
        return (
            f"the text has the token id {largest}, and the model's embedding ends at {self.ids - 1}: the tokenizer is "
            "another model's, or has tokens that were added later"
        )


class Numbered(Protocol):
    """Anything that has a position in a stream."""

    @property
    def id(self) -> int: ...


Item = TypeVar("Item", bound=Numbered, default=Prompt)
"""The result of a row: a prompt, or a group to learn from as it is."""


@dataclass(frozen=True, slots=True)
class Drawn:
    """A row on its way to become a prompt."""

    id: int
    """The prompt's."""
    index: int
    """The row's number in the data set, from 0."""
    row: Row
    """Values by column."""
    where: str
    """Where a person finds it."""
    problem: str = ""
    """Why it cannot be read, with its place; empty if it can."""

    @staticmethod
    def of(rows: Rows, id: int, index: int) -> Drawn:
        """A row by its number, also where it cannot be read."""
        try:
            return Drawn(id, index, rows[index], rows.where(index))
        except DataError as error:
            return Drawn(id, index, {}, rows.where(index), str(error))


@dataclass(frozen=True, slots=True)
class Outcome(Generic[Item]):
    """The fate of one row."""

    prompt: Item | None
    """None: it was left out."""
    cut: bool = False
    """It was longer."""
    reason: str = ""
    """Why no prompt can be made of it; empty if one can, or if that is too long."""
    unknown: str = ""
    """Words on a text most tokens of which stand for what the tokenizer does not know."""

    def at(self, number: int, maker: Maker[Item]) -> Outcome[Item]:
        """Copy at another position of its stream."""
        return self if self.prompt is None else replace(self, prompt=maker.numbered(self.prompt, number))


@dataclass(frozen=True, slots=True)
class Batch(Generic[Item]):
    """Prompts that were made together."""

    prompts: list[Item]
    """In the order of their rows."""
    dropped: int
    """Rows left out since they were too long."""
    truncated: frozenset[int]
    """Ids of the prompts that were cut."""
    unusable: Mapping[int, str] = field(default_factory=dict)
    """Why rows were left out that no prompt can be made of, by their ids."""
    unknown: Mapping[int, str] = field(default_factory=dict)
    """Words on texts most tokens of which stand for what the tokenizer does not know, by their ids."""

    def outcomes(self, rows: Iterable[Drawn]) -> Iterator[Outcome[Item]]:
        """The fate of each row that it was made of."""
        prompts = {prompt.id: prompt for prompt in self.prompts}
        for number in (row.id for row in rows):
            cut, reason = number in self.truncated, self.unusable.get(number, "")
            yield Outcome(prompts.get(number), cut, reason, self.unknown.get(number, ""))


class Layout(Protocol):
    """Which column is what."""

    @property
    def top_level(self) -> list[str]:
        """Columns whose values are looked at in each row."""

    def problem_in(self, row: Row) -> str | None:
        """Describe in words why a row cannot be used; None if it can."""


class Maker(Protocol[Item]):
    """Makes prompts, or groups, of rows."""

    @property
    def limit(self) -> str:
        """The longest that is made, as a person knows it: `data.max_prompt_tokens=512`."""

    unit: ClassVar[str]
    """Name of the things that are made, for errors."""
    units: ClassVar[str]
    """Those that are left out as too long, up to the word before the limit."""
    too_long: ClassVar[str]
    """Why those are left out that are not unusable."""
    cut_at: ClassVar[str]
    """Where longer ones are cut."""

    @property
    def layout(self) -> Layout:
        """Which column is what."""

    @property
    def sources(self) -> Mapping[str, str]:
        """The column that each field is made of, for people."""

    def make(self, rows: Sequence[Drawn]) -> Batch[Item]: ...

    def numbered(self, item: Item, number: int, /) -> Item: ...


@dataclass(frozen=True, slots=True)
class PromptMaker:
    """Makes prompts of rows."""

    tokenizer: PreTrainedTokenizerBase
    """The model's."""
    columns: Columns
    """Which column is what."""
    how: PromptOptions = PromptOptions(unusable="error")
    """Template, chat, limits, and what becomes of rows that do not fit."""
    pictures: Pictures | None = None
    """Reads pictures for the model; None if it reads text alone."""
    room: Room = Room()
    """Limits that the model and its engine put on a prompt."""
    unit: ClassVar[str] = "prompt"
    units: ClassVar[str] = "prompts longer than"
    too_long: ClassVar[str] = "too long"
    cut_at: ClassVar[str] = "beginning"

    @property
    def limit(self) -> str:
        """The longest prompt, as a person knows it."""
        return self.room.limit(self.how.max_prompt_tokens, "data.max_prompt_tokens")[1]

    @property
    def layout(self) -> Columns:
        """Which column is what."""
        return self.columns

    @property
    def sources(self) -> dict[str, str]:
        """The column that each field is made of; whatever column is the prompt, a template says what is taken."""
        named = dict(self.columns.named)
        if self.how.template is None:
            return named
        return {"prompt": ", ".join(self.columns.others) or named.pop("prompt", "data.template"), **named}

    def numbered(self, prompt: Prompt, number: int) -> Prompt:
        """Copy of a prompt at another position of its stream."""
        return replace(prompt, id=number)

    def make(self, rows: Sequence[Drawn]) -> Batch:
        """Make prompts; all are encoded at once.

        Raises:
            Mismatch: pictures, and a model of text alone; a chat, and a tokenizer without a chat template.
            DataError: a row of which no prompt can be made, or one that is too long, where `unusable` or `overlong` is
                "error".
        """
        texts: list[tuple[Drawn, _Text]] = []
        unusable: dict[int, str] = {}
        for item in rows:
            try:
                texts.append((item, self._text(item)))
            except DataError as error:
                self._leave_out(item, error, unusable)
        results: list[tuple[Drawn, Prompt, str | None]] = []
        dropped = 0
        truncated = set()
        for (item, text), tokens in zip(texts, self._encode([text for _, text in texts]), strict=True):
            try:
                prompt, cut = self._prompt(item, text, tokens)
            except DataError as error:
                self._leave_out(item, error, unusable)
                continue
            if prompt is None:
                dropped += 1
                continue
            if cut:
                truncated.add(item.id)
            assert isinstance(tokens, list)  # else there was no prompt
            results.append((item, prompt, unknown_in(self.tokenizer, tokens, text.text)))
        prompts = [prompt for _, prompt, _ in results]
        unknown = {
            item.id: f"{item.where}: {words or of_answer}"
            for (item, _, words), of_answer in zip(results, self._unknown_answers(prompts), strict=True)
            if words or of_answer
        }
        return Batch(prompts, dropped, frozenset(truncated), unusable, unknown)

    def _leave_out(self, item: Drawn, error: DataError, unusable: dict[int, str]) -> None:
        """Note why a row is left out; raise that where rows are to be refused, or none is to blame."""
        if self.how.unusable == "error" or isinstance(error, Mismatch | _TooLong):
            raise error
        unusable[item.id] = str(error)

    def _unknown_answers(self, prompts: Sequence[Prompt]) -> list[str | None]:
        """Words on answers of which the tokenizer does not know most: they can neither be taught nor sampled. One per
        prompt; all are encoded at once."""
        unknown: list[str | None] = [None] * len(prompts)
        texts = {number: text for number, prompt in enumerate(prompts) if (text := self._beginning_of_answer(prompt))}
        if not texts or self.tokenizer.unk_token_id is None:
            return unknown
        encoded = self.tokenizer([*texts.values()], add_special_tokens=False)["input_ids"]
        for (number, text), tokens in zip(texts.items(), encoded, strict=True):
            if (words := unknown_in(self.tokenizer, tokens, text)) is not None:
                unknown[number] = f"of its answer, {words}"
        return unknown

    def _beginning_of_answer(self, prompt: Prompt) -> str:
        response = None if self.columns.response is None else lookup(prompt.row, self.columns.response)
        return (response if isinstance(response, str) else prompt.answer)[:_BEGINNING]

    def _prompt(self, item: Drawn, text: _Text, tokens: list[int] | Exception) -> tuple[Prompt | None, bool]:
        """The prompt of a row, None if it is too long, and whether it was cut."""
        if isinstance(tokens, Exception):
            reason = f"{type(tokens).__name__}: {tokens}"
            raise DataError(f"{item.where}: the tokenizer cannot encode its text: {reason}") from tokens
        if not tokens:
            raise DataError(f"{item.where}: the prompt {text.text!r} has no token for this tokenizer")
        if (wrong := self.room.refusal(tokens)) is not None:
            raise DataError(f"{item.where}: {wrong}")
        if self.pictures is not None:
            try:
                tokens = self.pictures.expand(tokens, text.images)
            except DataError as error:
                raise DataError(f"{item.where}: {error}") from error
        words, cut = text.text, False
        most, limit = self.room.limit(self.how.max_prompt_tokens, "data.max_prompt_tokens")
        if most is not None and len(tokens) > most:
            if self.how.overlong == "error":
                raise _TooLong(
                    f"{item.where}: the prompt has {len(tokens)} tokens, more than {limit}; change that, or set "
                    "data.overlong to drop or truncate"
                )
            if self.how.overlong == "drop" or text.images:
                return None, False
            tokens, cut = tokens[-most:], True
            words = str(self.tokenizer.decode(tokens))
        rest = self.columns.rest_of(item.row)
        if text.messages is not None:
            rest.setdefault("messages", text.messages)
        ids = np.asarray(tokens, dtype=np.int64)
        return Prompt(item.id, ids, words, text.answer, rest, text.images), cut

    def _images(self, item: Drawn) -> tuple[ImageRef, ...]:
        """The pictures of a row."""
        column = self.columns.images
        images = () if column is None else image_refs(lookup(item.row, column), item.where)
        if images and self.pictures is None:
            raise Mismatch(
                f"{item.where}: column {column!r} has {len(images)} pictures, and the model reads text alone: take "
                "one that reads pictures, or leave them out by data.columns: {images: null}"
            )
        return images

    def _text(self, item: Drawn) -> _Text:
        """Make the text that the model reads of a row."""
        if item.problem:
            raise DataError(item.problem)
        images = self._images(item)
        row, answer = item.row, self.columns.answer_in(item.row)
        choices = self.columns.choices_in(row, item.index, item.where)
        if choices is not None:
            answer = choices[1]
        if self.how.template is None:
            assert self.columns.prompt is not None  # Columns.find saw to it
            if (wrong := self.columns.problem_in(row)) is not None:
                raise DataError(f"{item.where}: {wrong}")
            content: Any = lookup(row, self.columns.prompt)
            if choices is not None:
                content = _with_choices(content, choices[0], item.where)
        else:
            prompt = {} if self.columns.prompt is None else {"prompt": lookup(row, self.columns.prompt)}
            options = {} if choices is None else {"choices": choices[0]}
            content = fill(self.how.template, {**row, **prompt, **options}, item.where)
        if (wrong := unwritable(content) or unwritable(answer)) is not None:
            raise DataError(f"{item.where}: {wrong}")
        if not isinstance(content, str):
            content = [message_of(each, f"{item.where}: column {self.columns.prompt!r}") for each in content]
        if images and self.pictures is not None:
            content = pictured(content, len(images), self.pictures)
        if isinstance(content, str) and not self.how.chat and self.how.system is None:
            return _Text(content, None, answer, images)
        messages = [{"role": "user", "content": content}] if isinstance(content, str) else list(content)
        if self.how.system is not None and messages[0]["role"] != "system":
            messages.insert(0, {"role": "system", "content": self.how.system})
        return _Text(self._chat(messages, item.where), messages, answer, images)

    def _chat(self, messages: list[Any], where: str) -> str:
        if not self.tokenizer.chat_template:
            name = self.tokenizer.name_or_path or type(self.tokenizer).__name__
            raise Mismatch(
                f"{where} is to be put as a chat, and the tokenizer {name} has no chat template: set "
                "data.chat_template to one (the Jinja text, or a file with it), take a model trained on chats, "
                "or make plain text of the columns by data.template"
            )
        prefilled = messages[-1]["role"] == "assistant"  # the model goes on with what it is made to begin with
        try:
            text = self.tokenizer.apply_chat_template(
                messages,
                tokenize=False,
                add_generation_prompt=not prefilled,
                continue_final_message=prefilled,
                **self.how.chat_args,
            )
        except Exception as error:  # of Jinja, of the template itself, or of an argument that it does not take
            reason = f"{type(error).__name__}: {' '.join(str(error).split())}"
            raise DataError(f"data.chat_template: {where} cannot be put into it: {reason}") from error
        return str(text)

    def _encode(self, texts: Sequence[_Text]) -> list[list[int] | Exception]:
        """Token ids, or why a text has none; plain texts get the tokens that the tokenizer begins with, which chat
        templates write out."""
        ids: list[list[int] | Exception] = [[] for _ in texts]
        for chat in (False, True):
            which = [index for index, text in enumerate(texts) if (text.messages is not None) == chat]
            encoded = self._encoded([texts[index].text for index in which], special=not chat)
            for index, tokens in zip(which, encoded, strict=True):
                plain = not chat and not isinstance(tokens, Exception)
                ids[index] = self._open_ended(tokens, texts[index].text) if plain else tokens  # type: ignore[arg-type]
        return ids

    def _encoded(self, texts: Sequence[str], *, special: bool) -> list[list[int] | Exception]:
        """Token ids of texts, all at once; one by one where that fails, to know which text is to blame."""
        if not texts:
            return []
        try:
            return list(self.tokenizer(list(texts), add_special_tokens=special)["input_ids"])
        except Exception as error:  # a tokenizer's own, of many types
            if len(texts) == 1:
                return [error]
        return [ids for text in texts for ids in self._encoded([text], special=special)]

    def _open_ended(self, tokens: list[int], text: str) -> list[int]:
        """Without the end token that some tokenizers add: the model is to go on."""
        end = self.tokenizer.eos_token
        if tokens and end is not None and tokens[-1] == self.tokenizer.eos_token_id and not text.endswith(str(end)):
            return tokens[:-1]
        return tokens

    def worked(self, prompts: Sequence[Prompt], *, learn_prompt: bool = False) -> list[Example]:
        """Prompts with their worked responses and an end token, for supervised training.

        Args:
            prompts: made by this.
            learn_prompt: all but the first token is learned, the question included, as a base model learns from text.
                Trained on answers alone, a small new model grows so sure of its mistakes that it later learns half as
                fast by trying. Not where there are pictures, of which a prompt mostly consists.

        Raises:
            DataError: a prompt has neither response nor answer; the tokenizer has no end token.
        """
        if not prompts:
            return []
        if self.tokenizer.eos_token_id is None:
            raise DataError("the tokenizer has no end token (eos_token), so worked responses cannot be ended")
        encoded = self.tokenizer([self._response(prompt) for prompt in prompts], add_special_tokens=False)["input_ids"]
        examples = []
        for prompt, ids in zip(prompts, encoded, strict=True):
            response = np.asarray([*ids, self.tokenizer.eos_token_id], dtype=np.int64)
            cut = 1 if learn_prompt and not prompt.images else len(prompt.token_ids)
            answer = np.concatenate([prompt.token_ids[cut:], response])
            examples.append(Example(prompt.token_ids[:cut], answer, images=prompt.images))
        return examples

    def _response(self, prompt: Prompt) -> str:
        response = None if self.columns.response is None else lookup(prompt.row, self.columns.response)
        text = prompt.answer if response is None else response
        if not isinstance(text, str) or not text:
            column = self.columns.response or "response"
            raise DataError(f"the prompt {prompt.text[:60]!r} has no worked response: column {column!r} holds {text!r}")
        return text


@dataclass(frozen=True, slots=True)
class _Text:
    """The text that the model reads of a row, with its answer and pictures."""

    text: str
    """The text as it is encoded."""
    messages: list[Any] | None
    """The chat it was made from, if it was."""
    answer: str
    """The right one."""
    images: tuple[ImageRef, ...]
    """Its pictures."""


def unknown_in(tokenizer: PreTrainedTokenizerBase, ids: Sequence[int] | np.ndarray, *texts: str) -> str | None:
    """Words on a text of which the tokenizer does not know most; None if it knows at least half.

    Args:
        tokenizer: the model's.
        ids: the text's tokens; special ones do not count.
        texts: what they were made of, to name the characters.
    """
    unknown = tokenizer.unk_token_id
    if unknown is None or unknown not in ids or unknown == tokenizer.eos_token_id:  # the last of GPT-2, of every byte
        return None
    tokens = np.asarray(ids, dtype=np.int64)
    tokens = tokens[~np.isin(tokens, [each for each in tokenizer.all_special_ids if each != unknown])]
    lost = int((tokens == unknown).sum())
    if 2 * lost <= len(tokens):
        return None
    characters = [each for each in dict.fromkeys("".join(texts)) if not each.isspace()]
    pieces = tokenizer(characters, add_special_tokens=False)["input_ids"] if characters else []
    alien = [each for each, piece in zip(characters, pieces, strict=True) if unknown in piece]
    first = ", ".join(map(repr, alien[:_ALIEN]))
    which = f": {first}{' and others' if len(alien) > _ALIEN else ''}" if alien else ""
    return (
        f"{lost} of {len(tokens)} tokens are {tokenizer.unk_token}, which the tokenizer writes for what it lacks{which}"
    )


class _TooLong(DataError):
    """A prompt is too long, and those are to be refused."""


def _with_choices(text: Any, options: str, where: str) -> str:
    if not isinstance(text, str):
        raise DataError(f"{where}: options are added to prompts of plain text; this is a list of messages")
    return f"{text.rstrip()}\n\n{options}"
