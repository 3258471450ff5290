"""What travels between the roles: prompts to rollout, groups of samples from rollout to judge to trainer.

Token ids and log-probs are numpy arrays: they are small, many, live on the host until the trainer packs them, and
pickle in a tenth of a tensor's time.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Literal

import numpy as np

Outcome = Literal["ok", "truncated", "timeout", "error"]
"""What became of judging a sample: it was scored; scored although the length limit cut it; the reward took too long; it
raised, crashed or returned no number. The last two leave the sample without a reward: it counts as not drawn, never
as 0."""


PrefixKey = tuple[bytes, tuple[str, ...]]
"""Bytes of the token ids, then the digests of the images: what two prompts must share to be read once."""


@dataclass(frozen=True, slots=True)
class ImageRef:
    """A picture in a prompt, by reference: its pixels stay where they are until a model reads them."""

    digest: str
    """Of the picture's content, such as the SHA-256 of its file in hex: equal digests mean equal pixels."""
    source: str = field(default="", compare=False)
    """Where the content is: a path, a URL, or a key of a store."""


def prefix_key(token_ids: np.ndarray, images: Sequence[ImageRef] = ()) -> PrefixKey:
    """Identify what a model reads as a prompt: equal keys may share one forward pass and one KV cache.

    The token ids alone do not: each picture stands there as placeholder tokens that are the same for all pictures.

    Args:
        token_ids: [prompt]; the integer type does not matter.
        images: in the order of their placeholders.
    """
    return token_ids.astype(np.int64, copy=False).tobytes(), tuple(image.digest for image in images)


@dataclass(frozen=True, slots=True, eq=False)
class Prompt:
    """A problem to answer."""

    __plain__: ClassVar[bool] = True  # see Group

    id: int
    """Position in the stream it was drawn from: unique in it, also when a problem comes round again."""
    token_ids: np.ndarray
    """What the model reads, int64 [prompt]."""
    text: str = ""
    """The same for people and reward functions."""
    answer: str = ""
    """What a reward function compares with."""
    row: Mapping[str, Any] = field(default_factory=dict)
    """Other columns of the data set; reward functions get them by name."""
    images: tuple[ImageRef, ...] = ()
    """Its pictures, in the order of their placeholders in `token_ids`."""

    @property
    def prefix_key(self) -> PrefixKey:
        """What must be equal for two prompts to be read once, see `prefix_key`."""
        return prefix_key(self.token_ids, self.images)


@dataclass(frozen=True, slots=True, eq=False)
class Example:
    """A prompt with a worked answer, for supervised training."""

    prompt_ids: np.ndarray
    """int64 [prompt]"""
    response_ids: np.ndarray
    """The answer with its end token, int64 [response]."""


@dataclass(frozen=True, slots=True, eq=False)
class Sample:
    """One sampled answer."""

    prompt: Prompt
    """What was asked; shared by the group."""
    index: int
    """Which of the group's samples it is, from 0."""
    response_ids: np.ndarray
    """Sampled tokens, the end token included if one was reached, int64 [response]."""
    logprobs: np.ndarray
    """Log-prob of each token under softmax(logits / temperature), also where top_k, top_p or min_p limited the draw,
    nats, float32 [response]."""
    versions: np.ndarray
    """Version of the weights that made each token, int32 [response]."""
    text: str
    """The response without its end token."""
    truncated: bool
    """It was cut, by the length limit or by `abort`, before an end token or stop text came."""
    temperature: float = 1.0
    """Logits were divided by it before sampling; 0 means the likeliest token, with log-probs at temperature 1."""
    reward: float | None = None
    """The judge's verdict; None until judged, and after a timeout or an error."""
    outcome: Outcome | None = None
    """What became of judging it; None until judged."""
    scores: Mapping[str, float] = field(default_factory=dict)
    """Parts of the reward by name, where the reward function tells them."""
    extracted: str | None = None
    """What the reward function took as the answer itself, where it tells: equal ones vote together in maj@k."""
    remark: str = ""
    """Why judging failed, for people."""
    per_token: Mapping[str, np.ndarray] = field(default_factory=dict)
    """What other roles have said of each token, by name, float32 [response] each: `ref_logprobs`, `teacher_logprobs`
    (nats) and `values` are what our algorithms read."""

    @property
    def group(self) -> int:
        """Names its group: the prompt's id."""
        return self.prompt.id

    def judged(
        self,
        reward: float | None,
        outcome: Outcome,
        *,
        scores: Mapping[str, float],
        extracted: str | None = None,
        remark: str = "",
    ) -> Sample:
        """The same with a verdict; `dataclasses.replace` would take four times as long, and every sample comes here."""
        return Sample(
            self.prompt,
            self.index,
            self.response_ids,
            self.logprobs,
            self.versions,
            self.text,
            self.truncated,
            self.temperature,
            reward,
            outcome,
            scores,
            extracted,
            remark,
            self.per_token,
        )


@dataclass(frozen=True, slots=True, eq=False)
class Group:
    """All samples of one prompt: the unit that is scored, and within which rewards are compared."""

    __plain__: ClassVar[bool] = True  # holds no promise: the runtime need not look for one in its hundreds of parts

    prompt: Prompt
    """What was asked."""
    samples: tuple[Sample, ...]
    """The answers, in order of their index."""

    @property
    def scored(self) -> tuple[Sample, ...]:
        """The samples that have a reward; those whose judging failed are left out.

        Raises:
            ValueError: the group has not been judged.
        """
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

    def told(self, name: str, arrays: Sequence[np.ndarray]) -> Group:
        """The same with something said of each token.

        Args:
            name: key in `Sample.per_token`.
            arrays: one per sample, [response] each.

        Raises:
            ValueError: an array does not fit its response.
        """
        for sample, array in zip(self.samples, arrays, strict=True):
            if array.shape != sample.response_ids.shape:
                raise ValueError(
                    f"{name} {list(array.shape)} must be one number per token of the response, "
                    f"{list(sample.response_ids.shape)} (prompt {self.prompt.id}, sample {sample.index})"
                )
        return Group(
            self.prompt,
            tuple(
                replace(sample, per_token={**sample.per_token, name: np.asarray(array, dtype=np.float32)})
                for sample, array in zip(self.samples, arrays, strict=True)
            ),
        )

    def __reduce__(self) -> tuple[Any, ...]:
        """Travels as a few long arrays: many short ones cost ten times as much to pickle."""
        samples = self.samples
        lengths = [len(sample.response_ids) for sample in samples]
        said = tuple(samples[0].per_token) if samples else ()
        whole = all(
            sample.prompt is self.prompt
            and len(sample.logprobs) == len(sample.versions) == length
            and tuple(sample.per_token) == said
            for sample, length in zip(samples, lengths, strict=True)
        )
        if not samples or not whole:
            return Group, (self.prompt, samples)
        arrays = [
            np.concatenate([getattr(sample, name) for sample in samples])
            for name in ("response_ids", "logprobs", "versions")
        ]
        told = {name: np.concatenate([sample.per_token[name] for sample in samples]) for name in said}
        rest = [[getattr(sample, name) for sample in samples] for name in _REST]
        return _group_arrived, (self.prompt, lengths, arrays, told, rest)


_REST = ("index", "text", "truncated", "temperature", "reward", "outcome", "scores", "extracted", "remark")
"""Fields of a sample besides its prompt and its arrays."""


def _group_arrived(
    prompt: Prompt,
    lengths: list[int],
    arrays: list[np.ndarray],
    told: dict[str, np.ndarray],
    rest: list[list[Any]],
) -> Group:
    ends = np.cumsum(lengths)[:-1]
    ids, logprobs, versions = (np.split(array, ends) for array in arrays)
    parts = {name: np.split(array, ends) for name, array in told.items()}
    samples = [
        Sample(prompt, index, ids[i], logprobs[i], versions[i], *others, per_token=_of(parts, i))  # type: ignore[call-arg, misc]  # *others: the eight of _REST
        for i, (index, *others) in enumerate(zip(*rest, strict=True))
    ]
    return Group(prompt, tuple(samples))


def _of(parts: Mapping[str, Sequence[np.ndarray]], number: int) -> dict[str, np.ndarray]:
    return {name: part[number] for name, part in parts.items()}


@dataclass(frozen=True, slots=True, eq=False)
class Evaluation:
    """The outcome."""

    accuracy: float
    """Mean reward of the answers that were scored; with rewards of 0 and 1, the share of right ones."""
    groups: tuple[Group, ...]
    """The judged answers, one sample each unless asked for more, in the order of their prompts' ids."""
    metrics: dict[str, float] = field(default_factory=dict)
    """`accuracy`, `failed` (share of answers that could not be scored), `truncated`, `response_length/mean`, and with
    several answers each `pass@k` and `maj@k`."""
