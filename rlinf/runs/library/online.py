"""A model that learns from what people say of its answers, while it goes on serving.

In: questions, and later, by the answers' ids, rewards. Out: answers; a policy that gets better. Who wakes whom: the
model's answers wake those who asked; the reward that completes a batch wakes the learner, which trains one step and
publishes the weights. Answers that are being given meanwhile go on by the new ones, and each token knows its version.

    async with session.online(batch=64) as service:
        answer = await service.complete([{"role": "user", "content": "Dear all,"}])
        ...                                         # shown to a person, for as long as it takes
        service.feedback(answer.id, 1.0)            # accepted
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlinf.agents.agent import AgentLLM
from rlinf.agents.chat import are_messages
from rlinf.agents.feedback import Counts, Feedback
from rlinf.agents.llm import Reply
from rlinf.runtime.base.errors import UserError
from rlinf.runtime.base.tasks import cancel_all

if TYPE_CHECKING:
    from rlinf.runs.library.session import Session

JOURNAL = "feedback.jsonl"
"""File in the run's directory: answers that were served, and what was said of them."""


@dataclass(frozen=True, slots=True, eq=False)
class Served(Reply):
    """An answer that feedback can name."""

    id: str = ""
    """Its name."""


class Online:
    """Serves answers and learns from feedback; made by `session.online`.

    Args:
        session: that answers and learns.
        batch, max_age, keep: see `Feedback`.
    """

    def __init__(self, session: Session, batch: int, max_age: int, keep: int) -> None:
        self._session = session
        self._bounds: dict[str, Any] = {"batch": batch, "max_age": max_age, "keep": keep}
        Feedback(**self._bounds)  # says at once what is wrong with them
        self._feedback: Feedback | None = None
        self._learner: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Online:
        session = self._session
        if (compares := session._open("online").compares) is not None:
            raise UserError(
                f"session.online: {compares} compares several answers to one question with each other, and a person "
                "sees one; take one that compares with the batch: algorithm={'name': 'reinforce_pp', 'kl': None}"
            )
        if self._learner is not None:
            raise UserError("session.online: it was opened before; make another one by session.online(…)")
        if not session.checkpointed:
            await session.checkpoint()  # else nothing could be gone on with, and what waits would be lost
        journal: Path = session.run_dir / JOURNAL
        self._feedback = Feedback(**self._bounds, journal=journal, done=session.step)
        self._learner = asyncio.create_task(self._learn(self._feedback), name="online learner")
        return self

    async def __aexit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """Stop learning; a step that is under way is completed first. What waits stays in the journal."""
        feedback, learner = self._opened("close"), self._learner
        assert learner is not None  # it is open
        self._feedback = None
        try:
            if self._training:
                await asyncio.wait([learner], timeout=None)
        finally:
            await cancel_all([learner])
            feedback.close()
        if kind is None and not learner.cancelled() and (error := learner.exception()) is not None:
            raise error

    _training = False
    """A step is under way."""

    # Serving ----------------------------------------------------------------------------------------------------

    async def complete(self, prompt: Any, **sampling: Any) -> Served:
        """One answer, by the newest weights; any number may be asked for at the same time.

        Args:
            prompt: messages, a text that stands as it is, or token ids.
            sampling: such as `max_new_tokens`; see `AgentLLM.chat`.

        Raises:
            UserError, TypeError, ValueError: something that cannot be answered.
        """
        llm = self.llm()
        step = self._session.step
        try:
            if are_messages(prompt, "service.complete"):
                reply: Reply = await llm.chat(prompt, **sampling)
            else:
                reply = await llm.generate(prompt, **sampling)
        finally:
            llm.end()
        name = self.served(llm, step)
        return Served(**{each.name: getattr(reply, each.name) for each in fields(Reply)}, id=name)

    def llm(self, **sampling: Any) -> AgentLLM:
        """The model for an agent of several calls; give it to `served` once it is done."""
        self._opened("llm")
        return self._session.llm(**sampling)

    def served(self, llm: AgentLLM, step: int, id: str | None = None) -> str:
        """All that a model said to an agent was served: it waits for one reward.

        Args:
            llm: that the agent called.
            step: `session.step` when the agent began.
            id: that feedback will name; None makes one that cannot be guessed.

        Returns:
            The id.
        """
        return self._opened("served").served(llm.samples(), step, id)

    def feedback(self, id: str, reward: float) -> bool:
        """What a person says of an answer, however late; the first word counts.

        Args:
            id: of the answer.
            reward: the higher the better, such as 1 for accepted and 0 for rejected.

        Returns:
            Whether there is such an answer without a reward. One that is too old by then (`max_age`) is counted and
            not learned from.
        """
        return self._opened("feedback").told(id, reward)

    @property
    def counts(self) -> Counts:
        """What became of answers and of feedback."""
        return self._opened("counts").counts

    @property
    def waiting(self) -> int:
        """Answers that wait for a reward."""
        return self._opened("waiting").waiting

    def _opened(self, call: str) -> Feedback:
        """What is under way; the learner's failure is the caller's too.

        Raises:
            UserError: it is not open.
        """
        if self._feedback is None:
            raise UserError(f"service.{call}: it is not open; write `async with session.online(…) as service:`")
        learner = self._learner
        if learner is not None and learner.done() and call != "close" and (error := learner.exception()) is not None:
            raise error
        return self._feedback

    # Learning ---------------------------------------------------------------------------------------------------

    async def _learn(self, feedback: Feedback) -> None:
        """Train on each batch as it is complete, until the service is closed."""
        session = self._session
        while self._feedback is feedback:
            groups = await feedback.batch(session.step)
            told: Mapping[str, float] = {**feedback.counts.metrics(), "online/waiting": float(feedback.waiting)}
            self._training = True
            try:
                await session.train([*groups.values()], metrics=told)
            finally:
                self._training = False
