"""Pace of the trainer's copies of the model: in step or each at its own, by the seconds that both took.

At their own pace (`trainer.order: free`), a copy learns on devices whose answers are done while others still generate.
Which way is quicker depends on how long the longest answers are, on what parking costs and on how much there is to
learn: all of that is in the seconds of a step. So with `trainer.order: auto` both ways take turns for some steps, the
quicker one stays, and the other is tried again now and then, since answers grow longer as a policy learns.
"""

from __future__ import annotations

TURNS = 3
"""Steps of each way in a first trial: one alone may have had the longest answer of all."""
TURNS_AGAIN = 2
"""In later ones, which have the earlier outcome to confirm."""
MARGIN = 0.02
"""The other way has to be quicker by this share, so that noise does not change hands."""
PAUSE = 40
"""Steps until a second trial: two steps of a way that is slower by a third are less than 2 % of them."""
LONGEST_PAUSE = 320
"""The pause doubles with each trial that changes nothing, up to this."""


class Pacing:
    """Says of each step whether copies go at their own pace, by what the earlier ones took."""

    def __init__(self) -> None:
        self.free = False
        """In the next step."""
        self._kept = False
        self._trial = [True, False] * TURNS
        self._pause = PAUSE
        self._wait = 1  # the first step compiles, and warms caches
        self._seconds = {False: 0.0, True: 0.0}
        self._tokens = {False: 0.0, True: 0.0}

    def after(self, seconds: float, tokens: float) -> str | None:
        """Take a step's seconds, and how many tokens it learned; a sentence if a trial has ended."""
        if self._wait:
            self._wait -= 1
        else:
            self._seconds[self.free] += seconds
            self._tokens[self.free] += tokens
        if self._wait:
            return None
        if self._trial:
            self.free = self._trial.pop()
            return None
        return self._decide()

    def _decide(self) -> str:
        took = {way: self._seconds[way] / max(self._tokens[way], 1.0) for way in (False, True)}
        other = not self._kept
        changes = took[other] < (1 - MARGIN) * took[self._kept]
        share = took[True] / took[False] if took[False] else 1.0
        self._kept = self.free = other if changes else self._kept
        self._pause = PAUSE if changes else min(2 * self._pause, LONGEST_PAUSE)
        self._wait, self._trial = self._pause, [self._kept, not self._kept] * TURNS_AGAIN
        self._seconds, self._tokens = dict.fromkeys(took, 0.0), dict.fromkeys(took, 0.0)
        way = "at their own pace" if self._kept else "in step"
        return f"copies of the model learn {way}: a token took {share:.2f} of the time at their own pace"
