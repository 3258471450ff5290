"""The endpoint's server: it listens, issues keys to agents, and maps the key of a request to its session.

In: agents (`AgentLLM`). Out: a URL and a key for each; what is asked there is recorded as the agent's own calls. The
socket is bound when the first key is asked for; the server runs until `close`, which its owner awaits: the run, the
session, or `session.serve`. It counts requests for `/metrics`, in Prometheus' text form. Who wakes whom: the end of an
episode ends what is still asked with its key.

Clients outside of episodes have sessions, one for every conversation, and feedback, by the program or as
`POST /v1/feedback`, makes them groups to learn from; the feedback that ends a session wakes whoever takes groups.

    async with session.serve(port=8000, token="…") as served:
        async for group in served:          # {"response": "chatcmpl-…", "reward": 1.0} was posted
            …
"""

from __future__ import annotations

import asyncio
import hmac
import itertools
import logging
import os
import re
import secrets
import socket
from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass, field, replace
from importlib import import_module
from typing import TYPE_CHECKING, Any

from rlinf.agents.agent import AgentLLM
from rlinf.agents.arguments import WrongType, number, shown
from rlinf.agents.chat import ChatFormat, Message
from rlinf.agents.endpoint.requests import ApiError, Applying, ClientAnswer, invalid
from rlinf.agents.trajectories import Key
from rlinf.config.text import EndpointConfig
from rlinf.data.sample import Group, Sample
from rlinf.runtime.base.errors import UserError
from rlinf.runtime.base.tasks import cancel_all, in_thread

if TYPE_CHECKING:
    from aiohttp import web

_BOUNDS = (0.005, 0.02, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)
"""Seconds; from what a tiny model needs to the longest answers."""


@dataclass(slots=True)
class Metrics:
    """Counts since the endpoint began."""

    requests: Counter[tuple[str, int]] = field(default_factory=Counter)
    """By route and status; 499: the client left."""
    in_flight: int = 0
    """Requests that are answered just now."""
    prompt_tokens: int = 0
    """Tokens that the model had before its answers."""
    cached: int = 0
    """Number of the tokens read that earlier answers of the same conversation had, too."""
    generated: int = 0
    """Tokens of answers."""
    malformed: int = 0
    """Answers that were not the JSON that was asked for."""
    asked_again: int = 0
    """Answers that did not call tools as the client wished, so that the model was asked once more."""
    opened: int = 0
    """Sessions."""
    branches: int = 0
    """Histories that were rewritten or forked, in sessions that are over."""
    _seconds: dict[tuple[str, str], list[int]] = field(
        default_factory=lambda: defaultdict(lambda: [0] * (len(_BOUNDS) + 1))
    )
    _total: dict[tuple[str, str], float] = field(default_factory=lambda: defaultdict(float))

    def ended(self, route: str, status: int, seconds: float) -> None:
        """A request is over."""
        self.requests[route, status] += 1
        self._counted("request", route, seconds)

    def began(self, route: str, seconds: float) -> None:
        """The first words of a streamed answer were there after so long."""
        self._counted("first_words", route, seconds)

    def _counted(self, what: str, route: str, seconds: float) -> None:
        self._seconds[what, route][bisect_left(_BOUNDS, seconds)] += 1
        self._total[what, route] += seconds

    def text(self, sessions: int, branches: int) -> str:
        """All of it.

        Args:
            sessions: that are open.
            branches: in those.
        """
        lines: list[str] = []

        def tell(name: str, kind: str, *rows: tuple[str, float]) -> None:
            lines.append(f"# TYPE rlinf_endpoint_{name} {kind}")
            lines.extend(f"rlinf_endpoint_{name}{labels} {value:g}" for labels, value in rows)

        requests = [(f'{{route="{route}",code="{code}"}}', n) for (route, code), n in sorted(self.requests.items())]
        tell("requests_total", "counter", *requests)
        tell("requests_in_flight", "gauge", ("", self.in_flight))
        tokens = {"read": self.prompt_tokens, "cached": self.cached, "generated": self.generated}
        tell("tokens_total", "counter", *((f'{{kind="{kind}"}}', count) for kind, count in tokens.items()))
        tell("malformed_json_total", "counter", ("", self.malformed))
        tell("asked_again_total", "counter", ("", self.asked_again))
        tell("sessions", "gauge", ("", sessions))
        tell("sessions_total", "counter", ("", self.opened))
        tell("branches_total", "counter", ("", self.branches + branches))
        section = ""
        for (what, route), counts in sorted(self._seconds.items()):
            if what != section:
                section = what
                lines.append(f"# TYPE rlinf_endpoint_{what}_seconds histogram")
            below, name = 0, f"rlinf_endpoint_{what}_seconds"
            for bound, count in zip((*map(str, _BOUNDS), "+Inf"), counts, strict=True):
                below += count
                lines.append(f'{name}_bucket{{route="{route}",le="{bound}"}} {below}')
            lines.append(f'{name}_sum{{route="{route}"}} {self._total[what, route]:g}')
            lines.append(f'{name}_count{{route="{route}"}} {below}')
        return "\n".join(lines) + "\n"


logger = logging.getLogger(__name__)
_APP = "rlinf.agents.endpoint.app"
"""Is imported when it is wanted: it needs aiohttp, and knows this module."""
_BACKLOG = 4096
"""Connections that wait to be accepted: as many agents as begin at once."""
_PROXIES = ("http_proxy", "https_proxy", "all_proxy")
"""Variables by which HTTP clients are told of proxies."""
_KEPT_RATES = 10_000
"""Keys whose rate is remembered."""
_SHOWN = 80
"""Characters of what a client sends that are shown to people."""
_MOST_IGNORED = 64
"""Fields that are noted in one session, and told to people in a run."""


def past_proxies(host: str) -> None:
    """Have clients of this process, and of those that it starts, ask the endpoint itself where a proxy is set for all
    else: a proxy cannot reach what listens on this machine alone.

    Args:
        host: where it listens.
    """
    if not any(os.environ.get(name) for proxy in _PROXIES for name in (proxy, proxy.upper())):
        return
    for name in ("no_proxy", "NO_PROXY"):
        hosts = [each for each in re.split(r"[\s,]+", os.environ.get(name, "")) if each]
        if "*" not in hosts:
            os.environ[name] = ",".join(dict.fromkeys([*hosts, "127.0.0.1", "localhost", host]))


@dataclass(slots=True, eq=False)
class EndpointSession:
    """One agent, or one conversation of a client: whose calls belong together."""

    name: str
    """Its key, or what clients call it."""
    llm: AgentLLM
    """Records its calls."""
    answers: dict[str, list[ClientAnswer]] = field(default_factory=dict)
    """By the id of a response, its answers."""
    whole: dict[str, Sequence[Message]] = field(default_factory=dict)
    """By the id of a response, all messages, its answer last."""
    asking: set[asyncio.Task[Any]] = field(default_factory=set)
    """Calls that are under way."""
    over: bool = False
    """The episode has ended."""
    used: float = 0.0
    """When it was last asked, by the event loop's clock."""

    def end(self) -> None:
        """Nothing more may be asked; what is under way is given up."""
        self.over = True
        for task in self.asking:
            task.cancel()


@dataclass(slots=True)
class _Rate:
    """A bucket that fills evenly, with room for one minute's requests."""

    room: float
    at: float


class _ServerLog(logging.LoggerAdapter[logging.Logger]):
    """The log of the HTTP server. Requests that are no HTTP, such as a port scan's, are counted, and the first is one
    line: they are mistakes of who sends them.

    Args:
        metrics: count them.
    """

    def __init__(self, metrics: Metrics) -> None:
        super().__init__(logger)
        self._metrics = metrics

    def exception(self, msg: object, *args: object, exc_info: Any = True, **more: Any) -> None:
        """Log an exception of the server."""
        from aiohttp.http_exceptions import HttpProcessingError

        if not isinstance(exc_info, HttpProcessingError):
            super().exception(msg, *args, exc_info=exc_info, **more)
            return
        counts = self._metrics.requests
        if not any(route == "malformed" for route, _ in counts):
            what = " ".join(str(exc_info.message).split())[:_SHOWN]
            self.warning("the endpoint was sent what is no HTTP (%r) and refused it; more of it is only counted", what)
        counts["malformed", exc_info.code] += 1


def _bytes(credential: str) -> bytes:
    """A credential as it came over the wire, where it need not be UTF-8."""
    return credential.encode("utf-8", "surrogateescape")


class Endpoint:
    """Serves OpenAI's and Anthropic's protocols.

    Args:
        config: `agent.endpoint`: where it listens, and its limits.
        opens: makes the model for a client that shows no agent's key; None: such clients are refused.
        posts: paths of further POST requests, and who answers them.
        answered: is called after every response.
    """

    def __init__(
        self,
        config: EndpointConfig | None = None,
        opens: Callable[[], AgentLLM] | None = None,
        posts: Mapping[str, Callable[[Any], Awaitable[Any]]] | None = None,
        answered: Callable[[], None] | None = None,
    ) -> None:
        self.config = EndpointConfig() if config is None else config
        self.metrics = Metrics()
        """Counts for `/metrics`."""
        self.sessions: dict[str, EndpointSession] = {}
        """Those that are open, by name; those of clients in the order in which they were last asked."""
        self.applying = Applying()
        """Applies JSON schemas of clients."""
        self._opens, self._posts, self._on_answer = opens, posts or {}, answered
        self._by_history: dict[Key, list[EndpointSession]] = {}  # in which it was said, oldest first
        self._by_response: dict[str, EndpointSession] = {}
        self._rates: dict[str, _Rate] = {}
        self._ignored: set[str] = set()  # of which people were told
        self._preparing, self._prepared = asyncio.Lock(), False
        self._socket: socket.socket | None = None
        self._serving: asyncio.Task[None] | None = None
        self._runner: web.AppRunner | None = None

    # Agents -----------------------------------------------------------------------------------------------------

    def session(self, llm: AgentLLM) -> tuple[str, str]:
        """Give an agent a URL and a key of its own, which die with its episode.

        Args:
            llm: records what is asked there.

        Returns:
            The URL for OpenAI's clients, and the key: the URL holds the key, so that frameworks which cannot be given
            one work too.

        Raises:
            UserError: it cannot listen.
        """
        key = f"rl-{secrets.token_urlsafe(18)}"
        self._add(key, llm)
        return f"{self.listen()}/s/{key}/v1", key

    def _add(self, name: str, llm: AgentLLM) -> EndpointSession:
        session = self.sessions[name] = EndpointSession(name, llm, used=asyncio.get_running_loop().time())
        self.metrics.opened += 1
        llm.when_ended(lambda: self._ended(session))
        return session

    def _ended(self, session: EndpointSession) -> None:
        session.end()
        self.metrics.branches += session.llm.trajectories.counts.branches
        if self.sessions.get(session.name) is session:
            del self.sessions[session.name]
        for response, results in session.answers.items():
            self._by_response.pop(response, None)
            for each in results:
                sessions = self._by_history.get(each.key, [])
                if session in sessions:
                    sessions.remove(session)
                if not sessions:
                    self._by_history.pop(each.key, None)
        self._rates.pop(session.name, None)

    @property
    def branches(self) -> int:
        """Histories that were rewritten or forked, in sessions that are open."""
        return sum(each.llm.trajectories.counts.branches for each in self.sessions.values())

    # Whose request it is ----------------------------------------------------------------------------------------

    def check_origin(self, origin: str | None) -> None:
        """See that no page in a browser asks where nothing has to be shown: any page could.

        Args:
            origin: of the page; None: it is no browser.

        Raises:
            ApiError: 403.
        """
        if origin is not None and self._opens is not None and self.config.token is None:
            raise ApiError(403, "pages in browsers are answered with a token alone: set agent.endpoint.token")

    def admitted(self, key: str | None, named: str | None) -> EndpointSession | None:
        """See whether a request may be answered.

        Args:
            key: that it shows, None for none.
            named: the session that its URL or a header names.

        Returns:
            The session; None: it is told by what is said, see `conversation`.

        Raises:
            ApiError: 401 for a key that is none, 429 for too much at once.
        """
        agents = self._opens is None
        session = self.sessions.get((named or key or "") if agents else (named or ""))
        whole, _, agent = (named or "").partition(".")
        if agents and session is None and agent and whole in self.sessions:  # one of several of an episode
            session = self._add(named or "", self.sessions[whole].llm.agent(agent))
        if agents and session is None:
            raise ApiError(
                401,
                "this key is not known, or its episode is over; take llm.base_url and llm.api_key, and await every "
                "call before the agent returns",
                code="invalid_api_key",
            )
        token = None if agents else self.config.token
        if token is not None and not hmac.compare_digest(_bytes(key or ""), _bytes(token)):
            raise ApiError(
                401, "show the endpoint's token: Authorization: Bearer …, or x-api-key", code="invalid_api_key"
            )
        if self.metrics.in_flight >= self.config.max_concurrent:
            why = f"{self.config.max_concurrent} requests are answered already (agent.endpoint.max_concurrent)"
            raise ApiError(429, why, code="rate_limit_exceeded", retry_after=1.0)
        self._paced((session.name if session is not None and agents else key) or "")
        if session is None and named:
            assert self._opens is not None
            session = self._add(named, self._opens())
        return session

    def _paced(self, key: str) -> None:
        """Count a request of a key.

        Raises:
            ApiError: 429, if there were too many.
        """
        if not (most := self.config.requests_per_minute):
            return
        now = asyncio.get_running_loop().time()
        if len(self._rates) >= _KEPT_RATES:
            self._rates = {name: each for name, each in self._rates.items() if now - each.at < 60}
        rate = self._rates.setdefault(key, _Rate(most, now))
        rate.room, rate.at = min(most, rate.room + (now - rate.at) * most / 60), now
        if rate.room < 1:
            why = f"more than {most} requests a minute with this key (agent.endpoint.requests_per_minute)"
            raise ApiError(429, why, code="rate_limit_exceeded", retry_after=(1 - rate.room) * 60 / most)
        rate.room -= 1

    def conversation(self, messages: Sequence[Message], chat: ChatFormat | None) -> EndpointSession:
        """The session of a client that names none: the one in which these messages were said, or a new one.

        Where several clients have said the same and were answered the same, each goes on in a session of its own, in
        which nobody has gone on yet.

        Args:
            messages: all that was said; none for token ids.
            chat: how they become tokens.
        """
        assert self._opens is not None  # else the key has named it
        any_session = next(iter(self.sessions.values()), None)  # all have the same template
        if messages and chat is not None and any_session is not None:
            for _, key in reversed([*any_session.llm.trajectories.histories(messages, chat)]):
                if sessions := self._by_history.get(key):
                    idle = [each for each in sessions if not each.asking]
                    free = [each for each in idle if not each.llm.trajectories.goes_on_from(key)]
                    return (free or sessions)[0]
        return self._add(f"conversation-{secrets.token_hex(8)}", self._opens())

    def noted(
        self, session: EndpointSession, response: str, results: Sequence[ClientAnswer], whole: Sequence[Message]
    ) -> None:
        """A response was given.

        Args:
            session: whose.
            response: its id.
            results: its answers.
            whole: all messages, the answer last, for who goes on from it by its id; none if nobody may.
        """
        session.answers[response] = list(results)
        session.used = asyncio.get_running_loop().time()
        if whole:
            session.whole[response] = whole
        self._by_response[response] = session
        if self._opens is not None:
            for key in dict.fromkeys(each.key for each in results if each.key):
                sessions = self._by_history.setdefault(key, [])
                if session not in sessions:
                    sessions.append(session)
            self.sessions[session.name] = self.sessions.pop(session.name)
        if self._on_answer is not None:
            self._on_answer()

    def unheeded(self, session: EndpointSession, names: Iterable[str]) -> None:
        """Note fields of a request that are not honoured: in the session's record, and for people once in a run.

        Args:
            session: whose request.
            names: of the fields.
        """
        ignored, chat = session.llm.trajectories.ignored, session.llm.trajectories.chat
        for name in (each[:_SHOWN] for each in names):
            if name not in ignored and len(ignored) < _MOST_IGNORED:
                ignored.append(name)
            if name not in self._ignored and len(self._ignored) < _MOST_IGNORED:
                self._ignored.add(name)
                chat.warn(f"ignored {name}", f"the endpoint ignores {name!r} in its clients' requests")

    def thinks(self, llm: AgentLLM) -> bool:
        """Tell whether the model writes what it thinks in marks; see `agent.endpoint.reasoning`."""
        mode = self.config.reasoning
        return mode == "think" or (mode == "auto" and llm.trajectories.chat.thinks)

    def of_response(self, response: str) -> EndpointSession | None:
        """The session in which a response was given; None: there is none, or it is over."""
        return self._by_response.get(response)

    # Listening --------------------------------------------------------------------------------------------------

    @property
    def address(self) -> tuple[str, int] | None:
        """Where it listens; None: it does not."""
        if self._socket is None:
            return None
        host, port = self._socket.getsockname()[:2]
        return ("127.0.0.1" if host == "0.0.0.0" else host), port

    async def prepare(self) -> None:
        """Import what `listen` needs, in a thread: on the event loop all would wait for it."""
        async with self._preparing:
            if not self._prepared:
                with suppress(ModuleNotFoundError):  # which `listen` tells of, if anybody wants a URL
                    await in_thread(lambda: import_module(_APP))
                self._prepared = True

    def listen(self) -> str:
        """Listen, if it does not yet.

        Returns:
            Its URL, without a path.

        Raises:
            UserError: the address cannot be had, or aiohttp is not installed.
        """
        if self._socket is None:
            try:
                app = import_module(_APP)
            except ModuleNotFoundError as error:
                raise UserError(f"an endpoint needs {error.name}: pip install 'rlinf[endpoint]'") from None
            self._socket = self._bound()
            past_proxies((self.address or ("", 0))[0])
            self._serving = asyncio.create_task(self._serve(app.application(self, self._posts)), name="endpoint")
        host, port = self.address or ("", 0)
        return f"http://{f'[{host}]' if ':' in host else host}:{port}"

    def _bound(self) -> socket.socket:
        host, port = self.config.host.strip("[]"), self.config.port
        listener = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM)
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind((host, port))
            listener.listen(_BACKLOG)  # connections wait from now on for the server's task
        except (OSError, OverflowError) as error:
            listener.close()
            raise UserError(
                f"agent.endpoint: {host}:{port} cannot be listened on: {error}; set another agent.endpoint.port, 0 for "
                "any free one, or agent.endpoint.host"
            ) from None
        listener.setblocking(False)
        return listener

    async def _serve(self, application: web.Application) -> None:
        from aiohttp import web

        log = _ServerLog(self.metrics)
        # a client that leaves cancels its handler, and so what it asked for
        self._runner = web.AppRunner(
            application, handler_cancellation=True, access_log=None, shutdown_timeout=1.0, logger=log
        )
        await self._runner.setup()
        assert self._socket is not None
        await web.SockSite(self._runner, self._socket, backlog=_BACKLOG).start()

    async def close(self) -> None:
        """End all sessions and stop listening."""
        for session in [*self.sessions.values()]:
            self._ended(session)
        if self._serving is not None:
            await cancel_all([self._serving])
        if self._runner is not None:
            await self._runner.cleanup()
        await self.applying.close()
        if self._socket is not None:
            self._socket.close()
        self._socket = self._serving = self._runner = None

    def models(self) -> Iterator[str]:
        """Names that it answers to."""
        yield "policy"
        yield from (name for name in self.config.models if name != "*")

    def check_model(self, name: str) -> None:
        """See that it answers to a name.

        Raises:
            ApiError: 404.
        """
        if name not in self.models() and "*" not in self.config.models:
            why = f"there is no model {name!r:.100}; take {', '.join(self.models())}, or add agent.endpoint.models"
            raise ApiError(404, why, code="model_not_found", param="model")


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
        await self._endpoint.prepare()
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
            target = self._endpoint.sessions.get(session)
            if target is None or not target.llm.trajectories.turns:
                self.unmatched += 1
                return False
            self._over(target, target.llm.samples(value))
            return True
        target = self._endpoint.of_response(str(response))
        answers = [] if target is None else target.answers[str(response)]
        if target is None or not 0 <= choice < len(answers) or answers[choice].turn.reward is not None:
            self.unmatched += 1
            return False
        answers[choice].turn.reward = value
        leaves = [turn for turn in target.llm.trajectories.turns if not turn.goes_on]
        if end or (end is None and all(turn.reward is not None for turn in leaves) and not target.asking):
            self._over(target, [sample for sample in target.llm.samples() if sample.reward is not None])
        return True

    def _over(self, session: EndpointSession, samples: Sequence[Sample]) -> None:
        """A session was judged: it ends, and is a group."""
        session.llm.end()
        if not samples:
            return
        prompt = replace(samples[0].prompt, id=next(self._numbers))
        numbered = tuple(
            replace(sample, index=index, prompt=replace(sample.prompt, id=prompt.id) if index else prompt)
            for index, sample in enumerate(samples)
        )
        self.judged += 1
        self._groups.put_nowait(Group(prompt, numbered))

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


def serving_config(config: EndpointConfig, settings: Mapping[str, Any]) -> EndpointConfig:
    """Override the run's endpoint settings with the arguments of `session.serve`.

    Raises:
        UserError: there is no such setting, or anybody could use it from elsewhere.
    """
    if unknown := sorted(settings.keys() - vars(config).keys()):
        raise UserError(f"session.serve: there is no {', '.join(unknown)}; there is {', '.join(vars(config))}")
    merged = replace(config, **settings)
    merged = replace(merged, host=merged.host.strip("[]"))
    if merged.token is None and merged.host not in ("localhost", "::1") and not merged.host.startswith("127."):
        raise UserError(
            f"session.serve: whoever reaches {merged.host} could use the model and teach it; set token=…, or "
            "agent.endpoint.token"
        )
    return merged
