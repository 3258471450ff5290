"""From rows to prompts: texts, chats, templates, token ids, limits.

In: rows of a data set. Out: `Prompt`s as the model reads them, and how many were too long.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Generic, Literal, Protocol

import numpy as np
from transformers import PreTrainedTokenizerBase
from typing_extensions import TypeVar

from rlinf.data.datasets.columns import Columns, fill, lookup
from rlinf.data.datasets.rows import DataError, Row
from rlinf.data.pictures.images import image_refs
from rlinf.data.pictures.marks import pictured
from rlinf.data.pictures.processor import Pictures
from rlinf.data.sample import Example, ImageRef, Prompt

Overlong = Literal["drop", "truncate", "error"]
"""What becomes of a prompt that is too long: left out and counted; cut at its beginning and counted; refused."""


class Numbered(Protocol):
    """What has a position in a stream."""

    @property
    def id(self) -> int: ...


Item = TypeVar("Item", bound=Numbered, default=Prompt)
"""What is made of a row: a prompt, or a group to learn from as it is."""


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


@dataclass(frozen=True, slots=True)
class Batch(Generic[Item]):
    """Prompts that were made together."""

    prompts: list[Item]
    """In the order of their rows."""
    dropped: int
    """Rows left out since they were too long."""
    truncated: frozenset[int]
    """Ids of the prompts that were cut."""


class Maker(Protocol[Item]):
    """Makes prompts, or groups, of rows."""

    @property
    def max_tokens(self) -> int | None: ...

    limit: ClassVar[str]
    """Key of `max_tokens`, for errors."""
    unit: ClassVar[str]
    """What is made, for errors."""

    def make(self, rows: Sequence[Drawn]) -> Batch[Item]: ...

    def numbered(self, made: Item, number: int, /) -> Item: ...


@dataclass(frozen=True, slots=True)
class PromptMaker:
    """Makes prompts of rows."""

    tokenizer: PreTrainedTokenizerBase
    """The model's."""
    columns: Columns
    """Which column is what."""
    template: str | None = None
    """Makes the text from columns, such as "Question: {question}\\nAnswer:"; None takes the prompt column."""
    chat: bool = False
    """A plain text is what a user says, to be put into the tokenizer's chat template. Lists of messages always are."""
    system: str | None = None
    """System message for chats that have none; makes every prompt a chat."""
    chat_args: Mapping[str, Any] = field(default_factory=dict)
    """Further arguments of the chat template, such as enable_thinking."""
    max_tokens: int | None = None
    """Longest prompt; None for no limit."""
    overlong: Overlong = "drop"
    """What becomes of longer ones; those with pictures are left out rather than cut."""
    pictures: Pictures | None = None
    """Reads pictures for the model; None if it reads text alone."""
    limit: ClassVar[str] = "max_prompt_tokens"
    unit: ClassVar[str] = "prompt"

    def numbered(self, prompt: Prompt, number: int) -> Prompt:
        """The same prompt at another position of its stream."""
        return replace(prompt, id=number)

    def make(self, rows: Sequence[Drawn]) -> Batch:
        """Make prompts; all are encoded at once.

        Raises:
            DataError: a row without a prompt, or with one that is too long and `overlong` is "error"; a chat, and a
                tokenizer without a chat template.
        """
        shown = [self._images(drawn) for drawn in rows]
        made = [self._text(drawn, len(images)) for drawn, images in zip(rows, shown, strict=True)]
        ids = self._encode([text for text, _, _ in made], [messages is not None for _, messages, _ in made])
        prompts: list[Prompt] = []
        dropped = 0
        truncated = set()
        for drawn, (text, messages, answer), images, tokens in zip(rows, made, shown, ids, strict=True):
            if not tokens:
                raise DataError(f"{drawn.where}: the prompt {text!r} has no token for this tokenizer")
            if self.pictures is not None:
                try:
                    tokens = self.pictures.expand(tokens, images)
                except DataError as error:
                    raise DataError(f"{drawn.where}: {error}") from error
            if self.max_tokens is not None and len(tokens) > self.max_tokens:
                if self.overlong == "error":
                    raise DataError(
                        f"{drawn.where}: the prompt has {len(tokens)} tokens, more than max_prompt_tokens="
                        f"{self.max_tokens}; raise that, or set overlong to drop or truncate"
                    )
                if self.overlong == "drop" or images:
                    dropped += 1
                    continue
                truncated.add(drawn.id)
                tokens = tokens[-self.max_tokens :]
                text = str(self.tokenizer.decode(tokens))
            rest = self.columns.rest_of(drawn.row)
            if messages is not None:
                rest.setdefault("messages", messages)
            prompts.append(Prompt(drawn.id, np.asarray(tokens, dtype=np.int64), text, answer, rest, images))
        return Batch(prompts, dropped, frozenset(truncated))

    def _images(self, drawn: Drawn) -> tuple[ImageRef, ...]:
        """The pictures of a row."""
        column = self.columns.images
        images = () if column is None else image_refs(lookup(drawn.row, column), drawn.where)
        if images and self.pictures is None:
            raise DataError(
                f"{drawn.where}: column {column!r} has {len(images)} pictures, and the model reads text alone: take "
                "one that reads pictures, or leave them out by data.columns: {images: null}"
            )
        return images

    def _text(self, drawn: Drawn, images: int) -> tuple[str, list[Any] | None, str]:
        """What the model reads, with so many pictures; the chat it was made from, if it was; and the right answer."""
        row, answer = drawn.row, self.columns.answer_in(drawn.row)
        choices = self.columns.choices_in(row, drawn.index, drawn.where)
        if choices is not None:
            answer = choices[1]
        if self.template is None:
            assert self.columns.prompt is not None  # Columns.find saw to it
            if (wrong := self.columns.problem_in(row)) is not None:
                raise DataError(f"{drawn.where}: {wrong}")
            said: Any = lookup(row, self.columns.prompt)
            if choices is not None:
                said = _with_choices(said, choices[0], drawn.where)
        else:
            prompt = {} if self.columns.prompt is None else {"prompt": lookup(row, self.columns.prompt)}
            options = {} if choices is None else {"choices": choices[0]}
            said = fill(self.template, {**row, **prompt, **options}, drawn.where)
        if images and self.pictures is not None:
            said = pictured(said, images, self.pictures)
        if isinstance(said, str) and not self.chat and self.system is None:
            return said, None, answer
        messages = [{"role": "user", "content": said}] if isinstance(said, str) else [dict(each) for each in said]
        if self.system is not None and messages[0]["role"] != "system":
            messages.insert(0, {"role": "system", "content": self.system})
        return self._chat(messages, drawn.where), messages, answer

    def _chat(self, messages: list[Any], where: str) -> str:
        if not self.tokenizer.chat_template:
            name = self.tokenizer.name_or_path or type(self.tokenizer).__name__
            raise DataError(
                f"{where} is to be put as a chat, and the tokenizer {name} has no chat template: set "
                "data.chat_template to one (the Jinja text, or a file with it), take a model trained on chats, "
                "or make plain text of the columns by data.template"
            )
        begun = messages[-1]["role"] == "assistant"  # the model goes on with what it is made to begin with
        try:
            text = self.tokenizer.apply_chat_template(
                messages,
                tokenize=False,
                add_generation_prompt=not begun,
                continue_final_message=begun,
                **self.chat_args,
            )
        except Exception as error:  # of Jinja, of the template itself, or of an argument that it does not take
            told = f"{type(error).__name__}: {' '.join(str(error).split())}"
            raise DataError(f"data.chat_template: {where} cannot be put into it: {told}") from error
        return str(text)

    def _encode(self, texts: Sequence[str], chats: Sequence[bool]) -> list[list[int]]:
        """Token ids; plain texts get the tokens that the tokenizer begins with, which chat templates write out."""
        ids: list[list[int]] = [[] for _ in texts]
        for chat in (False, True):
            which = [index for index, is_chat in enumerate(chats) if is_chat == chat]
            if which:
                encoded = self.tokenizer([texts[index] for index in which], add_special_tokens=not chat)["input_ids"]
                for index, tokens in zip(which, encoded, strict=True):
                    ids[index] = tokens if chat else self._open_ended(tokens, texts[index])
        return ids

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
        given = None if self.columns.response is None else lookup(prompt.row, self.columns.response)
        text = prompt.answer if given is None else given
        if not isinstance(text, str) or not text:
            column = self.columns.response or "response"
            raise DataError(f"the prompt {prompt.text[:60]!r} has no worked response: column {column!r} holds {text!r}")
        return text


def _with_choices(said: Any, options: str, where: str) -> str:
    if not isinstance(said, str):
        raise DataError(f"{where}: options are added to prompts of plain text; this is a list of messages")
    return f"{said.rstrip()}\n\n{options}"
