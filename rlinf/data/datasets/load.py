"""Loads all data of a run, from files, hub data sets, iterables and generated tasks alike.

In: settings of a configuration, or Python objects. Out: for a run that generates, a `Data`: problems to learn from,
worked ones to begin with, and those that it is evaluated on. For a run without generation, a `Conversations`:
conversations or pairs to learn from, and those that are held out.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path
from typing import Any, Protocol

from transformers import PreTrainedTokenizerBase

from rlinf.data.datasets.benchmarks import SCORED_BY, Benchmark
from rlinf.data.datasets.conversations import Format, Kind
from rlinf.data.datasets.prompts import Batch, Drawn, Overlong, PromptMaker, Room, Unusable
from rlinf.data.datasets.rendering import GroupMaker, Learn, Renderer
from rlinf.data.datasets.source import Columns, DataError, Iterated, ListRows, Row, Rows, Source, counted, open_rows
from rlinf.data.datasets.stream import BUFFER, IteratedStream, PromptStream
from rlinf.data.datasets.toy_tasks import Problem, Task, make_task, prompts, rows_of, task_maker
from rlinf.data.images import Pictures
from rlinf.data.rng import permutation
from rlinf.data.sample import Example, Group, Prompt
from rlinf.data.tokenizer import TokenizerSource, load_tokenizer

_SHOWN = 5
"""Wrong rows that an error shows; the rest is counted."""
_LOOKED_AT = 100
"""Rows that tell which columns there are: a column that is first filled later must be named by the user."""


@dataclass(frozen=True, slots=True)
class PromptOptions:
    """How rows become prompts."""

    columns: Mapping[str, Any] = field(default_factory=dict)
    """Ours (prompt, answer, response, choices, images) to theirs."""
    template: str | None = None
    """Makes the prompt's text from columns: "Question: {question}\\nAnswer:"."""
    chat: bool = False
    """Texts are what a user says, to be put into the chat template; lists of messages always are."""
    system: str | None = None
    """System message for chats that have none; makes every prompt a chat."""
    chat_template: str | None = None
    """Jinja text, or a file with it; None takes the tokenizer's."""
    chat_args: Mapping[str, Any] = field(default_factory=dict)
    """Further arguments of the chat template, such as {enable_thinking: false}."""
    max_prompt_tokens: int | None = None
    """Longest prompt; None for as long as there is room for."""
    overlong: Overlong = "drop"
    """Treatment of longer ones."""
    unusable: Unusable = "drop"
    """Treatment of rows of which no prompt can be made."""


@dataclass(frozen=True, slots=True)
class Rooms:
    """Limits that a model and its engine put on prompts, as answers of several lengths leave them."""

    train: Room = Room()
    """Behind a prompt that is learned from."""
    evaluation: Room = Room()
    """Behind one that is evaluated on."""


class Layout(Protocol):
    """Which column is what."""

    @property
    def top_level(self) -> list[str]:
        """Columns whose values are looked at in each row."""

    def problem_in(self, row: Row) -> str | None:
        """Describe in words why a row cannot be used; None if it can."""


@dataclass(slots=True)
class Data:
    """Problems, ready to be drawn."""

    tokenizer: PreTrainedTokenizerBase
    """The model's."""
    tokenizer_source: TokenizerSource | None
    """Where it came from, for roles that load their own; None if it was passed as an object."""
    train: PromptStream | IteratedStream
    """Problems to try."""
    warm_up: PromptStream | IteratedStream
    """The problems of `train` in another order, to be shown with their answers."""
    held_out: list[Prompt]
    """Problems to evaluate on."""
    columns: tuple[str, ...]
    """Columns that reward functions can take besides the response: for `Judge`'s `columns`. Empty if they are not known
    yet."""
    notes: tuple[str, ...]
    """Remarks on the data sets, in lines for a log."""
    learn_prompt: bool
    """Worked examples teach the question too."""
    named: Mapping[str, list[Prompt]] = field(default_factory=dict)
    """The problems of benchmarks, by name."""

    def examples(self, count: int) -> list[Example]:
        """The next worked problems, for supervised training."""
        return self.worked(self.warm_up.take(count))

    async def worked_batches(self, count: int, size: int) -> AsyncIterator[list[Example]]:
        """So many batches of worked problems."""
        for _ in range(count):
            yield self.worked(await self.warm_up.draw(size))

    def worked(self, prompts: Sequence[Prompt]) -> list[Example]:
        maker = self.warm_up.maker
        assert isinstance(maker, PromptMaker)
        return maker.worked(prompts, learn_prompt=self.learn_prompt)

    def state_dict(self) -> dict[str, Any]:
        """Where both streams are, as JSON."""
        return {"train": self.train.state_dict(), "warm_up": self.warm_up.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where saved streams were.

        Raises:
            DataError: the data set is another.
        """
        self.train.load_state_dict(state["train"])
        self.warm_up.load_state_dict(state["warm_up"])


def load_data(
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
    named: Mapping[str, Benchmark] | None = None,
    pictures: Callable[[PreTrainedTokenizerBase], Pictures | None] | None = None,
    rooms: Rooms | None = None,
    **options: Any,
) -> Data:
    """Open what a run reads.

    Args:
        tokenizer: the model's, or where it is; None for the characters of the generated task.
        train: problems to learn from; None generates those of `task`.
        split: which split of it.
        shuffle: draw them in an order made from (seed, pass); False keeps theirs.
        seed: of the orders, and of a generated task.
        task, digits: the generated task, see `make_task`.
        evaluation: problems to evaluate on; None takes held-out ones of the generated task, or none.
        evaluation_split: which split of it.
        evaluation_columns: like the option `columns`, which holds for what is not named here.
        problems: how many to evaluate on at most, the same ones every time.
        named: benchmarks to evaluate on beside, by name.
        pictures: of the tokenizer, what reads pictures for the model; None if it reads text alone.
        rooms: what model and engine take of a prompt; None: nobody knows.
        options: see `PromptOptions`; they hold for data of the user's own.

    Raises:
        DataError: something cannot be read or used; rows that are wrong are gathered.
        ValueError: unknown task.
    """
    how, rooms = PromptOptions(**options), rooms or Rooms()
    generated = make_task(task, digits=digits, held_out=problems, seed=seed) if train is None else None
    encoder, source = open_tokenizer(tokenizer, generated, how.chat_template)
    reader: Pictures | None = None if pictures is None else pictures(encoder)
    held_out = [] if generated is None else prompts(generated.held_out, encoder)
    if generated is not None:
        opened = _Opened(rows_of(generated), task_maker(encoder), tuple(sorted(rows_of(generated)[0])), ())
    else:
        assert train is not None
        opened = _open(train, split, encoder, how, _Model(reader, rooms.train))
    notes = opened.notes
    if evaluation is not None and problems:
        columns = {**(evaluation_columns or {})}
        model = _Model(reader, rooms.evaluation)
        held_out, more = _evaluated_on(evaluation, evaluation_split, encoder, how, model, columns, problems)
        notes += more
    benchmarks: dict[str, list[Prompt]] = {}
    for name, benchmark in (named or {}).items():
        benchmarks[name], more = _asked(name, benchmark, encoder, _Model(reader))
        notes += more
    warm_up, steps = opened.streams(seed, shuffle)
    return Data(
        encoder,
        source,
        steps,
        warm_up,
        held_out,
        opened.columns,
        notes,
        learn_prompt=generated is not None,
        named=benchmarks,
    )


@dataclass(frozen=True, slots=True)
class _Model:
    """Properties of the model that matter to its prompts."""

    pictures: Pictures | None
    """Reads pictures for it; None if it reads text alone."""
    room: Room = Room()
    """Limits that it and its engine put on a prompt."""


@dataclass(frozen=True, slots=True)
class _Opened:
    """A source of problems, found and checked."""

    rows: Rows | Iterated
    """The problems."""
    maker: PromptMaker | Callable[[Sequence[Row]], PromptMaker]
    """Makes prompts of them; or makes that once the first rows are known."""
    columns: tuple[str, ...]
    """Names of their columns, as far as they are known."""
    notes: tuple[str, ...]
    """Remarks on the data set, in lines."""

    def streams(self, seed: int, shuffle: bool) -> tuple[PromptStream | IteratedStream, PromptStream | IteratedStream]:
        """Two supplies in orders of their own: worked problems, and problems to try."""
        if not isinstance(self.rows, Iterated):
            assert isinstance(self.maker, PromptMaker)
            first, second = (
                PromptStream(self.rows, self.maker, seed=2 * seed + part, shuffle=shuffle) for part in (0, 1)
            )
            return first, second
        assert not isinstance(self.maker, PromptMaker)
        size = BUFFER if shuffle else 0
        one, other = (IteratedStream(self.rows, self.maker, seed=2 * seed + part, buffer=size) for part in (0, 1))
        return (other, other) if self.rows.once else (one, other)  # what comes only once cannot be handed out twice


def _open(source: Source, split: str, tokenizer: PreTrainedTokenizerBase, how: PromptOptions, model: _Model) -> _Opened:
    rows = open_rows(source, split=split)
    if not isinstance(rows, Iterated):
        return _prepared(rows, tokenizer, how, model)

    def maker(first: Sequence[Row]) -> PromptMaker:
        columns = Columns.find(first, how.columns, where=rows.name, template=how.template)
        return _maker(tokenizer, columns, how, model)

    return _Opened(rows, maker, (), (f"{rows.name}: rows come one after the other",))


def _prepared(
    rows: Rows,
    tokenizer: PreTrainedTokenizerBase,
    how: PromptOptions,
    model: _Model,
    own: Mapping[str, Any] | None = None,
) -> _Opened:
    """Find the columns of rows that are there, and check every one.

    Args:
        own: columns of this data set alone; those of `how` then hold only where they fit.
    """
    if not len(rows):
        raise DataError(f"{rows.name} has no rows")
    first = list(readable(rows)) or [rows[0]]  # the latter raises, and says why not one can be read
    inherited = None if own is None else how.columns
    wanted = how.columns if own is None else own
    columns = Columns.find(first, wanted, where=rows.name, template=how.template, inherited=inherited)
    check_all(rows, columns)
    named = dict(columns.named)
    if how.template is not None:  # whatever column is the prompt, the template says what is taken
        origin = ", ".join(columns.others) or named.get("prompt", "data.template")
        named = {"prompt": origin} | {ours: theirs for ours, theirs in named.items() if ours != "prompt"}
    sources = ", ".join(f"{ours} from {theirs}" for ours, theirs in named.items())
    note = f"{rows.name}: {counted(len(rows), 'row')}; {sources}"
    names = sorted({name for row in first for name in row})
    return _Opened(rows, _maker(tokenizer, columns, how, model), tuple(names), (note,))


def readable(rows: Rows) -> Iterator[Row]:
    """Those of the first rows that can be read; the others are reported with all that is wrong."""
    for index in range(min(_LOOKED_AT, len(rows))):
        try:
            row = rows[index]
        except DataError:
            continue
        yield row


def _maker(tokenizer: PreTrainedTokenizerBase, columns: Columns, how: PromptOptions, model: _Model) -> PromptMaker:
    return PromptMaker(
        tokenizer,
        columns,
        template=how.template,
        chat=how.chat,
        system=how.system,
        chat_args=how.chat_args,
        max_tokens=how.max_prompt_tokens,
        overlong=how.overlong,
        unusable=how.unusable,
        pictures=model.pictures,
        room=model.room,
    )


def check_all(rows: Rows, columns: Layout) -> None:
    """See that every row has its prompt and answer. Raises one `DataError` that shows the first few that have not."""
    wrong = 0
    first: list[str] = []
    for index, row in enumerate(rows.scan(columns.top_level)):
        if isinstance(row, DataError):
            text = str(row)
        elif columns.problem_in(row) is None:
            continue
        else:
            text = f"{rows.where(index)}: {columns.problem_in(rows[index])}"
        wrong += 1
        if len(first) < _SHOWN:
            first.append(text)
    if wrong:
        more = f"\n  and {wrong - len(first)} more" if wrong > len(first) else ""
        listed = "\n  ".join(first)
        raise DataError(f"{rows.name}: {wrong} of {counted(len(rows), 'row')} cannot be used:\n  {listed}{more}")


def _evaluated_on(
    source: Source,
    split: str,
    tokenizer: PreTrainedTokenizerBase,
    how: PromptOptions,
    model: _Model,
    own: Mapping[str, Any],
    problems: int,
) -> tuple[list[Prompt], tuple[str, ...]]:
    rows = open_rows(source, split=split)
    if isinstance(rows, Iterated):
        if rows.is_async:
            raise DataError(f"evaluation: {rows.name} is an async iterable; give a list or a file")
        rows = ListRows(rows.name, list(islice(rows.open(), problems)))  # type: ignore[arg-type]
    opened = _prepared(rows, tokenizer, how, model, own)
    indices = sorted(permutation(len(rows), 0)[:problems].tolist())
    assert isinstance(opened.maker, PromptMaker)
    batch = opened.maker.make([Drawn.of(rows, index, index) for index in indices])
    note = f"evaluation on {len(batch.prompts):,} of them"
    note += f"; {batch.dropped:,} are too long and left out" if batch.dropped else ""
    note += f"; {len(batch.truncated):,} are too long and cut" if batch.truncated else ""
    note += remarks_on(batch)
    if not batch.prompts:
        raise DataError(f"{rows.name}: {note}{f'; the limit is {opened.maker.limit}' if batch.dropped else ''}")
    return batch.prompts, (*opened.notes, note)


def remarks_on(batch: Batch[Any]) -> str:
    """Words on the rows that were left out since they cannot be used, and on those whose text the tokenizer does not
    know; empty if there are none."""
    kinds = (
        ("cannot be used and are left out", batch.unusable),
        ("can hardly be read by the tokenizer (model.tokenizer)", batch.unknown),
    )
    return "".join(f"; {len(of):,} {what}, the first: {next(iter(of.values()))}" for what, of in kinds if of)


def _asked(
    name: str, benchmark: Benchmark, tokenizer: PreTrainedTokenizerBase, model: _Model
) -> tuple[list[Prompt], tuple[str, ...]]:
    """The problems of a benchmark, all of them, and lines about them."""
    try:
        rows = open_rows(benchmark.data, split=benchmark.split)
    except DataError as error:
        raise DataError(f"evaluation.named.{name}={{data: FILE}}: {str(error).removeprefix('data: ')}") from error
    if isinstance(rows, Iterated):
        raise DataError(f"evaluation.named.{name}: {rows.name} comes row by row; give a file or a hub name")
    chat = bool(tokenizer.chat_template) if benchmark.chat is None else benchmark.chat
    # a problem that is left out would change what is compared with the figures of others
    how = PromptOptions(benchmark.columns, benchmark.template, chat, benchmark.system, unusable="error")
    opened = _prepared(rows, tokenizer, how, model)
    assert isinstance(opened.maker, PromptMaker)
    batch = opened.maker.make([Drawn.of(rows, index, index) for index in range(len(rows))])
    notes = [f"{name}: {note}" for note in opened.notes]
    if benchmark.problems not in (None, len(rows)):
        notes.append(
            f"warning: evaluation.named.{name} has {len(rows):,} problems here, and {benchmark.problems:,} as it is "
            "published: figures of others cannot be compared with these"
        )
    if batch.unknown:
        notes.append(f"warning: evaluation.named.{name}: {len(rows):,} problems{remarks_on(batch)}")
    return [replace(prompt, row={**prompt.row, SCORED_BY: name}) for prompt in batch.prompts], tuple(notes)


def open_tokenizer(
    wanted: PreTrainedTokenizerBase | TokenizerSource | None,
    task: Task | None,
    chat_template: str | None,
    *,
    what: str = "problems",
) -> tuple[PreTrainedTokenizerBase, TokenizerSource | None]:
    """The tokenizer of a run, and where its roles load their own from: None if it was passed as an object.

    Args:
        wanted: the model's, or where it is; None for the characters of the generated task.
        task: that task; None for data of the user's own.
        chat_template: for it in place of its own; None keeps that.
        what: the data, in words.

    Raises:
        DataError: there is none for this data, or no such template.
    """
    if wanted is None and task is None:
        raise DataError(f"data: {what} of your own need the tokenizer of a model: set model.path or model.tokenizer")
    source = task.tokenizer if task is not None and wanted is None else wanted
    assert source is not None
    tokenizer = source if isinstance(source, PreTrainedTokenizerBase) else load_tokenizer(source)
    if chat_template is not None:
        tokenizer.chat_template = _template_text(chat_template)
    return tokenizer, None if isinstance(source, PreTrainedTokenizerBase) else source


def _template_text(template: str) -> str:
    """A chat template as such, or the file that has it."""
    if "{" in template:
        return template
    path = Path(template).expanduser()
    if not path.is_file():
        raise DataError(f"data.chat_template: {template} is neither Jinja text nor a file")
    return path.read_text(encoding="utf-8")


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
    """Treatment of longer ones."""
    unusable: Unusable = "drop"
    """Treatment of rows of which nothing can be made."""
    room: Room = Room()
    """Limits that the model puts on a conversation."""
    pictures: Pictures | None = None
    """Reads pictures for the model; None if it reads text alone."""


@dataclass(frozen=True, slots=True)
class Conversations:
    """The data of a run without generation: groups to learn from, ready to be drawn, and groups that are held out."""

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
    """Remarks on the data sets, in lines for a log."""


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
    generated = make_task(task, digits=digits, held_out=problems, seed=seed) if train is None else None
    encoder, source = open_tokenizer(tokenizer, generated, how.chat_template, what="conversations")
    if pictures is not None:
        how = replace(how, pictures=pictures(encoder))
    rows: Rows | Iterated
    evaluation_rows: Rows | Iterated | None = (
        None if evaluation is None else open_rows(evaluation, split=evaluation_split)
    )
    if generated is None:
        assert train is not None
        rows = open_rows(train, split=split)
    else:
        rows = _of_task(f"task {task}", generated.train, how)
        evaluation_rows = evaluation_rows or _of_task(f"task {task}, held out", generated.held_out, how)
    stream, notes = _stream(rows, encoder, how, seed, shuffle)
    held_out: list[Group] = []
    if evaluation_rows is not None:
        held_out, more = _held_out(
            evaluation_rows, encoder, how, {**how.columns, **(evaluation_columns or {})}, problems
        )
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
        return _conversation_maker(first, rows.name, tokenizer, how, how.columns)

    stream = IteratedStream[Group](rows, make, seed=seed, buffer=BUFFER if shuffle else 0)
    return stream, (f"{rows.name}: rows come one after the other",)


def _checked(
    rows: Rows, tokenizer: PreTrainedTokenizerBase, how: ConversationOptions, columns: Mapping[str, Any]
) -> tuple[GroupMaker, str]:
    """Make the maker of groups for rows that can be read in any order, after looking at each; and a line on them."""
    if not len(rows):
        raise DataError(f"{rows.name} has no rows")
    maker = _conversation_maker(list(readable(rows)) or [rows[0]], rows.name, tokenizer, how, columns)
    check_all(rows, maker.format)
    sources = ", ".join(f"{ours} from {theirs}" for ours, theirs in maker.format.named)
    return maker, f"{rows.name}: {counted(len(rows), 'row')}; {sources}"


def _conversation_maker(
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
    indices = sorted(permutation(len(rows), 0)[:most].tolist())
    batch = maker.make([Drawn.of(rows, index, index) for index in indices])
    remark = f"evaluation on {len(batch.prompts):,} of them"
    remark += f"; {batch.dropped:,} are left out: too long, or nothing to learn" if batch.dropped else ""
    remark += f"; {len(batch.truncated):,} are too long and cut" if batch.truncated else ""
    remark += remarks_on(batch)
    if not batch.prompts:
        raise DataError(f"{rows.name}: {remark}{f'; the limit is {maker.limit}' if batch.dropped else ''}")
    return batch.prompts, (note, remark)


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
