"""Chat templates applied turn by turn: encodes only the messages that are new, never what the model has read.

In: messages of a conversation, some of which are tokens already. Out: the tokens that follow those. With a chat
template the new tokens are what its rendering of the whole conversation puts behind the content of the last message
that is tokens already; so templates that trim, close turns or add generation prompts are followed, and what a model
generated is never encoded again. Tools are described where the template does it. Without a template texts stand one
behind the other, and tools are described nowhere unless a message does: a person is told so, once.

The prompts that a program passes become `Prompt`s: texts, messages, token ids, rows with a prompt and an answer.
"""

from __future__ import annotations

import hashlib
import json
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from transformers import PreTrainedTokenizerBase

from rlinf.agents.arguments import WrongType, WrongValue, shown, token_ids
from rlinf.data.datasets.conversations import with_arguments
from rlinf.data.datasets.source import unwritable
from rlinf.data.sample import Prompt, read_only
from rlinf.runtime.base.errors import UserError

Message = Mapping[str, Any]
"""`role` and `content`, and what else the chat template reads, such as `tool_calls`."""
_MARK = f"rlinf{secrets.token_hex(16)}"
"""Stands for the content of a message that is tokens already; not white space, which templates trim, and another in
each process, so that no text can hold it."""
_PROBE = f"probe{secrets.token_hex(16)}"
"""Stands for the content of a message of which is asked whether the template shows it."""
_CALL = {"name": "f", "arguments": dict[str, Any]()}
_CALLED: tuple[Message, ...] = (
    {"role": "assistant", "content": "", "tool_calls": [{"id": "call00001", "type": "function", "function": _CALL}]},
    {"role": "tool", "content": "", "name": "f", "tool_call_id": "call00001"},
)
"""A tool was called, and has answered."""
_KEPT = 256
"""Encodings that are kept. Attempts at one task begin alike, and often read the same from a tool."""


def copied(value: Any) -> Any:
    """Plain data, such as messages, as a copy of its own: mappings, lists and arrays anew, all else as it is."""
    if isinstance(value, Mapping):
        return {key: copied(each) for key, each in value.items()}
    if type(value) in (list, tuple):
        return type(value)(map(copied, value))
    return value.copy() if isinstance(value, np.ndarray) else value


_TAIL = 8
"""Tokens at the end of a prompt in which it may begin the model's thought: `<think>` and a line end, by letters too."""


def begins_thought(tokenizer: Any, ids: np.ndarray) -> bool:
    """Tokens that end a prompt begin the model's thought, as templates of models that always think do."""
    return str(tokenizer.decode(ids[-_TAIL:])).rstrip().endswith("<think>")


class ChatFormat:
    """Encodes messages as one tokenizer and its chat template do.

    Args:
        tokenizer: the model's.
        arguments: further ones of the chat template, such as `enable_thinking` or `tools`, a list of schemas.
        say: prints a line for people; None: nobody listens.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        arguments: Mapping[str, Any] | None = None,
        say: Callable[[str], None] | None = None,
    ) -> None:
        self.tokenizer, self._arguments, self._say = tokenizer, dict(arguments or {}), say
        self._said: set[str] = set()
        self._shown: set[str] = set()  # roles that the template is known to show
        if not self._arguments.get("tools"):  # templates tell an empty list from none
            self._arguments.pop("tools", None)
        self._kept: dict[bytes, np.ndarray] = {}

    def with_arguments(self, **more: Any) -> ChatFormat:
        """Return a format of the same tokenizer with further arguments of the chat template."""
        if not more:
            return self
        format = ChatFormat(self.tokenizer, {**self._arguments, **more}, self._say)
        format._kept, format._said, format._shown = self._kept, self._said, self._shown
        return format

    def warn(self, about: str, text: str) -> None:
        """Warn people of what this tokenizer cannot do.

        Args:
            about: names the warning: of one name, only the first is said.
            text: what it says.
        """
        if self._say is not None and about not in self._said:
            self._said.add(about)
            self._say(f"warning: {text}")

    @property
    def fingerprint(self) -> bytes:
        """Equal for formats with the same arguments of the chat template."""
        return json.dumps(self._arguments, sort_keys=True, default=str).encode()

    @property
    def has_template(self) -> bool:
        """Messages get a chat template around them."""
        return bool(self.tokenizer.chat_template)

    @property
    def thinks(self) -> bool:
        """Its model marks what it thinks by `<think>`, as the chat template shows."""
        template = self.tokenizer.chat_template or ""
        return "</think>" in (" ".join(template.values()) if isinstance(template, dict) else str(template))

    def ids(self, text: str, *, first: bool = False) -> np.ndarray:
        """Token ids of plain text, int64 [tokens].

        Args:
            text: not empty, or there are none.
            first: nothing stands before it: the token that the tokenizer begins with does.

        Raises:
            UserError: it has half of a character.
        """
        if (wrong := unwritable(text)) is not None:
            raise UserError(f"a message cannot be encoded: {wrong}")
        encoded: list[int] = self.tokenizer(text, add_special_tokens=first)["input_ids"] if text else []
        end = self.tokenizer.eos_token_id
        if first and encoded and encoded[-1] == end and not text.endswith(str(self.tokenizer.eos_token)):
            encoded = encoded[:-1]  # some tokenizers end what they encode; the model is to go on
        return np.asarray(encoded, dtype=np.int64)

    def opening(self, messages: Sequence[Message], *, answer: bool = True) -> np.ndarray:
        """Token ids of the first messages, int64 [tokens].

        Args:
            messages: at least one.
            answer: the model answers next.

        Raises:
            UserError: the chat template refuses them, leaves one out, or does not describe the tools.
        """
        if not self.has_template:
            text = "".join(_text(message) for message in messages)
            if hidden := self._hidden(text):
                self.warn(
                    "tools",
                    f"nothing tells the model of its tools, such as {hidden[0]}: the tokenizer has no chat template; "
                    "set data.chat_template, or describe them in a message",
                )
            return self.ids(text, first=True)
        return self._once("opening", messages, answer, self._opening)

    def _opening(self, messages: Sequence[Message], answer: bool) -> np.ndarray:
        text = self._rendered(messages, answer)
        if hidden := self._hidden(text):
            raise UserError(
                f"the chat template does not tell the model of the tools, such as {hidden[0]}: take a template that "
                "does, by data.chat_template, or describe them in a system message and pass no tools"
            )
        self._check_shown(messages, 0)
        if self._arguments.get("tools"):  # what they will say is shown too?
            self._check_shown([*messages, *_CALLED], len(messages) + 1)
        return self.ids(text)

    def _hidden(self, text: str) -> list[str]:
        """Names of the tools that a text does not tell of."""
        return [name for tool in self._arguments.get("tools", ()) if (name := _name_of(tool)) not in text]

    def following(
        self,
        before: Sequence[Message],
        messages: Sequence[Message],
        *,
        ended_by: int | None = None,
        answer: bool = True,
    ) -> np.ndarray:
        """Token ids of messages behind others that are tokens already, int64 [tokens].

        Args:
            before: those that are tokens, at least one.
            messages: those that follow.
            ended_by: the token that the model ended the last of them with; the template's own is not put there again.
                None: the model did not end it, so the template does.
            answer: the model answers next.

        Raises:
            UserError: the chat template refuses them, or does not show the last of the messages before.
        """
        if not self.has_template:
            return self.ids("".join(_text(message) for message in messages))
        # Calls of the last answer are among its tokens; the template would write them once more.
        last = {key: value for key, value in before[-1].items() if key != "tool_calls"}
        marked = [*before[:-1], {**last, "content": _MARK}, *messages]
        self._check_shown(marked, len(before))
        ids = self._once("following", marked, answer, self._behind_the_mark)
        return ids[1:] if ended_by is not None and len(ids) and ids[0] == ended_by else ids

    def _behind_the_mark(self, marked: Sequence[Message], answer: bool) -> np.ndarray:
        _, mark, text = self._rendered(marked, answer).rpartition(_MARK)
        if not mark:
            role = next(message["role"] for message in marked if message.get("content") == _MARK)
            raise UserError(
                f"the chat template leaves out the {role} message that was said last, so nothing can follow it: take "
                "another template, by data.chat_template"
            )
        return self.ids(text)

    def _check_shown(self, messages: Sequence[Message], first: int) -> None:
        """See that the model will read messages, once for each role: many templates print nothing of roles that they
        do not know.

        Args:
            messages: all of them.
            first: of those that are new.

        Raises:
            UserError: the template leaves one out.
        """
        for number, message in enumerate(messages[first:], first):
            role = str(message["role"])
            if role in self._shown or role == "assistant" or not isinstance(message.get("content"), str):
                continue
            probe = [*messages[:number], {**message, "content": _PROBE}, *messages[number + 1 :]]
            try:
                visible = _PROBE in self._rendered(probe, answer=True)
            except UserError:  # it wants another text there, and says so where it does not get it
                visible = True
            if not visible:
                raise UserError(
                    f"the chat template prints nothing of messages of role {role}, so the model would never read them: "
                    "take a template that knows this role, by data.chat_template, or say it as the user"
                )
            self._shown.add(role)

    def _once(
        self,
        what: str,
        messages: Sequence[Message],
        answer: bool,
        encode: Callable[[Sequence[Message], bool], np.ndarray],
    ) -> np.ndarray:
        """Encode messages with `encode`, or return the tokens cached for equal ones a short while ago."""
        try:
            plain = [dict(message) for message in messages]
            plain_text = json.dumps([what, answer, self.tokenizer.chat_template, self._arguments, plain])
        except (TypeError, ValueError):  # something in them is not plain data: it may look the same and not be
            return encode(messages, answer)
        key = hashlib.blake2b(plain_text.encode(), digest_size=16).digest()
        if (ids := self._kept.get(key)) is None:
            ids = encode(messages, answer)
            if len(self._kept) >= _KEPT:
                del self._kept[next(iter(self._kept))]  # the oldest
            self._kept[key] = ids
        return ids.copy()

    def _rendered(self, messages: Sequence[Message], answer: bool) -> str:
        continues = messages[-1]["role"] == "assistant"  # the model goes on with what it is made to begin with
        try:
            text = self.tokenizer.apply_chat_template(
                [with_arguments(message) for message in messages],
                tokenize=False,
                add_generation_prompt=answer and not continues,
                continue_final_message=answer and continues,
                **self._arguments,
            )
        except Exception as error:  # of jinja, which has many, or what the template itself raises
            reason = " ".join(str(error).split()) or type(error).__name__
            roles = ", ".join(str(message["role"]) for message in messages)
            raise UserError(
                f"the chat template refuses messages of the roles {roles}: {reason}. Say them in another order or in "
                "another role, or set data.chat_template"
            ) from None
        return str(text)


def _name_of(tool: Any) -> str:
    """The name of a tool; chat templates take schemas, and functions."""
    return str(tool["function"]["name"] if isinstance(tool, Mapping) else tool.__name__)


def _text(message: Message) -> str:
    if message.get("tool_calls"):
        raise UserError(
            "a message with tool_calls needs a chat template, which this tokenizer has not: write the calls into its "
            "content, or set data.chat_template"
        )
    content = message.get("content")
    if not isinstance(content, str):
        raise UserError(
            f"a {message['role']} message of content {type(content).__name__} needs a chat template, which this "
            "tokenizer has not: give it a text, or set data.chat_template"
        )
    return content


def prompt_of(source: Any, id: int, chat: ChatFormat, vocabulary: int | None, call: str) -> Prompt:
    """A prompt.

    Args:
        source: a text, which stands as it is; messages, which get the chat template; token ids; a mapping with `prompt`
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
    if isinstance(source, Prompt):
        token_ids(source.token_ids, vocabulary, call)
        return source
    if isinstance(source, Mapping):
        if "prompt" not in source:
            raise WrongType(f"{call}: the row {shown(dict(source))} has no `prompt`; give it one, and an `answer`")
        rest = {name: value for name, value in source.items() if name not in ("prompt", "answer")}
        prompt = prompt_of(source["prompt"], id, chat, vocabulary, call)
        return replace(prompt, answer=str(source.get("answer", "")), row={**prompt.row, **rest})
    if isinstance(source, str):
        return Prompt(id, _some(chat.ids(source, first=True), source, call), source)
    if are_messages(source, call):
        ids = _some(chat.opening(source), source, call)
        return Prompt(id, ids, str(chat.tokenizer.decode(ids)), row={"messages": copied(source)})
    if isinstance(source, (list, tuple, np.ndarray)):
        ids = token_ids(source, vocabulary, call)
        return Prompt(id, ids, str(chat.tokenizer.decode(ids)))
    raise WrongType(f"{call}: {shown(source)} is no prompt; give a text, a list of messages, token ids or a Prompt")


def handed_out(task: Any) -> Any:
    """A task as a program is given it: of a prompt a copy, so that nothing the program does to it reaches the reward,
    the record, or the other attempts at it. Tasks of one's own are passed as they are."""
    if not isinstance(task, Prompt):
        return task
    return replace(task, token_ids=read_only(task.token_ids), row=copied(task.row))


def are_messages(value: Any, call: str) -> bool:
    """True if the value is a list of messages.

    Raises:
        TypeError: of messages that have no role.
    """
    if not isinstance(value, (list, tuple)) or not value or not all(isinstance(message, Mapping) for message in value):
        return False
    if any("role" not in message for message in value):
        raise WrongType(f"{call}: {shown(value)}: every message needs a `role` and a `content`")
    return True


def _some(ids: np.ndarray, value: Any, call: str) -> np.ndarray:
    if not len(ids):
        raise WrongValue(f"{call}: the prompt {shown(value)} has no token; give at least one")
    return ids
