"""What a run without generation reads: conversations or pairs to learn from, and those that are held out.

In: what a configuration says, or Python objects. Out: a `Conversations`, the same for files, hub data sets, iterables
and generated tasks.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Any

from transformers import PreTrainedTokenizerBase

from rlinf.data.conversations.formats import Format, Kind
from rlinf.data.conversations.group_maker import GroupMaker
from rlinf.data.conversations.rendering import Learn, Renderer
from rlinf.data.datasets.load import check_all, open_tokenizer, readable, remarks_on
from rlinf.data.datasets.prompt_maker import Drawn, Overlong, Room, Unusable
from rlinf.data.datasets.prompt_stream import PromptStream
from rlinf.data.datasets.rows import DataError, ListRows, Row, Rows, counted
from rlinf.data.datasets.sources import Iterated, Source, open_rows
from rlinf.data.datasets.streaming import BUFFER, IteratedStream
from rlinf.data.datasets.toy_tasks import Problem, make_task
from rlinf.data.pictures.processor import Pictures
from rlinf.data.rng import permutation
from rlinf.data.sample import Group
from rlinf.data.tokenizer import TokenizerSource


@dataclass(frozen=True, slots=True)
class ConversationOptions:
    """How rows become conversations."""

    kind: Kind = "sft"
    """One conversation of each row, or a preference pair."""
    scored: bool = False
    """See `GroupMaker`."""
    learn: Learn = "assistant"
    """Which tokens are learned."""
    columns: Mapping[str, Any] = field(default_factory=dict)
    """Ours to theirs, see `formats.OURS`."""
    chat: bool = False
    """Plain texts of prompt and completion are turns of a chat."""
    system: str | None = None
    """System message for chats that have none; makes every row a chat."""
    chat_template: str | None = None
    """Jinja text, or a file with it; None takes the tokenizer's."""
    chat_args: Mapping[str, Any] = field(default_factory=dict)
    """Further arguments of the chat template."""
    max_tokens: int | None = None
    """Longest conversation; None for as long as there is room for."""
    overlong: Overlong = "drop"
    """What becomes of longer ones."""
    unusable: Unusable = "drop"
    """What becomes of rows of which nothing can be made."""
    room: Room = Room()
    """What the model takes of a conversation."""
    pictures: Pictures | None = None
    """Reads pictures for the model; None if it reads text alone."""


@dataclass(frozen=True, slots=True)
class Conversations:
    """What is learned from, ready to be drawn."""

    tokenizer: PreTrainedTokenizerBase
    """The model's."""
    tokenizer_source: TokenizerSource | None
    """Where it came from, for roles that load their own; None if it was passed as an object."""
    train: PromptStream[Group] | IteratedStream[Group]
    """To learn from, without end."""
    rows: int | None
    """How many there are; None where they come one after the other."""
    held_out: list[Group]
    """Never learned from."""
    notes: tuple[str, ...]
    """What was found, in lines for a log."""


def load_conversations(
    tokenizer: PreTrainedTokenizerBase | TokenizerSource | None = None,
    *,
    train: Source | None = None,
    split: str = "train",
    shuffle: bool = True,
    seed: int = 0,
    task: str = "sort",
    digits: int = 4,
    evaluation: Source | None = None,
    evaluation_split: str = "test",
    evaluation_columns: Mapping[str, Any] | None = None,
    problems: int = 500,
    options: ConversationOptions | None = None,
    pictures: Callable[[PreTrainedTokenizerBase], Pictures | None] | None = None,
) -> Conversations:
    """Open what a run reads.

    Args:
        tokenizer: the model's, or where it is; None for the characters of the generated task.
        train: rows to learn from; None generates those of `task`, whose rejected answers have two digits exchanged.
        split: which split of it.
        shuffle: draw them in an order made from (seed, pass); False keeps theirs.
        seed: of the order, and of a generated task.
        task, digits: the generated task, see `make_task`.
        evaluation: rows that are held out; None takes those of the generated task, or none.
        evaluation_split: which split of it.
        evaluation_columns: like the option `columns`, which holds for what is not named here.
        problems: how many are held out at most, the same ones every time.
        options: how rows become conversations.
        pictures: of the tokenizer, what reads pictures for the model; None if it reads text alone.

    Raises:
        DataError: something cannot be read or used; rows that are wrong are gathered.
        ValueError: unknown task.
    """
    how = ConversationOptions() if options is None else options
    made = make_task(task, digits=digits, held_out=problems, seed=seed) if train is None else None
    encoder, source = open_tokenizer(tokenizer, made, how.chat_template, what="conversations")
    if pictures is not None:
        how = replace(how, pictures=pictures(encoder))
    rows: Rows | Iterated
    held: Rows | Iterated | None = None if evaluation is None else open_rows(evaluation, split=evaluation_split)
    if made is None:
        assert train is not None
        rows = open_rows(train, split=split)
    else:
        rows = _of_task(f"task {task}", made.train, how)
        held = held or _of_task(f"task {task}, held out", made.held_out, how)
    stream, notes = _stream(rows, encoder, how, seed, shuffle)
    held_out: list[Group] = []
    if held is not None:
        held_out, more = _held_out(held, encoder, how, {**how.columns, **(evaluation_columns or {})}, problems)
        notes += more
    return Conversations(
        encoder,
        source,
        stream,
        None if isinstance(rows, Iterated) else len(rows),
        held_out,
        notes,
    )


def _stream(
    rows: Rows | Iterated, tokenizer: PreTrainedTokenizerBase, how: ConversationOptions, seed: int, shuffle: bool
) -> tuple[PromptStream[Group] | IteratedStream[Group], tuple[str, ...]]:
    if not isinstance(rows, Iterated):
        maker, note = _checked(rows, tokenizer, how, how.columns)
        return PromptStream(rows, maker, seed=seed, shuffle=shuffle), (note,)

    def make(first: Sequence[Row]) -> GroupMaker:
        return _maker(first, rows.name, tokenizer, how, how.columns)

    stream = IteratedStream[Group](rows, make, seed=seed, buffer=BUFFER if shuffle else 0)
    return stream, (f"{rows.name}: rows come one after the other",)


def _checked(
    rows: Rows, tokenizer: PreTrainedTokenizerBase, how: ConversationOptions, columns: Mapping[str, Any]
) -> tuple[GroupMaker, str]:
    """What makes groups of rows that are there, each of which was looked at; and a line on them."""
    if not len(rows):
        raise DataError(f"{rows.name} has no rows")
    maker = _maker(list(readable(rows)) or [rows[0]], rows.name, tokenizer, how, columns)
    check_all(rows, maker.format)
    found = ", ".join(f"{ours} from {theirs}" for ours, theirs in maker.format.named)
    return maker, f"{rows.name}: {counted(len(rows), 'row')}; {found}"


def _maker(
    first: Sequence[Row],
    name: str,
    tokenizer: PreTrainedTokenizerBase,
    how: ConversationOptions,
    columns: Mapping[str, Any],
) -> GroupMaker:
    layout = Format.find(
        first,
        columns,
        kind=how.kind,
        where=name,
        chat=how.chat,
        system=how.system,
        has_template=bool(tokenizer.chat_template),
    )
    renderer = Renderer(tokenizer, how.learn, how.chat_args)
    return GroupMaker(
        renderer,
        layout,
        how.max_tokens,
        how.overlong,
        unusable=how.unusable,
        scored=how.scored,
        pictures=how.pictures,
        room=how.room,
    )


def _held_out(
    rows: Rows | Iterated,
    tokenizer: PreTrainedTokenizerBase,
    how: ConversationOptions,
    columns: Mapping[str, Any],
    most: int,
) -> tuple[list[Group], tuple[str, ...]]:
    if isinstance(rows, Iterated):
        if rows.is_async:
            raise DataError(f"evaluation: {rows.name} is an async iterable; give a list or a file")
        rows = ListRows(rows.name, list(islice(rows.open(), most)))  # type: ignore[arg-type]
    maker, note = _checked(rows, tokenizer, how, columns)
    chosen = sorted(permutation(len(rows), 0)[:most].tolist())
    batch = maker.make([Drawn.of(rows, index, index) for index in chosen])
    said = f"evaluation on {len(batch.prompts):,} of them"
    said += f"; {batch.dropped:,} are left out: too long, or nothing to learn" if batch.dropped else ""
    said += f"; {len(batch.truncated):,} are too long and cut" if batch.truncated else ""
    said += remarks_on(batch)
    if not batch.prompts:
        raise DataError(f"{rows.name}: {said}{f'; the limit is {maker.limit}' if batch.dropped else ''}")
    return batch.prompts, (note, said)


def _of_task(name: str, problems: Sequence[Problem], how: ConversationOptions) -> ListRows:
    """A generated task's problems with their right answers, and for pairs a wrong one."""
    if how.kind == "sft":
        return ListRows(name, [{"prompt": each.text, "completion": each.answer} for each in problems])
    pairs = [(each, _wrong(each.answer, number)) for number, each in enumerate(problems)]
    rows = [{"prompt": each.text, "chosen": each.answer, "rejected": wrong} for each, wrong in pairs if wrong]
    return ListRows(name, rows)


def _wrong(answer: str, number: int) -> str | None:
    """The answer with two neighbouring digits exchanged, which two depends on the number; None if all are equal."""
    places = [at for at in range(len(answer) - 1) if answer[at] != answer[at + 1]]
    if not places:
        return None
    at = places[number % len(places)]
    return answer[:at] + answer[at + 1] + answer[at] + answer[at + 2 :]
