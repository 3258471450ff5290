"""The model for clients outside of episodes: every conversation is a session, and feedback makes it one to learn from.

In: requests of clients, later what people say of the answers, by the program or as `POST /v1/feedback`. Out: groups, as
sessions are judged. Who wakes whom: the feedback that ends a session wakes whoever takes groups.

    async with session.serve(port=8000, token="…") as served:
        async for group in served:          # {"response": "chatcmpl-…", "reward": 1.0} was posted
            …
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import replace
from typing import Any

from rlinf.agents.agent import AgentLLM
from rlinf.agents.checks import WrongType, number, shown
from rlinf.agents.endpoint.endpoint import Endpoint, EndpointSession
from rlinf.agents.endpoint.errors import ApiError, invalid
from rlinf.config.text import EndpointConfig
from rlinf.data.sample import Group, Sample
from rlinf.runtime.base.errors import UserError


class Served:
    """An endpoint for any client; `session.serve` makes one.

    Args:
        config: where it listens, and its limits.
        opens: makes the model for a new session.
        idle: seconds after which a session that nobody asks or judges is forgotten.
    """

    def __init__(self, config: EndpointConfig, opens: Callable[[], AgentLLM], *, idle: float = 3600.0) -> None:
        self._endpoint = Endpoint(config, opens, posts={"/v1/feedback": self._posted}, answered=self._answered)
        self._idle = idle
        self._groups: asyncio.Queue[Group | None] = asyncio.Queue()
        self._numbers = itertools.count()
        self._stack = AsyncExitStack()
        self.url = ""
        """For clients of OpenAI's protocol."""
        self.judged = 0
        """Sessions that were judged, and became groups."""
        self.forgotten = 0
        """Sessions that nobody judged in time."""
        self.unmatched = 0
        """Feedback on what there is not: unknown, judged before, or forgotten."""

    async def __aenter__(self) -> Served:
        self.url = f"{self._endpoint.listen()}/v1"
        return self

    async def __aexit__(self, *exception: object) -> None:
        for session in [*self._endpoint.sessions.values()]:
            session.llm.end()
        await self._endpoint.close()
        self._groups.put_nowait(None)

    @property
    def sessions(self) -> Mapping[str, EndpointSession]:
        """Those that are open, by name: what `X-Session-Id` or `/s/NAME/v1` says, else one per conversation."""
        return self._endpoint.sessions

    # What is learned from ---------------------------------------------------------------------------------------

    def __aiter__(self) -> AsyncIterator[Group]:
        return self

    async def __anext__(self) -> Group:
        """The next session that was judged.

        Raises:
            StopAsyncIteration: it is closed, and all were taken.
        """
        group = await self._groups.get()
        if group is None:
            self._groups.put_nowait(None)  # for others who wait, too
            raise StopAsyncIteration
        return group

    def feedback(
        self,
        reward: float,
        *,
        response: str | None = None,
        session: str | None = None,
        choice: int = 0,
        end: bool | None = None,
    ) -> bool:
        """Say how good an answer was, or a session as a whole.

        Args:
            reward: the higher the better.
            response: id of a response.
            session: name of a session, which is over with this.
            choice: which answer of the response.
            end: the session is over; None: once each of its last answers was judged.

        Returns:
            Whether there is one that was not judged before.

        Raises:
            TypeError, ValueError: no number; not exactly one of response and session.
        """
        value = number(reward, "served.feedback")
        if (response is None) == (session is None):
            raise WrongType("served.feedback: say either response=… or session=…")
        if session is not None:
            found = self._endpoint.sessions.get(session)
            if found is None or not found.llm.trajectories.turns:
                self.unmatched += 1
                return False
            self._over(found, found.llm.samples(value))
            return True
        found = self._endpoint.of_response(str(response))
        answers = [] if found is None else found.answers[str(response)]
        if found is None or not 0 <= choice < len(answers) or answers[choice].turn.reward is not None:
            self.unmatched += 1
            return False
        answers[choice].turn.reward = value
        leaves = [turn for turn in found.llm.trajectories.turns if not turn.goes_on]
        if end or (end is None and all(turn.reward is not None for turn in leaves) and not found.asking):
            self._over(found, [sample for sample in found.llm.samples() if sample.reward is not None])
        return True

    def _over(self, session: EndpointSession, samples: Sequence[Sample]) -> None:
        """A session was judged: it ends, and is a group."""
        session.llm.end()
        if not samples:
            return
        prompt = replace(samples[0].prompt, id=next(self._numbers))
        made = tuple(
            replace(sample, index=index, prompt=replace(sample.prompt, id=prompt.id) if index else prompt)
            for index, sample in enumerate(samples)
        )
        self.judged += 1
        self._groups.put_nowait(Group(prompt, made))

    def _answered(self) -> None:
        """Forget sessions that were asked too long ago; whenever there is an answer."""
        oldest = asyncio.get_running_loop().time() - self._idle
        for session in [*self.sessions.values()]:
            if session.used >= oldest:
                break  # those behind it were asked later
            if not session.asking:
                session.llm.end()
                self.forgotten += 1

    async def _posted(self, call: Any) -> Any:
        """`POST /v1/feedback`."""
        body = call.body
        response, session = body.text("response"), body.text("session")
        reward = body.wanted("reward", body.number("reward", -1e9, 1e9))
        choice, end = body.whole("choice", 0) or 0, body.any("end")
        if end not in (None, True, False):
            raise invalid("end", "end must be true or false")
        body.done()
        if body.unheeded:
            unknown = next(iter(body.unheeded))
            raise ApiError(400, f"unknown parameter: {unknown}", code="unknown_parameter", param=unknown)
        if (response is None) == (session is None):
            raise invalid("response", "say either response or session")
        if not self.feedback(reward, response=response, session=session, choice=choice, end=end):
            what = f"session {shown(session)}" if response is None else f"response {shown(response)}"
            raise ApiError(404, f"there is no {what} that waits for feedback", code="not_found")
        return call.json({"object": "feedback", "reward": reward})


def serving_config(config: EndpointConfig, given: Mapping[str, Any]) -> EndpointConfig:
    """What `session.serve` was given, over what the run says.

    Raises:
        UserError: there is no such setting, or anybody could use it from elsewhere.
    """
    if unknown := sorted(given.keys() - vars(config).keys()):
        raise UserError(f"session.serve: there is no {', '.join(unknown)}; there is {', '.join(vars(config))}")
    made = replace(config, **given)
    made = replace(made, host=made.host.strip("[]"))
    if made.token is None and made.host not in ("localhost", "::1") and not made.host.startswith("127."):
        raise UserError(
            f"session.serve: whoever reaches {made.host} could use the model and teach it; set token=…, or "
            "agent.endpoint.token"
        )
    return made
