"""Loads all data of a run, from files, hub data sets, iterables and generated tasks alike.

In: settings of a configuration, or Python objects. Out: for a run that generates, a `Data`: problems to learn from,
worked ones to begin with, and those that it is evaluated on. For a run without generation, a `Conversations`:
conversations or pairs to learn from, and those that are held out.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, Generic

from transformers import PreTrainedTokenizerBase

from rlinf.data.datasets.benchmarks import SCORED_BY, Benchmark
from rlinf.data.datasets.conversations import Format
from rlinf.data.datasets.prompts import Batch, Drawn, Item, Layout, Maker, PromptMaker, PromptOptions, Room
from rlinf.data.datasets.published import FORMS
from rlinf.data.datasets.rendering import ConversationOptions, GroupMaker, Renderer
from rlinf.data.datasets.source import Columns, DataError, Iterated, ListRows, Row, Rows, Source, counted, open_rows
from rlinf.data.datasets.stream import BUFFER, IteratedStream, PromptStream
from rlinf.data.datasets.toy_tasks import Problem, Task, make_task, prompts, rows_of, task_maker
from rlinf.data.images import Pictures
from rlinf.data.rng import permutation
from rlinf.data.sample import Example, Group, Prompt
from rlinf.data.tokenizer import TokenizerSource, load_tokenizer

__all__ = ["ConversationOptions", "Conversations", "Data", "PromptOptions", "Rooms", "load_conversations", "load_data"]

_SHOWN = 5
"""Wrong rows that an error shows; the rest is counted."""
_LOOKED_AT = 100
"""Rows that tell which columns there are: a column that is first filled later must be named by the user."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sources:
    """The rows of a run."""

    train: Source | None = None
    """To learn from; None generates those of `task`. Rejected answers of its pairs have two digits exchanged."""
    split: str = "train"
    """Which split of it."""
    shuffle: bool = True
    """Draw them in an order made from (seed, pass); False keeps theirs."""
    seed: int = 0
    """Of the orders, and of a generated task."""
    task: str = "sort"
    """The generated task, see `make_task`."""
    digits: int = 4
    """Of its problems."""
    evaluation: Source | None = None
    """To evaluate on; None takes those that the generated task holds out, or none."""
    evaluation_split: str = "test"
    """Which split of it."""
    evaluation_columns: Mapping[str, Any] = field(default_factory=dict)
    """Like the option `columns`, which holds for what is not named here."""
    problems: int = 500
    """How many to evaluate on at most, the same ones every time."""

    def generated(self) -> Task | None:
        """The generated task; None where rows are the user's own.

        Raises:
            ValueError: there is no such task.
        """
        if self.train is not None:
            return None
        return make_task(self.task, digits=self.digits, held_out=self.problems, seed=self.seed)


PicturesOf = Callable[[PreTrainedTokenizerBase], Pictures | None]
"""Of the tokenizer, what reads pictures for the model; None if it reads text alone."""
MakerOf = Callable[[Sequence[Row], str], Maker[Item]]
"""Makes what makes prompts or groups, of the first rows and the name of the data set."""


@dataclass(frozen=True, slots=True)
class Rooms:
    """Limits that a model and its engine put on prompts, as answers of several lengths leave them."""

    train: Room = Room()
    """Behind a prompt that is learned from."""
    evaluation: Room = Room()
    """Behind one that is evaluated on."""


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
    named: Mapping[str, Benchmark] | None = None,
    pictures: PicturesOf | None = None,
    rooms: Rooms | None = None,
    **settings: Any,
) -> Data:
    """Open what a run reads.

    Args:
        tokenizer: the model's, or where it is; None for the characters of the generated task.
        named: benchmarks to evaluate on beside, by name.
        pictures: what reads pictures for the model.
        rooms: what model and engine take of a prompt; None: nobody knows.
        settings: fields of `Sources` and of `PromptOptions`; the latter hold for data of the user's own.

    Raises:
        DataError: something cannot be read or used; rows that are wrong are gathered.
        ValueError: unknown task.
    """
    names = {each.name for each in fields(Sources)}
    sources = Sources(**{name: value for name, value in settings.items() if name in names})
    how = PromptOptions(**{name: value for name, value in settings.items() if name not in names})
    rooms, task = rooms or Rooms(), sources.generated()
    encoder, source = open_tokenizer(tokenizer, task, how.chat_template)
    reader = None if pictures is None else pictures(encoder)
    held_out = [] if task is None else prompts(task.held_out, encoder)
    if task is not None:
        rows, maker = rows_of(task), task_maker(encoder)
        columns = tuple(sorted(rows[0]))
        opened = _Opened(lambda seed: PromptStream(rows, maker, seed=seed, shuffle=sources.shuffle), columns)
    else:
        assert sources.train is not None
        make = partial(_prompt_maker, encoder, how, reader, rooms.train)
        opened = _open(_rows_at("data.train", sources.train, sources.split), make, sources.shuffle)
    notes = opened.notes
    if sources.evaluation is not None and sources.problems:
        make = partial(_prompt_maker, encoder, how, reader, rooms.evaluation, own=sources.evaluation_columns)
        evaluated = _rows_at("evaluation.data", sources.evaluation, sources.evaluation_split)
        held_out, more = _evaluated_on(evaluated, make, sources.problems)
        notes += more
    benchmarks: dict[str, list[Prompt]] = {}
    for name, benchmark in (named or {}).items():
        benchmarks[name], more = _problems_of(name, benchmark, encoder, reader)
        notes += more
    steps = opened.stream(2 * sources.seed + 1)
    warm_up = steps if opened.once else opened.stream(2 * sources.seed)  # what comes once cannot be handed out twice
    return Data(
        encoder,
        source,
        steps,
        warm_up,
        held_out,
        opened.columns,
        notes,
        learn_prompt=task is not None,
        named=benchmarks,
    )


def _prompt_maker(
    tokenizer: PreTrainedTokenizerBase,
    how: PromptOptions,
    pictures: Pictures | None,
    room: Room,
    first: Sequence[Row],
    name: str,
    *,
    own: Mapping[str, Any] | None = None,
) -> PromptMaker:
    """Make the maker of prompts for rows, of which these are the first.

    Args:
        own: columns of this data set alone; those of `how` then hold only where they fit.
    """
    inherited, wanted = (None, how.columns) if own is None else (how.columns, own)
    columns = Columns.find(first, wanted, where=name, template=how.template, inherited=inherited)
    return PromptMaker(tokenizer, columns, how, pictures, room)


@dataclass(frozen=True, slots=True)
class _Opened(Generic[Item]):
    """A source of rows, found and checked."""

    stream: Callable[[int], PromptStream[Item] | IteratedStream[Item]]
    """Makes an endless supply, of a seed."""
    columns: tuple[str, ...] = ()
    """Names of their columns, as far as they are known."""
    notes: tuple[str, ...] = ()
    """Remarks on the data set, in lines."""
    once: bool = False
    """Rows come only once."""


def _open(rows: Rows | Iterated, make: MakerOf[Item], shuffle: bool) -> _Opened[Item]:
    """Find the columns of rows and, where they are there, check every one."""
    if isinstance(rows, Iterated):
        source, size = rows, BUFFER if shuffle else 0

        def maker_of(first: Sequence[Row]) -> Maker[Item]:
            return make(first, source.name)

        note = f"{rows.name}: rows come one after the other"
        return _Opened(lambda seed: IteratedStream(source, maker_of, seed=seed, buffer=size), (), (note,), rows.once)
    table = rows
    maker, note = _checked(rows, make)
    names = sorted({name for row in readable(rows) for name in row})
    return _Opened(lambda seed: PromptStream(table, maker, seed=seed, shuffle=shuffle), tuple(names), (note,))


def _rows_at(key: str, source: Any, split: str) -> Rows | Iterated:
    """Rows of what a key names.

    Raises:
        DataError: there are none, or they cannot be read; the text has the key.
    """
    try:
        return open_rows(source, split=split)
    except DataError as error:
        raise DataError(f"{key}: {str(error).removeprefix('data: ')}") from error


def _checked(rows: Rows, make: MakerOf[Item]) -> tuple[Maker[Item], str]:
    """Make the maker for rows that are there, after looking at each; and a line on them."""
    if not len(rows):
        raise DataError(f"{rows.name} has no rows")
    maker = make(list(readable(rows)) or [rows[0]], rows.name)  # the latter raises, and says why not one can be read
    check_all(rows, maker.layout)
    sources = ", ".join(f"{ours} from {theirs}" for ours, theirs in maker.sources.items())
    return maker, f"{rows.name}: {counted(len(rows), 'row')}; {sources}"


def readable(rows: Rows) -> Iterator[Row]:
    """Those of the first rows that can be read; the others are reported with all that is wrong."""
    for index in range(min(_LOOKED_AT, len(rows))):
        try:
            row = rows[index]
        except DataError:
            continue
        yield row


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


def _evaluated_on(rows: Rows | Iterated, make: MakerOf[Item], most: int) -> tuple[list[Item], tuple[str, ...]]:
    """Some of the rows, always the same ones, and lines about them."""
    if isinstance(rows, Iterated):
        if rows.is_async:
            raise DataError(f"evaluation: {rows.name} is an async iterable; give a list or a file")
        rows = ListRows(rows.name, list(islice(rows.open(), most)))  # type: ignore[arg-type]
    maker, note = _checked(rows, make)
    indices = sorted(permutation(len(rows), 0)[:most].tolist())
    batch = maker.make([Drawn.of(rows, index, index) for index in indices])
    remark = f"evaluation on {len(batch.prompts):,} of them"
    remark += f"; {batch.dropped:,} are left out: {maker.too_long}" if batch.dropped else ""
    remark += f"; {len(batch.truncated):,} are too long and cut" if batch.truncated else ""
    remark += remarks_on(batch)
    if not batch.prompts:
        raise DataError(f"{rows.name}: {remark}{f'; the limit is {maker.limit}' if batch.dropped else ''}")
    return batch.prompts, (note, remark)


def remarks_on(batch: Batch[Any]) -> str:
    """Words on the rows that were left out since they cannot be used, and on those whose text the tokenizer does not
    know; empty if there are none."""
    kinds = (
        ("cannot be used and are left out", batch.unusable),
        ("can hardly be read by the tokenizer (model.tokenizer)", batch.unknown),
    )
    return "".join(f"; {len(of):,} {what}, the first: {next(iter(of.values()))}" for what, of in kinds if of)


def _problems_of(
    name: str, benchmark: Benchmark, tokenizer: PreTrainedTokenizerBase, pictures: Pictures | None
) -> tuple[list[Prompt], tuple[str, ...]]:
    """The problems of a benchmark, all of them, and lines about them.

    Raises:
        DataError: they cannot be had, or not be used; the text has the benchmark's keys.
    """
    key = f"evaluation.named.{name}"
    try:
        form = FORMS.get(benchmark.form)
        rows = form(benchmark.data, benchmark.split) if form else open_rows(benchmark.data, split=benchmark.split)
    except DataError as error:
        raise DataError(f"{key}={{data: FILE}}: {str(error).removeprefix('data: ')}") from error
    if isinstance(rows, Iterated):
        raise DataError(f"{key}: {rows.name} comes row by row; give a file or a hub name")
    how = PromptOptions(
        columns=benchmark.columns,
        template=benchmark.template,
        chat=bool(tokenizer.chat_template) if benchmark.chat is None else benchmark.chat,
        system=benchmark.system,
        unusable="error",  # what is left out would change what is compared with the figures of others
    )
    try:
        maker, note = _checked(rows, partial(_prompt_maker, tokenizer, how, pictures, Room()))
        batch = maker.make([Drawn.of(rows, index, index) for index in range(len(rows))])
    except DataError as error:
        raise type(error)(f"{key}: {str(error).replace(' data.', f' {key}.')}") from error
    notes = [f"{name}: {note}"]
    if benchmark.problems not in (None, len(rows)):
        notes.append(
            f"warning: {key} has {len(rows):,} problems here, and {benchmark.problems:,} as it is "
            "published: figures of others cannot be compared with these"
        )
    if batch.unknown:
        notes.append(f"warning: {key}: {len(rows):,} problems{remarks_on(batch)}")
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
    options: ConversationOptions | None = None,
    pictures: PicturesOf | None = None,
    **sources: Any,
) -> Conversations:
    """Open what a run reads.

    Args:
        tokenizer: the model's, or where it is; None for the characters of the generated task.
        options: how rows become conversations.
        pictures: what reads pictures for the model.
        sources: fields of `Sources`.

    Raises:
        DataError: something cannot be read or used; rows that are wrong are gathered.
        ValueError: unknown task.
    """
    how, where = ConversationOptions() if options is None else options, Sources(**sources)
    task = where.generated()
    encoder, source = open_tokenizer(tokenizer, task, how.chat_template, what="conversations")
    if pictures is not None:
        how = replace(how, pictures=pictures(encoder))
    rows: Rows | Iterated
    others: Rows | Iterated | None = None
    if task is None:
        assert where.train is not None
        rows = _rows_at("data.train", where.train, where.split)
    else:
        rows = _of_task(f"task {where.task}", task.train, how)
        others = _of_task(f"task {where.task}, held out", task.held_out, how)
    if where.evaluation is not None:
        others = _rows_at("evaluation.data", where.evaluation, where.evaluation_split)
    opened = _open(rows, partial(_group_maker, encoder, how, how.columns), where.shuffle)
    held_out: list[Group] = []
    notes = opened.notes
    if others is not None:
        columns = {**how.columns, **where.evaluation_columns}
        held_out, more = _evaluated_on(others, partial(_group_maker, encoder, how, columns), where.problems)
        notes += more
    count = None if isinstance(rows, Iterated) else len(rows)
    return Conversations(encoder, source, opened.stream(where.seed), count, held_out, notes)


def _group_maker(
    tokenizer: PreTrainedTokenizerBase,
    how: ConversationOptions,
    columns: Mapping[str, Any],
    first: Sequence[Row],
    name: str,
) -> GroupMaker:
    """Make the maker of groups for rows, of which these are the first."""
    layout = Format.find(
        first,
        columns,
        kind=how.kind,
        where=name,
        chat=how.chat,
        system=how.system,
        has_template=bool(tokenizer.chat_template),
    )
    return GroupMaker(Renderer(tokenizer, how.learn, how.chat_args), layout, how)


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
