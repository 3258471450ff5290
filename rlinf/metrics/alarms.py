"""Alarms: warnings of steps whose metrics pass a limit, or whose answers cannot be scored.

They warn of engine and trainer that disagree on log-probs or experts, tokens that are too old, steps that nothing can
be learned from or that made no update, a penalty for length that falls on right answers, and answers that cannot be
scored. In: a step's metrics, some of its answers, and what a judge's ranks counted since they were last asked. Out: a
line in the step in which a limit is passed or answers first fail, and again when that changes; and for failures one for
the end of the run, and the metric `reward/failed`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from math import sqrt
from typing import Any

from rlinf.rewards.base import ScoreCounts


class Alarm(str):
    """A line for people; its parts are in alarms.jsonl, too."""

    __slots__ = ("do", "text")
    text: str
    """Description of the trouble."""
    do: str
    """Advice in sentences; "" where there is nothing to be done."""

    def __new__(cls, where: str, text: str, do: str = "") -> Alarm:
        """An alarm of a place in the run, such as "step 3"."""
        alarm = super().__new__(cls, f"{where}: {text}{f'. {do}' if do else ''}")
        alarm.text, alarm.do = text, do
        return alarm


MOVED = 10
"""How much further than the limit the youngest tokens of older weights may be from the trainer's: they were also moved
away from by learning, by 0.1 nats in a step at the high learning rates of tiny models."""


MEANS = {"full": 0.05, "int8": 0.15, "float8": 0.3}
"""Usual limit of `mismatch/mean` by `rollout.weights`: about twice what rounding does to SmolLM2, 0.064 and 0.17 nats.
One of its 210 matrices that is twice as large as it should be makes that 0.51; see docs/engines.md."""


class MismatchAlarm:
    """Watches `mismatch/mean` and `mismatch/max`, |log-prob of the trainer - of the engine|, nats. In steps of an
    asynchronous run in which every token is older than the weights, where nothing can tell engine from learning,
    `staleness/drift/AGE` of the youngest is watched at `MOVED` times the limit.

    Args:
        mean, max: their limits; None for none.
    """

    def __init__(self, mean: float | None, max: float | None) -> None:
        self._limits = {f"mismatch/{name}": limit for name, limit in (("mean", mean), ("max", max))}
        self._passed: set[str] = set()

    def check(self, step: int, metrics: Mapping[str, float]) -> Alarm | None:
        """Return the alarm of a step; None if nothing is new."""
        limits = {name: limit for name, limit in self._limits.items() if limit is not None and name in metrics}
        mean, youngest = self._limits["mismatch/mean"], _youngest(metrics)
        if mean is not None and youngest is not None and "mismatch/mean" not in metrics:
            limits[youngest] = MOVED * mean
        over = {name for name, limit in limits.items() if not metrics[name] <= limit}
        new, self._passed = over - self._passed, over
        if not new:
            return None
        figures = " and ".join(
            f"{name} is {metrics[name]:.3g} nats (limit {_limit(name)} = {limits[name]:g})"
            for name in limits
            if name in new
        )
        return Alarm(
            f"step {step}",
            f"engine and trainer disagree about the sampled tokens: {figures}. Gradients are off by as much",
            "Let both compute in the same precision (rollout.dtype, trainer.dtype); where both are bfloat16 already, "
            "a mean below 0.1 can be its rounding; or correct for it (algorithm.correction.cap=2)"
            if "mismatch/mean" in metrics
            else "No token is of the present weights, so that the policy may also have moved so far by itself: see "
            "mismatch/mean of step 1, and lower optimizer.lr or staleness.max if that was small",
        )


def _youngest(metrics: Mapping[str, float]) -> str | None:
    """The metric of the youngest older tokens that a step had."""
    ages = [int(name.rpartition("/")[2]) for name in metrics if name.startswith("staleness/drift/")]
    return f"staleness/drift/{min(ages)}" if ages else None


def _limit(name: str) -> str:
    """The key of a limit."""
    return f"metrics.{name.replace('/', '_')}" if name.startswith("mismatch/") else f"{MOVED} x metrics.mismatch_mean"


FLOAT8 = 2.0**-4
"""By how much of itself a number of four significant bits is off at most, and so a block of them in root mean square,
whatever the weights: numbers too small for all four add a millionth, since a block's largest is never small."""


class RoundingAlarm:
    """Watches `weights/float8_block_error`, how far a block of 128 x 128 is from the weights that came: a scale, or a
    part of a matrix, that is wrong."""

    def __init__(self) -> None:
        self._passed = False

    def check(self, step: int, metrics: Mapping[str, float]) -> Alarm | None:
        """Return the alarm of a step; None if nothing is new."""
        error = metrics.get("weights/float8_block_error", 0.0)
        before, self._passed = self._passed, not error <= FLOAT8 * 1.001
        if before or not self._passed:
            return None
        return Alarm(
            f"step {step}",
            f"the engine's float8 weights are off by {error:.1%} in some block, where rounding makes "
            f"{FLOAT8:.1%} at most",
            "Weights that are not finite do that; if they are, this is a fault of rlinf or of the device: take "
            "rollout.weights=full, and report it",
        )


class RouteDriftAlarm:
    """Watches `moe/route_drift`: of a mixture of experts, the share of tokens and layers in which the trainer's gates
    would have chosen other experts than the engine did, with the same weights.

    Args:
        limit: of that share; None for none.
    """

    def __init__(self, limit: float | None) -> None:
        self._limit = limit
        self._passed = False

    def check(self, step: int, metrics: Mapping[str, float]) -> Alarm | None:
        """Return the alarm of a step; None if nothing is new."""
        drift = metrics.get("moe/route_drift", 0.0)
        before, self._passed = self._passed, self._limit is not None and not drift <= self._limit
        if before or not self._passed:
            return None
        return Alarm(
            f"step {step}",
            f"engine and trainer send {percent(drift)} of tokens to other experts with the same weights "
            f"(limit metrics.route_drift = {self._limit:g})",
            "trainer.router_replay computes on the engine's; but so many say that the two compute differently: let "
            "both have the same precision (rollout.dtype, trainer.dtype), and see whether mismatch/mean is as large at "
            "step 1, where the engine's copy of the weights may be at fault",
        )


class StalenessAlarm:
    """Watches `staleness/max`, by how many versions the oldest token learned from was older than the weights.

    Args:
        bound: what it may be at most.
        key: of the configuration that says so.
    """

    def __init__(self, bound: int, key: str) -> None:
        self._bound, self._key = bound, key
        self._worst = 0.0

    def check(self, step: int, metrics: Mapping[str, float]) -> Alarm | None:
        """Return the alarm of a step; None unless its tokens are older than ever."""
        oldest = metrics.get("staleness/max", 0.0)
        if oldest <= max(self._bound, self._worst):
            return None
        self._worst = oldest
        return Alarm(
            f"step {step}",
            f"learned from tokens that are {oldest:g} versions old (limit {self._key} = {self._bound})",
            "What comes by step.in_flight is never older: does the flow keep answers by itself, or publish weights "
            "past step.in_flight? If not, this is a fault of rlinf",
        )


STEPS_OF_SILENCE = 3
"""Steps in a row that nothing was learned from before that is told: one alone may be chance, and who waits for a run
wants to know before it is over."""
EXAMPLES = 2
"""Answers that a warning shows beside the right ones."""
EXAMPLE = 40
"""Characters of each: the end, where an answer comes to its point."""


class NothingLearnedAlarm:
    """Watches for steps in a row that teach nothing: every answer is cut, no two rewards can be compared, or the
    gradient is 0.

    Args:
        compares: advantages compare the answers of a group, so that a group of equal rewards has none; False: they
            compare those of a batch; None: they are not made of rewards.
        limit: `rollout.max_new_tokens`; None where nothing is generated.
        reward: the dotted path of what scores, for the advice.
        no_end: why answers cannot end, and what to do; "" where they can.
    """

    def __init__(
        self, compares: bool | None = None, limit: int | None = None, reward: str | None = None, no_end: str = ""
    ) -> None:
        self._compares, self._limit, self._reward, self._no_end = compares, limit, reward, no_end
        self._since: dict[str, int] = {}
        self._reported: set[str] = set()
        self._in_a_row = 0

    def check(
        self, step: int, metrics: Mapping[str, float], rows: Iterable[Mapping[str, Any]] = (), last: bool = False
    ) -> Alarm | None:
        """Return the alarm of a step; None if nothing is new.

        Args:
            step: which.
            metrics: its own.
            rows: some of its answers, as rows of samples.jsonl.
            last: no step follows, so that a run of fewer steps is told, too, if every one was such.
        """
        signs = self._signs(metrics)
        self._in_a_row = self._in_a_row + 1 if signs else 0
        self._since = {sign: self._since.get(sign, step) for sign in signs}
        none_taught = last and self._in_a_row == step  # not of a resumed run, of which the beginning is not known
        due = [sign for sign, since in self._since.items() if step - since + 1 >= STEPS_OF_SILENCE or none_taught]
        if not due or not set(due) - self._reported:
            return None
        self._reported.update(due)
        first, where = min(self._since[sign] for sign in due), f"step {step}"
        steps = f"in steps {first} to {step}" if first < step else f"in step {step}"
        return self._alarm(where, steps, due, metrics, list(rows))

    def _signs(self, metrics: Mapping[str, float]) -> list[str]:
        """Return the signs that a step teaches nothing, the most telling first."""
        signs = ["cut"] if metrics.get("truncated") == 1.0 and self._may_end else []
        if self._compares is not None and metrics.get("reward/std") == 0.0:
            signs.append("equal")
        elif self._compares and metrics.get("groups/uniform") == 1.0:
            signs.append("uniform")
        elif metrics.get("grad_norm") == 0.0:
            signs.append("still")
        return signs

    @property
    def _may_end(self) -> bool:
        """An answer of a single token, such as a move, has no room for an end, and wants none."""
        return self._limit is not None and self._limit > 1

    def _alarm(
        self, where: str, steps: str, due: list[str], metrics: Mapping[str, float], rows: list[Mapping[str, Any]]
    ) -> Alarm:
        mean = metrics.get("reward/mean", 0.0)
        texts = {
            "cut": f"the limit rollout.max_new_tokens={self._limit} cut every answer",
            "equal": f"every answer was given the same reward, {mean:g}, so there was nothing to learn",
            "uniform": f"no group had two different rewards (mean {mean:.3g}), so there was nothing to learn",
            "still": "the gradient was 0, so the weights stayed as they are",
        }
        reasons = " and ".join(texts[sign] for sign in due)
        excerpt = f"; {examples(rows)}" if rows and set(due) - {"still"} else ""
        return Alarm(where, f"{steps} {reasons}{excerpt}", self._advice(due[0], mean))

    def _advice(self, sign: str, mean: float) -> str:
        """Return advice on the most telling sign."""
        if sign == "cut":
            return self._no_end or "Raise it, or see that answers come to an end (rollout.stop, rollout.stop_token_ids)"
        if sign == "uniform":
            return (
                "Draw more answers of each problem (algorithm.group_size) or more varied ones (rollout.temperature), "
                "or choose problems that the model solves now and then"
            )
        if sign == "still":
            return (
                "Equal rewards give none (reward/std), nor do answers that are all left out (algorithm.truncated), "
                "an optimizer.lr that is too high and has spoiled the weights, or a loss that is constant"
            )
        if mean > 0:
            return "If all of them are right, choose harder problems; if not, let the reward tell good from better"
        scorer = f" by reward.function ({self._reward})" if self._reward else ""
        return (
            f"If some of these are right, they are not recognised{scorer}; if none is, begin with easier problems, a "
            "better model, or worked ones (sft.steps)"
        )


DEFAULT_REWARD = "rlinf.rewards.exact judges: 1 for the right answer to the letter, 0 for any other"
"""The reward of rows that nobody chose one for."""


def default_reward(where: str, rows: Iterable[Mapping[str, Any]]) -> Alarm:
    """Make the alarm of a run for which nobody chose a reward.

    Args:
        where: such as "step 1".
        rows: some answers, as rows of samples.jsonl.
    """
    return Alarm(
        where,
        f"no reward was chosen, so {DEFAULT_REWARD}; {examples(rows)}",
        "Set reward.function, such as rlinf.rewards.math or your own (rlinf.rewards.exact, if this is what you want)",
    )


def examples(rows: Iterable[Mapping[str, Any]]) -> str:
    """The ends of a few answers beside the right ones: `answers: '3577' (right: '3577'), …`."""
    excerpts: dict[str, None] = {}
    for row in rows:
        right = row.get("answer")
        remark = f" (right: {_end(right)})" if right not in (None, "") else " (the data names no right one)"
        excerpts.setdefault(f"{_end(row.get('response', ''))}{remark}")
        if len(excerpts) == EXAMPLES:
            break
    return f"answers: {', '.join(excerpts)}"


def right_answers(rows: Iterable[Mapping[str, Any]]) -> str:
    """The first right answers of some rows: `right answers: '12', '7'`."""
    first = list(dict.fromkeys(str(row.get("answer") or "") for row in rows))[:EXAMPLES]
    return f"right answers: {', '.join(map(_end, first))}" if any(first) else "the data names no right answers"


def _end(value: Any) -> str:
    """The end of a text, quoted, on one line."""
    text = " ".join(str(value).split())
    return repr(text if len(text) <= EXAMPLE else f"…{text[1 - EXAMPLE :]}")


class NoUpdateAlarm:
    """Watches `update/skipped`: steps whose batch gave no gradient, so that the weights stayed as they are."""

    def __init__(self) -> None:
        self._steps = 0  # in a row

    def check(self, step: int, metrics: Mapping[str, float]) -> Alarm | None:
        """Return the alarm of a step without an update; None unless it is the first, the tenth, the hundredth ... in a
        row."""
        self._steps = self._steps + 1 if metrics.get("update/skipped") else 0
        if self._steps not in TOLD_AGAIN:
            return None
        why, do = self._reason(metrics)
        row = f", the {self._steps}th step in a row" if self._steps > 1 else ""
        return Alarm(f"step {step}", f"no update was made{row}: {why}", do)

    @staticmethod
    def _reason(metrics: Mapping[str, float]) -> tuple[str, str]:
        if metrics.get("sampling/kept") == 0.0:
            groups, rounds = metrics.get("sampling/drawn", 0.0), metrics.get("sampling/rounds", 0.0)
            return (
                f"sampling/kept is 0, for not one of the {groups:,.0f} groups of {rounds:g} rounds has answers of "
                "different reward",
                "Easier problems, a larger algorithm.group_size, or rewards that tell better answers from worse ones; "
                "algorithm.sampling.max_rounds bounds what such a step costs",
            )
        if metrics.get("truncated") == 1.0:
            return (
                "the length limit cut every answer, and algorithm.truncated=mask learns from none of those",
                "Raise rollout.max_new_tokens, or set algorithm.truncated=keep",
            )
        return "not one group gives a gradient", "groups/uniform and reward/std say how equal rewards are"


TOLD_AGAIN = tuple(10**power for power in range(7))
"""Steps in a row after which the same is told once more."""


class ShapingAlarm:
    """Watches what `algorithm.shaping` does to rewards: whether the penalty for length falls on the best answers, and
    whether answers become shorter at the price of what they are worth."""

    def __init__(self) -> None:
        self._on_best = self._parted = False
        self._past: list[tuple[float, float, float]] = []  # of each step: reward, after shaping, error of the former

    def check(self, step: int, metrics: Mapping[str, float]) -> Alarm | None:
        """Return the alarm of a step; None if nothing is new."""
        if "reward/shaped" not in metrics:
            return None
        share = metrics.get("shaping/penalised_best", 0.0)
        before, self._on_best = self._on_best, share >= (TOO_MANY / 2 if self._on_best else TOO_MANY)
        if self._on_best and not before:
            return Alarm(
                f"step {step}",
                f"the penalty for length falls on right answers: {percent(share)} of the best answers of their groups "
                f"have it (shaping/penalised_best), and reward/mean {metrics['reward/mean']:.3f} has become "
                f"reward/shaped {metrics['reward/shaped']:.3f}",
                "Where right answers need the whole limit, raise rollout.max_new_tokens, lower "
                "algorithm.shaping.cache or algorithm.shaping.penalty, or set algorithm.shaping=null",
            )
        return self._parting(step, metrics)

    def _parting(self, step: int, metrics: Mapping[str, float]) -> Alarm | None:
        """Reward falls while its shaped form rises."""
        error = metrics["reward/std"] / sqrt(max(1.0, metrics.get("samples", 1.0)))
        reward = metrics.get("sampling/reward/mean", metrics["reward/mean"])
        self._past.append((reward, metrics["reward/shaped"], error))
        if self._parted or len(self._past) < 2 * WINDOW:
            return None
        first, last = self._past[:WINDOW], self._past[-WINDOW:]
        (reward, shaped, _), (reward_now, shaped_now, _) = map(_means, (first, last))
        certain = CERTAIN * sqrt(sum(each[2] ** 2 for each in (*first, *last))) / WINDOW
        self._past = [*first, *last]
        if not (reward - reward_now > certain and shaped_now - shaped > certain):
            return None
        self._parted = True
        return Alarm(
            f"step {step}",
            f"answers have become shorter and worse: since the first steps the mean reward went from {reward:.3f} to "
            f"{reward_now:.3f}, while reward/shaped, which is learned, went from {shaped:.3f} to {shaped_now:.3f}",
            "Raise rollout.max_new_tokens, lower algorithm.shaping.penalty, or set algorithm.shaping=null",
        )


TOO_MANY = 0.5
"""Share of the best answers whose penalty is told; it is told again when it has been half of that."""
WINDOW = 5
"""Steps at the beginning, and up to now, over which rewards are compared."""


def _means(steps: Sequence[tuple[float, ...]]) -> list[float]:
    """Mean of each number over some steps."""
    return [sum(column) / len(steps) for column in zip(*steps, strict=True)]


CHANGE = 0.2
"""By how much the rate of failures must change to be told again: less is of no consequence."""
CERTAIN = 3.0
"""And by how many standard deviations of a share of so many answers: a step of few answers varies by chance."""
NAMES = {"timeouts": "timeout", "errors": "error"}


class FailureAlarm:
    """Watches which share of answers fails, step by step."""

    def __init__(self) -> None:
        self._reported = 0.0
        self._kinds: set[str] = set()
        self.total = ScoreCounts()
        """Counts of all steps."""

    def check(self, where: str, scored: ScoreCounts) -> Alarm | None:
        """Return the alarm of a step's failures; None if nothing is new.

        Args:
            where: such as "step 3".
            scored: what judges counted there.
        """
        self.total += scored
        if not scored.answers or not self._is_news(scored):
            return None
        self._reported = scored.failed
        if not scored.failed:
            return Alarm(where, "all answers are scored again")
        return Alarm(where, failures_text(scored), "They count as not drawn; samples.jsonl shows some of them")

    def _is_news(self, scored: ScoreCounts) -> bool:
        """A kind of failure that was not told yet, or another rate."""
        kinds = {name for name in NAMES if getattr(scored, name)}
        new, self._kinds = kinds - self._kinds, self._kinds | kinds
        change, spread = (
            abs(scored.failed - self._reported),
            sqrt(self._reported * (1.0 - self._reported) / scored.answers),
        )
        return bool(new) or (change >= CHANGE and change >= CERTAIN * spread)


def failures_text(scored: ScoreCounts) -> str:
    """`34% of 1,220 answers were not scored: 412 timeouts, 3 errors; first: took longer than 2 s; killed`."""
    counts = ((name, getattr(scored, name)) for name in NAMES)
    kinds = ", ".join(f"{count:,} {NAMES[name] if count == 1 else name}" for name, count in counts if count)
    first = f"; first: {scored.remark.strip().splitlines()[0]}" if scored.remark.strip() else ""
    return f"{percent(scored.failed)} of {scored.answers:,} answers were not scored: {kinds}{first}"


def percent(share: float) -> str:
    """A share for people: `34%`; `0.25%` where it is small."""
    return f"{share:.0%}" if share >= 0.01 or not share else f"{share:.2%}"
