"""Plain data that travels between the roles: prompts to rollout, groups of samples from rollout to judge to trainer.

Token ids and log-probs are numpy arrays: they are small, many, live on the host until the trainer packs them, and
pickle in a tenth of a tensor's time.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from itertools import accumulate
from operator import attrgetter
from typing import Any, ClassVar, Literal

import numpy as np

from rlinf.data import routes as routing

Outcome = Literal["ok", "truncated", "timeout", "error"]
"""Outcome of judging a sample: it was scored; scored although the length limit cut it; the reward took too long; it
raised, crashed or returned no number. The last two leave the sample without a reward: it counts as not drawn, never as
0."""

REWARDS = "rewards"
"""Key of `Sample.per_token`: the part of the sample's reward that fell at each token, 0 where none did. An advantage
over tokens (`gae`) has it there, and what the sample's reward is more at the end; others take that reward alone."""


class DataError(ValueError):
    """Something is wrong with the data that a user gave; the text names file, row and remedy."""


class NotScored(ValueError):
    """Not one answer of a batch has a reward; the text has the first remark."""


PrefixKey = tuple[bytes, tuple[str, ...]]
"""Bytes of the token ids, then the digests of the images: what two prompts must share to be read once."""


@dataclass(frozen=True, slots=True)
class ImageRef:
    """A picture in a prompt, by reference: its pixels stay where they are until a model reads them."""

    digest: str
    """SHA-256 of its image file, in hex: equal digests mean equal pixels."""
    source: str = field(default="", compare=False)
    """Path of that file, which every machine of the run can read; "" where `content` has it."""
    content: bytes = field(default=b"", compare=False, repr=False)
    """The file itself, of a picture that lies in no file of its own."""


def prefix_key(token_ids: np.ndarray, images: Sequence[ImageRef] = ()) -> PrefixKey:
    """Identify what a model reads as a prompt: equal keys may share one forward pass and one KV cache.

    The token ids alone do not: each picture stands there as placeholder tokens that are the same for all pictures.

    Args:
        token_ids: [prompt]; the integer type does not matter.
        images: in the order of their placeholders.
    """
    return token_ids.astype(np.int64, copy=False).tobytes(), tuple(image.digest for image in images)


def read_only(array: np.ndarray) -> np.ndarray:
    """A copy that cannot be written into, by nobody who holds it."""
    copy = np.array(array)
    copy.setflags(write=False)
    return copy.view()  # of a view, the flag cannot be taken back


@dataclass(frozen=True, slots=True, eq=False)
class Prompt:
    """A problem to answer."""

    __plain__: ClassVar[bool] = True  # see Group

    id: int
    """Position in the stream it was drawn from: unique in it, also when a problem comes round again."""
    token_ids: np.ndarray
    """Token ids that the model reads, int64 [prompt]."""
    text: str = ""
    """The prompt's text, for people and reward functions."""
    answer: str = ""
    """Right answer, which a reward function compares with."""
    row: Mapping[str, Any] = field(default_factory=dict)
    """Other columns of the data set; reward functions get them by name."""
    images: tuple[ImageRef, ...] = ()
    """Its pictures, in the order of their placeholders in `token_ids`."""

    @property
    def prefix_key(self) -> PrefixKey:
        """Key that is equal for two prompts that may be read once for both, see the function `prefix_key`."""
        return prefix_key(self.token_ids, self.images)


@dataclass(frozen=True, slots=True, eq=False)
class Datum:
    """Tokens that a model reads and, for each of them, the token to be predicted next and numbers for a loss of it."""

    __plain__: ClassVar[bool] = True

    tokens: np.ndarray
    """Tokens that are read, int64 [tokens], at least one."""
    targets: np.ndarray
    """The token that each of them shall predict, int64 [tokens]: in a text, the next one."""
    inputs: Mapping[str, np.ndarray] = field(default_factory=dict)
    """Further numbers of each target by name, such as weights, logprobs and advantages, float32 [tokens] each."""

    @staticmethod
    def of(sample: Sample, advantage: float | np.ndarray = 0.0, weight: float = 1.0) -> Datum:
        """A sample with its log-probs: what is not learned of it, its prompt among others, has weight and advantage 0.

        Args:
            sample: its log-probs must be those of temperature 1, as a loss of a datum means them.
            advantage: of the sample, or of each learned token, [learned].
            weight: of each learned token.
        """
        ids = np.concatenate([sample.prompt.token_ids, sample.response_ids]).astype(np.int64)
        places = np.arange(len(sample.response_ids)) if sample.loss_mask is None else np.flatnonzero(sample.loss_mask)
        places = places + len(sample.prompt.token_ids) - 1
        inputs = {name: np.zeros(len(ids) - 1, np.float32) for name in ("weights", "logprobs", "advantages")}
        for array, value in zip(inputs.values(), (weight, sample.learned(sample.logprobs), advantage), strict=True):
            array[places] = value
        return Datum(ids[:-1], ids[1:], inputs)

    @staticmethod
    def check_length(count: int, longest: int | None) -> None:
        """See that a model reads so many tokens; arguments and errors as of `check`."""
        if not count or (longest is not None and count > longest):
            limit = "" if longest is None else f", and the model takes 1 to {longest}"
            raise ValueError(f"model_input has {count} tokens{limit}")

    def check(self, names: Sequence[str], vocabulary: int | None = None, longest: int | None = None) -> None:
        """See that a loss can be computed.

        Args:
            names: of the inputs that the loss needs.
            vocabulary: token ids are below it.
            longest: tokens that the model has positions for.

        Raises:
            ValueError: it cannot; the text names the input.
        """
        count = len(self.tokens)
        Datum.check_length(count, longest)
        for name, ids in (("model_input", self.tokens), ("target_tokens", self.targets)):
            if ids.shape != (count,):
                raise ValueError(f"{name} has the shape {list(ids.shape)} and must have that of model_input, [{count}]")
            if ids.min() < 0 or (vocabulary is not None and ids.max() >= vocabulary):
                worst = int(ids.min() if ids.min() < 0 else ids.max())
                raise ValueError(
                    f"{name} has the token {worst}, and those of the model are 0 to {(vocabulary or 0) - 1}"
                )
        for name in names:
            if name not in self.inputs:
                raise ValueError(f"{name} is missing, which the loss needs; it has {', '.join(self.inputs) or 'none'}")
            if self.inputs[name].shape != (count,):
                shape = list(self.inputs[name].shape)
                raise ValueError(f"{name} has the shape {shape} and must have that of model_input, [{count}]")
            if not np.isfinite(self.inputs[name]).all():
                raise ValueError(f"{name} has a value that is not finite")


@dataclass(frozen=True, slots=True, eq=False)
class Example:
    """A prompt with a worked answer, for supervised training."""

    prompt_ids: np.ndarray
    """int64 [prompt]"""
    response_ids: np.ndarray
    """The answer with its end token, int64 [response]."""
    loss_mask: np.ndarray | None = None
    """Which response tokens are learned, bool [response]; None for all."""
    images: tuple[ImageRef, ...] = ()
    """Pictures of the prompt, in the order of their placeholders."""

    def __post_init__(self) -> None:
        _check_mask("an example", self.loss_mask, self.response_ids)


@dataclass(frozen=True, slots=True, eq=False)
class Segment:
    """A run of tokens in a conversation: what the model generated, or what was put in between (tool output, a user's
    turn, a template). Its tokens are copies that cannot be written into: what is learned is what was sampled."""

    token_ids: np.ndarray
    """int64 [segment]"""
    logprobs: np.ndarray | None = None
    """Log-prob of each generated token, nats, float32 [segment]; None: the model did not generate it, so it is read and
    not learned."""
    versions: np.ndarray | None = None
    """Version of the weights that generated each token, int32 [segment]; None where `logprobs` is None."""
    routes: np.ndarray | None = None
    """Routes of all that was read for it, from the beginning of the conversation; see `Sample.routes`."""
    log_mass: np.ndarray | None = None
    """Of an answer of a form, see `Sample.log_mass`, float32 [segment]."""

    def __post_init__(self) -> None:
        for name in ("token_ids", "logprobs", "versions"):
            if (array := getattr(self, name)) is not None:
                object.__setattr__(self, name, read_only(array))


@dataclass(frozen=True, slots=True)
class TurnTrace:
    """How one answer of an agent's trajectory came to be, for people."""

    begin: int
    end: int
    """Its tokens in the response, from `begin` to before `end`."""
    start: float
    """Seconds from the episode's beginning to the call."""
    took: float
    """Seconds that the answer took."""
    finish: str
    """Why it ended."""
    calls: tuple[Mapping[str, Any], ...] = ()
    """Tools that it called, each with `name` and `arguments`, or with `broken`, why it cannot be read."""


@dataclass(frozen=True, slots=True, eq=False)
class Sample:
    """One sampled answer, or a whole conversation after its first prompt: then `loss_mask` tells what the model
    generated from what it only read."""

    prompt: Prompt
    """The prompt; shared by the group."""
    index: int
    """Which of the group's samples it is, from 0."""
    response_ids: np.ndarray
    """Sampled tokens, the end token included if one was reached, int64 [response]. In a conversation, everything that
    follows the prompt."""
    logprobs: np.ndarray
    """Log-prob of each token under softmax(logits / temperature), also where top_k, top_p or min_p limited the draw,
    nats, float32 [response]. Ignored outside `loss_mask`."""
    versions: np.ndarray
    """Version of the weights that made each token, int32 [response]. Ignored outside `loss_mask`."""
    text: str
    """The response without its end token."""
    truncated: bool
    """It was cut, by the length limit or by `abort`, before an end token or stop text came."""
    temperature: float = 1.0
    """Logits were divided by it before sampling; 0 means the likeliest token, with log-probs at temperature 1."""
    reward: float | None = None
    """The judge's verdict; None until judged, and after a timeout or an error."""
    outcome: Outcome | None = None
    """Outcome of judging it; None until judged."""
    scores: Mapping[str, float] = field(default_factory=dict)
    """Parts of the reward by name, where the reward function tells them."""
    extracted: str | None = None
    """Part of the response that the reward function took as the answer itself, where it tells: equal ones vote together
    in maj@k."""
    remark: str = ""
    """Why judging failed, for people."""
    per_token: Mapping[str, np.ndarray] = field(default_factory=dict)
    """Values that other roles have given each token, by name, float32 [response] each: `ref_logprobs`,
    `teacher_logprobs` (nats) and `values` are what our algorithms read, and any other key is an error when it comes to
    be learned from. Ignored outside `loss_mask`."""
    loss_mask: np.ndarray | None = None
    """Which tokens are learned, bool [response]: false for tool output, user turns and templates; None for all."""
    weight: float = 1.0
    """How many samples of its group and of the batch it counts as, more than 0. Three trajectories of one task that
    share a reward weigh 1/3 each where the task shall count once."""
    agent: str = ""
    """Which of the agents of its task made it: each is compared with itself alone. "" where there is one."""
    attempt: int | None = None
    """Which of the attempts at its task it came of, where one may leave several samples; None: the one of its index."""
    trace: tuple[TurnTrace, ...] = ()
    """How its turns came to be, where an agent made it by calls of its model."""
    too_old: int = 0
    """How many generated tokens `loss_mask` hides because they are older than the bound: read, and not learned."""
    routes: np.ndarray | None = None
    """Experts of a mixture to which each token went that was read, the prompt's too, uint8 or int16 [prompt + response
    - 1, layers, experts per token], see `data.routes`; None: nobody told."""
    log_mass: np.ndarray | None = None
    """Where a schema kept answers to its form: log of the probability that it left of the whole softmax at each token,
    nats, float32 [response]. `logprobs` are those of the constrained distribution, that is of the softmax over what was
    left; those of the whole softmax are the sum of both. 0 at tokens that nothing constrained, infinite where an engine
    does not tell. None: nothing was constrained."""

    def __post_init__(self) -> None:
        if self.loss_mask is None and self.weight == 1.0:
            return
        where = f"prompt {self.prompt.id}, sample {self.index}"
        _check_mask(where, self.loss_mask, self.response_ids)
        if not self.weight > 0:
            raise ValueError(f"{where}: weight={self.weight} must be more than 0")

    @staticmethod
    def of_segments(prompt: Prompt, index: int, segments: Sequence[Segment], **more: Any) -> Sample:
        """A conversation.

        Args:
            prompt: all that came before the first generated token.
            index: of the sample in its group.
            segments: what followed, in order.
            more: `text`, `truncated` and further fields.

        Raises:
            ValueError: a segment has a log-prob or a version for some of its tokens only.
        """
        pieces: list[tuple[np.ndarray, ...]] = [(np.empty(0),) * 4]
        for part in segments:
            length = len(part.token_ids)
            unsaid = np.full(length, np.nan), np.full(length, -1)
            logprobs = unsaid[0] if part.logprobs is None else part.logprobs
            versions = unsaid[1] if part.versions is None else part.versions
            if (part.logprobs is None) != (part.versions is None) or {len(logprobs), len(versions)} != {length}:
                raise ValueError(
                    f"prompt {prompt.id}, sample {index}: a segment of {length} tokens needs as many log-probs and "
                    "versions or, where the model did not generate it, neither"
                )
            pieces.append((part.token_ids, logprobs, versions, np.full(length, part.logprobs is not None)))
        ids, logprobs, versions, mask = map(np.concatenate, zip(*pieces, strict=True))
        arrays = (
            read_only(ids.astype(np.int64)),
            read_only(logprobs.astype(np.float32)),
            read_only(versions.astype(np.int32)),
        )
        tokens = len(prompt.token_ids) + len(ids) - 1
        routes = routing.joined(tokens, [part.routes for part in segments])
        learned = read_only(mask.astype(bool))
        if any(part.log_mass is not None for part in segments):
            masses = [np.zeros(len(each.token_ids)) if each.log_mass is None else each.log_mass for each in segments]
            more["log_mass"] = read_only(np.concatenate(masses).astype(np.float32))
        return Sample(prompt, index, *arrays, loss_mask=learned, routes=routes, **more)

    @property
    def group(self) -> int:
        """Names its group: the prompt's id."""
        return self.prompt.id

    @property
    def number(self) -> int:
        """Which of the samples that were asked for its prompt it is."""
        return self.index if self.attempt is None else self.attempt

    @property
    def learned_tokens(self) -> int:
        """How many of its tokens are learned."""
        return len(self.response_ids) if self.loss_mask is None else int(np.count_nonzero(self.loss_mask))

    @property
    def learned_versions(self) -> np.ndarray:
        """The version of the weights that made each learned token, in any order, [learned]."""
        return self.column("versions")

    @property
    def generated_tokens(self) -> int:
        """How many of its tokens the model generated: those that are learned, and those that are too old for that."""
        return self.learned_tokens + self.too_old

    def learned(self, array: np.ndarray) -> np.ndarray:
        """The part of an array [response] that stands at learned tokens, [learned]."""
        return array if self.loss_mask is None else array[self.loss_mask]

    def expanded(self, name: str, array: np.ndarray) -> np.ndarray:
        """A number per token, float32 [response], of one per learned token, [learned]: NaN elsewhere. Several numbers
        per token have further dimensions.

        Args:
            name: of the numbers, for errors.
            array: [learned, ...]; one that is [response, ...] already stays.

        Raises:
            ValueError: it is neither.
        """
        if array.shape[:1] == self.response_ids.shape:
            return np.asarray(array, dtype=np.float32)
        if array.shape[:1] != (self.learned_tokens,):
            raise ValueError(
                f"{name} {list(array.shape)} must be one number per token of the response, "
                f"{list(self.response_ids.shape)} (prompt {self.prompt.id}, sample {self.index})"
            )
        whole = np.full((len(self.response_ids), *array.shape[1:]), np.nan, np.float32)
        whole[self.loss_mask] = array
        return whole

    def column(self, name: str) -> np.ndarray:
        """Values of each learned token under that name (a field or a key of `per_token`), [learned].

        `logprobs` are those of the whole softmax, which every other model computes, also where a schema constrained the
        answer; infinite where they are not known.

        Raises:
            KeyError: nothing is.
        """
        if name == "logprobs" and self.log_mass is not None:
            return self.learned(self.logprobs + self.log_mass)
        return self.learned(getattr(self, name) if name in ("logprobs", "versions") else self.per_token[name])

    def judged(
        self,
        reward: float | None,
        outcome: Outcome,
        *,
        scores: Mapping[str, float],
        extracted: str | None = None,
        remark: str = "",
    ) -> Sample:
        """Copy with a verdict."""
        values = [*_VALUES(self)]  # `replace` takes twice as long
        values[_REWARD:_PER_TOKEN] = reward, outcome, scores, extracted, remark
        return Sample(*values)


class Away:
    """Stands for an array that is elsewhere.

    Args:
        length: of its only dimension.
    """

    __slots__ = ("shape",)

    def __init__(self, length: int):
        self.shape = (length,)

    def __len__(self) -> int:
        return self.shape[0]

    def __array__(self, *_: Any, **__: Any) -> np.ndarray:
        raise TypeError("these numbers stay where they were made: fetch the group that they belong to (Handle.value)")


@dataclass(slots=True, eq=False)
class Lead:
    """The way to a group that is elsewhere, and what its samples share."""

    order: tuple[int, ...] = ()
    """Places of its scored samples in an order in which each shares most with the one before it."""
    again: tuple[int, ...] = ()
    """How many tokens each of those shares with the one before it."""
    handle: Any = None
    """Gives the group itself."""

    def shared(self, one: int, other: int) -> int:
        """How many tokens two of its samples, by their places, share at their beginnings."""
        first, last = sorted((self.order.index(one), self.order.index(other)))
        return min(self.again[first + 1 : last + 1], default=0)


@dataclass(frozen=True, slots=True, eq=False)
class SampleFace(Sample):
    """Face of a sample that is elsewhere."""

    at: int = 0
    """Its place among the samples of its group."""
    learned_count: int = 0
    """How many of its tokens are learned."""
    by_version: Mapping[int, int] = field(default_factory=dict)
    """How many of those each version of the weights made."""
    lead: Lead = field(default_factory=Lead)
    """The group's."""

    @property
    def learned_tokens(self) -> int:
        return self.learned_count

    @property
    def learned_versions(self) -> np.ndarray:
        return np.repeat(np.array([*self.by_version], np.int64), [*self.by_version.values()])

    def column(self, name: str) -> np.ndarray:
        return Away(self.learned_count)  # type: ignore[return-value]

    def learned(self, array: np.ndarray) -> np.ndarray:
        return Away(self.learned_count)  # type: ignore[return-value]


_NAMES = [each.name for each in fields(Sample)]
_VALUES = attrgetter(*_NAMES)
_IDS, _TEXT, _REWARD, _PER_TOKEN = map(_NAMES.index, ("response_ids", "text", "reward", "per_token"))
"""Where the arrays that every sample has begin and end, and the verdict."""


def split(array: np.ndarray, lengths: Sequence[int]) -> list[np.ndarray]:
    """The parts of an array that arrays of these lengths were joined into."""
    return [array[end - length : end] for length, end in zip(lengths, accumulate(lengths), strict=True)]


def join_columns(columns: Sequence[Mapping[str, np.ndarray]]) -> dict[str, np.ndarray]:
    """Columns of the same names, of one sequence each, as those of all."""
    return {name: np.concatenate([each[name] for each in columns]) for name in columns[0]}


def split_columns(columns: Mapping[str, np.ndarray], lengths: Sequence[int]) -> list[dict[str, np.ndarray]]:
    """Undo `join_columns` for sequences of these lengths."""
    parts = {name: split(array, lengths) for name, array in columns.items()}
    return [{name: parts[name][i] for name in parts} for i in range(len(lengths))]


def _check_mask(where: str, mask: np.ndarray | None, response: np.ndarray) -> None:
    if mask is not None and (mask.dtype != bool or mask.shape != response.shape):
        raise ValueError(
            f"{where}: loss_mask {mask.dtype} {list(mask.shape)} must be bool, one per token of the response "
            f"{list(response.shape)}"
        )


@dataclass(frozen=True, slots=True, eq=False)
class Group:
    """All samples of one prompt: the unit that is scored, and within which rewards are compared."""

    __plain__: ClassVar[bool] = True  # holds no promise: the runtime need not look for one in its hundreds of parts

    prompt: Prompt
    """The prompt of all samples."""
    samples: tuple[Sample, ...]
    """The answers, in order of their index."""

    @property
    def id(self) -> int:
        """Its prompt's."""
        return self.prompt.id

    @property
    def scored(self) -> tuple[Sample, ...]:
        """The samples that have a reward; those whose judging failed are left out.

        Raises:
            ValueError: the group has not been judged.
        """
        if None not in [sample.reward for sample in self.samples]:  # as nearly always
            return self.samples
        if any(sample.outcome is None and sample.reward is None for sample in self.samples):
            raise ValueError(
                f"group of prompt {self.prompt.id} has samples without a reward: put judge.score between generation "
                "and training"
            )
        return tuple(sample for sample in self.samples if sample.reward is not None)

    @property
    def rewards(self) -> list[float]:
        """Reward of each scored sample.

        Raises:
            ValueError: the group has not been judged.
        """
        return [sample.reward for sample in self.scored if sample.reward is not None]

    def with_column(self, name: str, arrays: Sequence[np.ndarray]) -> Group:
        """The group with a value of each token.

        Args:
            name: key in `Sample.per_token`.
            arrays: one per sample, a number per token, [response], or per learned token, [learned].

        Raises:
            ValueError: an array does not fit its response.
        """
        return Group(
            self.prompt,
            tuple(
                replace(sample, per_token={**sample.per_token, name: sample.expanded(name, array)})
                for sample, array in zip(self.samples, arrays, strict=True)
            ),
        )

    def __reduce__(self) -> tuple[Any, ...]:
        """Travels as a few long arrays: many short ones cost ten times as much to pickle."""
        samples = self.samples
        lengths = [len(sample.response_ids) for sample in samples]
        names = tuple(samples[0].per_token) if samples else ()
        whole = all(
            sample.prompt is self.prompt
            and len(sample.logprobs) == len(sample.versions) == length
            and tuple(sample.per_token) == names
            for sample, length in zip(samples, lengths, strict=True)
        )
        if not samples or not whole:
            return Group, (self.prompt, samples)
        columns: list[Any] = [*zip(*map(_VALUES, samples), strict=True)]
        columns[_IDS:_TEXT] = map(np.concatenate, columns[_IDS:_TEXT])
        columns[_PER_TOKEN] = join_columns(columns[_PER_TOKEN])
        return _group_arrived, (self.prompt, lengths, columns[1:])


def _group_arrived(prompt: Prompt, lengths: Sequence[int], columns: Sequence[Any]) -> Group:
    """The group of what its `__reduce__` gave: fields of the samples, without their prompt."""
    values = [[prompt] * len(lengths), *columns]
    values[_IDS:_TEXT] = (split(array, lengths) for array in values[_IDS:_TEXT])
    values[_PER_TOKEN] = split_columns(values[_PER_TOKEN], lengths)
    return Group(prompt, tuple(map(Sample, *values)))


@dataclass(frozen=True, slots=True, eq=False)
class Evaluation:
    """The outcome."""

    accuracy: float
    """Mean reward of the answers that were scored; with rewards of 0 and 1, the share of right ones."""
    groups: tuple[Group, ...] = field(repr=False)
    """The judged answers, one sample each unless asked for more, in the order of their prompts' ids."""
    metrics: dict[str, float] = field(default_factory=dict)
    """`accuracy`, `failed` (share of answers that could not be scored), `truncated`, `response_length/mean`; `graded`
    (share of rewards other than 0 and 1) if there are any; and with several answers each `pass@k` and `maj@k`."""
    named: Mapping[str, Evaluation] = field(default_factory=dict)
    """Those of benchmarks, by name."""


@dataclass(frozen=True, slots=True)
class Learned:
    """A trainer's report on the batches that it was given; those of several batches add."""

    trained: dict[int, list[int]] = field(default_factory=dict)
    """Samples that it learned from, those included whose tokens were all masked; one that it learned from in several
    batches is there as often."""
    unscored: dict[int, list[int]] = field(default_factory=dict)
    """Samples without a reward, which it left out."""
    tokens: int = 0
    """Generated tokens of the samples that it learned from."""
    even: dict[int, list[int]] = field(default_factory=dict)
    """Samples of groups that give no gradient, which it left out under dynamic sampling."""

    @staticmethod
    def of(groups: Iterable[Group], silent: Iterable[Group] = ()) -> Learned:
        """Make the report on the judged groups of one batch.

        Args:
            groups: that it learned from.
            silent: that it left out, because they give no gradient.
        """
        report = Learned(even={group.id: sorted({sample.number for sample in group.samples}) for group in silent})
        scored: set[tuple[int, int]] = set()
        conversations: set[tuple[int, str, int]] = set()
        tokens = 0
        for group in groups:
            for sample in sorted(group.samples, key=lambda sample: sample.reward is None):
                where = sample.number
                name = (group.id, where)
                again = (group.id, sample.agent, sample.index) in conversations
                conversations.add((group.id, sample.agent, sample.index))
                if sample.reward is not None:
                    tokens += sample.learned_tokens
                    if name not in scored or again:  # several conversations of one attempt are one sample
                        report.trained.setdefault(group.id, []).append(where)
                        scored.add(name)
                elif name not in scored and where not in report.unscored.get(group.id, ()):
                    report.unscored.setdefault(group.id, []).append(where)
        return Learned(report.trained, report.unscored, tokens, report.even)

    def __add__(self, other: Learned) -> Learned:
        return Learned(
            _joined(self.trained, other.trained),
            _joined(self.unscored, other.unscored),
            self.tokens + other.tokens,
            _joined(self.even, other.even),
        )


def _joined(one: Mapping[int, list[int]], other: Mapping[int, list[int]]) -> dict[int, list[int]]:
    return {number: [*one.get(number, ()), *other.get(number, ())] for number in {**one, **other}}
