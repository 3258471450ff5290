"""The server side of served engines: what a kind of server must do, its model's files, HTTP to it, and its process.

`Server` is the seam between `served/engine.py` and a kind such as `served/sglang.py`: requests as plain token ids and
weights go in, chunks of tokens come out. The engine supervises the process, keeps all tokens and decides when an answer
has ended.

Who wakes whom: the supervisor (`runtime/processes/supervisor.py`) starts a life of the process and asks
`ServerChild._healthy` until it says yes; that is what `up` waits for. A life is healthy only after `prepare`, so nobody
ever gets an answer of a server that was restarted and has not got its weights back.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import pydantic
import torch
from transformers import AutoConfig, PretrainedConfig, PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion

from rlinf.config.schema import CLOSED
from rlinf.data.images import FAMILIES, auto_class
from rlinf.data.rng import ONE_AT_A_TIME
from rlinf.data.routes import experts_of
from rlinf.data.sample import ImageRef
from rlinf.data.tokenizer import pretrained, without_own_code
from rlinf.data.weights import Weights
from rlinf.engines.base import EngineSetup, Sampling, TextScores
from rlinf.runtime.base.progress import work
from rlinf.runtime.base.tasks import OwnDirectory
from rlinf.runtime.processes.supervisor import Child, ChildDied, free_address

if TYPE_CHECKING:
    import aiohttp


@dataclass(frozen=True, slots=True)
class Experts:
    """The experts of a mixture, as its configuration counts them."""

    layers: int
    """Layers of the model, those without experts among them."""
    top_k: int
    """Experts that each token goes to."""
    count: int
    """Experts of a layer."""


@dataclass(frozen=True, slots=True)
class ModelFiles:
    """The files of the model that a server starts from, with its shapes and names."""

    directory: Path
    """With config.json and safetensors."""
    own: OwnDirectory | None
    """The directory where it was made for this server; `remove` deletes it."""
    shapes: dict[str, tuple[int, ...]]
    """Shape of each tensor of the model, by the name that trainers publish it under."""
    vocabulary: int
    """Tokens from 0 that it can read."""
    names: Mapping[str, str] = field(default_factory=dict)
    """Names in files of tensors that have another one in memory, by the latter: servers know those of files."""
    experts: Experts | None = None
    """Experts of a mixture; None of other models."""

    def as_saved(self, weights: Weights) -> Weights:
        """Weights by the names that their tensors have in files."""
        if not self.names:
            return weights
        layout = tuple(replace(slot, name=self.names.get(slot.name, slot.name)) for slot in weights.layout)
        return replace(weights, layout=layout)

    def remove(self) -> None:
        """Delete what was made for the server."""
        if self.own is not None:
            self.own.remove()


def model_files(setup: EngineSetup) -> ModelFiles:
    """The files of the model of a setup: those of a directory, or of a new model, which is made and saved.

    Raises:
        ValueError: it is no language model that transformers knows.
    """
    if isinstance(setup.model, str) and Path(setup.model).is_dir():
        config = pretrained(AutoConfig, setup.model)
        with ONE_AT_A_TIME, torch.device("meta"):  # it switches the default dtype of the whole process meanwhile
            empty = without_own_code(auto_class(config), config)
        directory = Path(setup.model).absolute()
        return ModelFiles(directory, None, _shapes(empty), _vocabulary(config), _names(empty), _experts(config))
    own = OwnDirectory("model")
    directory = own.path
    try:
        with setup.build_model() as model:
            model.save_pretrained(directory)
            shapes, config, names = _shapes(model), model.config, _names(model)
        if setup.tokenizer is not None:
            with contextlib.suppress(AttributeError):  # a decoder that is no tokenizer of transformers
                setup.tokenizer.save_pretrained(directory)
        if setup.pictures is not None:
            setup.pictures.save(directory)
    except BaseException:
        own.remove()
        raise
    return ModelFiles(directory, own, shapes, _vocabulary(config), names, _experts(config))


def _shapes(model: torch.nn.Module) -> dict[str, tuple[int, ...]]:
    return {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}


def _names(model: PreTrainedModel) -> dict[str, str]:
    """Names in files of the tensors of a model that reads pictures, where they are others: transformers reads these
    models by older names than it gives their parts. Those that it joins or splits besides keep theirs."""
    if model.config.model_type not in FAMILIES:
        return {}
    own = {id(parameter): name for name, parameter in model.named_parameters()}
    saved = revert_weight_conversion(model, dict(model.named_parameters()))
    renamed = {own[id(tensor)]: name for name, tensor in saved.items() if id(tensor) in own}
    return {name: other for name, other in renamed.items() if name != other}


def _vocabulary(config: PretrainedConfig) -> int:
    return int(config.get_text_config().vocab_size)


def _experts(config: PretrainedConfig) -> Experts | None:
    text = config.get_text_config()
    count, top_k = experts_of(text), getattr(text, "num_experts_per_tok", None)
    return Experts(int(text.num_hidden_layers), int(top_k), count) if count and top_k else None


_SHOWN = 2000
"""Characters of a server's error text that an error of ours repeats."""
_LINE = 64 << 20
"""Bytes of one event at most; an answer of a million tokens with log-probs in one piece stays below."""
_KEPT = 2.0
"""Seconds for which a connection without requests is used again. Servers close theirs after 5 s (uvicorn's default),
and a request that meets that on its way would look like a server that died."""


class Refused(ValueError):
    """The server will not do what it was asked (4xx): asked again, it would say the same."""


class Lost(RuntimeError):
    """The server did not finish what it was asked: it is gone, hangs or failed (5xx). Asked again, it may."""


class Http:
    """Requests to one server; needs a running loop. Connections are kept and are as many as there are requests.

    Args:
        url: of the server, such as "http://127.0.0.1:8000".
        kind: what messages call the server.
        silence: seconds without an event after which a stream counts as lost.
        headers: sent with every request.
    """

    def __init__(
        self, url: str, kind: str, *, silence: float = 300.0, headers: Mapping[str, str] | None = None
    ) -> None:
        import aiohttp  # here: the package is used by served engines alone

        self.url, self.kind = url, kind
        self._silence = silence
        self._aiohttp = aiohttp
        self._session = aiohttp.ClientSession(
            url,
            headers=headers,
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=_KEPT),
            read_bufsize=1 << 20,
            trust_env=False,
            auto_decompress=False,
        )

    async def post(self, path: str, body: Mapping[str, Any] | None = None, *, seconds: float = 60.0) -> Any:
        """POST JSON; returns the decoded reply, or its text where that is no JSON.

        Args:
            path: such as "/generate".
            body: what is sent.
            seconds: deadline of the whole request.

        Raises:
            Refused: the server says 4xx.
            Lost: it says 5xx, or nothing by the deadline, or cannot be reached.
        """
        return await self._request("POST", path, body, seconds)

    async def get(self, path: str, *, seconds: float = 10.0) -> Any:
        """GET; otherwise as `post`."""
        return await self._request("GET", path, None, seconds)

    async def events(self, path: str, body: Mapping[str, Any]) -> AsyncGenerator[Any, None]:
        """POST JSON and yield what is streamed back: the `data:` lines of server-sent events, decoded, up to `[DONE]`.

        Raises:
            Refused, Lost: as `post`; Lost also if the stream ends without `[DONE]`.
        """
        timeout = self._aiohttp.ClientTimeout(total=None, sock_read=self._silence)
        with self._named(path, self._silence):
            async with self._session.post(path, json=body, timeout=timeout, read_bufsize=_LINE) as reply:
                await self._check(path, reply)
                async for line in reply.content:
                    if line.startswith(b"data: [DONE]"):
                        return
                    if line.startswith(b"data:"):
                        yield json.loads(line[5:])
        raise self._lost(f"{path}: the stream ended in mid-answer")

    async def close(self) -> None:
        """Close all connections."""
        await self._session.close()

    async def _request(self, method: str, path: str, body: Mapping[str, Any] | None, seconds: float) -> Any:
        timeout = self._aiohttp.ClientTimeout(total=seconds)
        with self._named(path, seconds):
            async with self._session.request(method, path, json=body, timeout=timeout) as reply:
                await self._check(path, reply)
                text = await reply.text()
        with contextlib.suppress(ValueError):
            return json.loads(text)
        return text

    async def _check(self, path: str, reply: aiohttp.ClientResponse) -> None:
        if reply.status < 400:
            return
        text = f"{self.kind} {path} says {reply.status}: {_message(await reply.text())[:_SHOWN]}"
        raise Refused(text) if reply.status < 500 else self._lost(text)

    @contextlib.contextmanager
    def _named(self, path: str, seconds: float) -> Iterator[None]:
        try:
            yield
        except TimeoutError:
            raise self._lost(f"{path}: no answer for {seconds:g} s") from None
        except (self._aiohttp.ClientError, ConnectionError, json.JSONDecodeError) as error:
            raise self._lost(f"{path}: {type(error).__name__}: {error}") from error

    def _lost(self, text: str) -> Lost:
        return Lost(text if text.startswith(self.kind) else f"{self.kind} {text}")


def _message(text: str) -> str:
    """The message in an error body, without its wrapping."""
    with contextlib.suppress(ValueError, TypeError, KeyError):
        body = json.loads(text)
        body = body.get("error", body)
        return str(body if isinstance(body, str) else body["message"])
    return text


__all__ = ["Ask", "Chunk", "Lost", "Refused", "Server"]


@dataclass(frozen=True, slots=True)
class Chunk:
    """A piece of an answer, as it streams."""

    tokens: Sequence[int]
    """Those that have come since the last chunk."""
    logprobs: Sequence[float]
    """Log-prob of each token, nats, under log-softmax(logits / temperature), or log-softmax(logits) where the
    temperature is 0."""
    routes: np.ndarray | None = None
    """Routes of the text from its beginning, with the last piece, where the server tells of experts; see
    `Sample.routes`."""


@dataclass(frozen=True, slots=True)
class Ask:
    """One request of the server's; an answer may take several, one after the other."""

    id: str
    """Unique, and no other's beginning; for `abort`."""
    ids: Sequence[int]
    """Prompt and tokens so far."""
    sampling: Sampling
    """Rules of the answer, but for its lengths: those count from here, and there are no stop texts."""
    seed: int
    """Seed of the random choices, from 0 to 2^31 - 1: the same for all asks of one answer. A server whose random
    numbers are counted by position then continues an answer as it would have gone on."""
    whole_seed: int
    """The request's own seed, for a server that takes all of its 63 bits."""
    answered: int
    """Tokens at the end of `ids` that are of the answer: the next is drawn by random number `answered` of the seed."""
    images: tuple[ImageRef, ...] = ()
    """Pictures of the prompt, in the order of their placeholders; none for a server that does not read them."""
    banned: tuple[int, ...] = ()
    """Tokens that are never drawn, and whose probability is 0 in the log-probs."""
    grammar: str | None = None
    """Lark grammar of llguidance that the answer is kept to from its first token on; None: it may be anything."""
    adapter: str | None = None
    """Name of the adapters that answer, which `ServerAdapters.load` brought; None: the model itself."""


class ServerAdapters(Protocol):
    """Adapters that a server holds beside its model. Talking to it raises as `Server`'s methods do."""

    unembeds: bool
    """They may be of the output embedding, too."""

    def check(self, weights: Weights, shapes: Mapping[str, tuple[int, ...]]) -> None:
        """Raise ValueError unless the server can hold these beside a model of these shapes."""

    async def load(self, http: Http, adapter: str, directory: Path) -> None:
        """Hold adapters in a directory of peft's by this name, in place of those that were of it, by which nothing is
        being answered. The directory stays. Refused, the server has those that were there."""

    async def unload(self, http: Http, adapter: str) -> None:
        """Hold them no more; nothing is being answered by them."""


class Server(Protocol):
    """One server process, of one kind.

    Every method that talks to the server raises `Refused` or `Lost` as `Http` does, and nothing else.
    """

    kind: str
    """Name of it in messages, such as `SGLang`."""
    seeded: bool
    """A seed decides an answer, whatever shares the batch and wherever it was interrupted, up to rounding."""
    reads_images: bool
    """It takes pictures with a prompt."""
    routes: bool
    """Chunks tell to which experts tokens went."""
    forms: bool
    """It keeps answers to the grammar of an `Ask`."""

    @property
    def adapters(self) -> ServerAdapters | None:
        """Holds adapters beside its model; None: it holds none."""

    def command(self, model: Path, host: str, port: int) -> Sequence[str]:
        """The command line of the child process."""

    def environment(self) -> Mapping[str, str | None]:
        """Variables to add to ours for the child, or to remove if None (such as RANK of torchrun)."""

    async def greet(self, http: Http) -> None:
        """See whether a server that was just started is up, and learn what its version can do.

        Raises:
            Lost: it is not up yet.
        """

    async def healthy(self, http: Http) -> None:
        """Ask a running server, which may be computing, for a sign of life; raises if there is none."""

    def generate(self, http: Http, ask: Ask) -> AsyncGenerator[Chunk, None]:
        """Stream an answer. It ends at its length, at a stop token (which is its last), or because it was aborted: the
        engine sees from the tokens which."""

    async def score(self, http: Http, texts: Sequence[np.ndarray], top: int) -> list[TextScores]:
        """Score texts of two tokens and more; see `Engine.score`."""

    async def abort(self, http: Http, ids: Sequence[str] | None) -> None:
        """End asks, None: all of them; those that the server does not know (any more, or yet) are no error."""

    async def quiet(self, http: Http) -> None:
        """Called when no ask is open: returns once the server computes nothing, and has forgotten what it has read."""

    async def update(self, http: Http, weights: Weights) -> None:
        """Take over other weights. Called after `quiet`, with names and shapes that fit; a failure may leave a mixture
        behind, after which the server is restarted."""

    async def release(self, http: Http) -> None:
        """Give device memory back, if it can. Called after `quiet`."""

    async def regain(self, http: Http, weights: Weights | None) -> None:
        """Undo `release`, with these weights, or the model's own if None, in use afterwards."""

    def close(self) -> None:
        """Let go of what it holds on this side, such as shared memory. The process has ended."""


@pydantic.dataclasses.dataclass(config=CLOSED, frozen=True, slots=True)
class ServerSettings:
    """Keys of `rollout.engine_args` that every kind of server has."""

    python: str | None = None
    """Interpreter of an environment with the server. null: $RLINF_SGLANG_PYTHON or .venv-sglang, which `make sglang`
    creates; of vLLM, $RLINF_VLLM_PYTHON or .venv-vllm."""
    tensor_parallel: int = pydantic.Field(default=1, ge=1)
    """GPUs, from this rank's on, over which the model is split."""
    memory_share: float | None = None
    """Share of a GPU's memory for weights and KV cache; null: the server's own choice."""
    start_deadline: float = 600.0
    """Seconds for the server's start."""
    deadline: float = 300.0
    """Seconds for a change of weights, for going to sleep and for waking, each; then it is started again."""
    silence: float = 300.0
    """Seconds without a token after which an answer is asked for again."""
    adapter_rank: int = pydantic.Field(default=0, ge=0, le=512)
    """Highest rank of adapters that the server holds beside its model, for answers by several models of one base at
    once; 0: it holds none. 512 is vLLM's bound."""
    schemas: bool = False
    """Answers are kept to JSON schemas where asked for, by llguidance in the server, which then loads the tokenizer."""
    max_restarts: int = 3
    """Deaths in a row that are followed by a restart."""


_TORCHRUN = (
    *("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE", "ROLE_RANK"),
    *("ROLE_NAME", "ROLE_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID"),
    *("TORCHELASTIC_RESTART_COUNT", "TORCHELASTIC_MAX_RESTARTS", "TORCHELASTIC_USE_AGENT_STORE"),
    *("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV"),
)
"""Variables that are about our processes: a server that sees them takes itself for one of our ranks."""


def environment_of(kind: str, python: str | None, variable: str, directory: str, target: str) -> str:
    """The interpreter of a server's own environment.

    Args:
        kind: what messages call the server.
        python: `rollout.engine_args.python`, if it was set.
        variable: environment variable that names the interpreter too.
        directory: of the environment, beside the project, such as `.venv-sglang`.
        target: make's target that creates it.

    Raises:
        ValueError: there is none; the text says how to make it.
    """
    project = Path(__file__).parents[3]  # of a checkout
    places = [Path.cwd() / directory / "bin/python", project / directory / "bin/python"]
    named = python or os.environ.get(variable)
    tried = [Path(named)] if named else list(dict.fromkeys(places))
    for path in tried:
        if os.access(path, os.X_OK):
            return str(path.absolute())  # not resolved: a link to an interpreter is what makes an environment
    raise ValueError(
        f"{kind} lives in an environment of its own, and there is none at {' or '.join(map(str, tried))}: make it by "
        f"`make {target}`, or name its interpreter by rollout.engine_args.python or ${variable}"
    )


@dataclass(frozen=True, slots=True)
class Watch:
    """How a server is watched, and started again; see `Child`."""

    health_interval: float = 10.0
    health_deadline: float = 60.0
    backoff: tuple[float, float, float] = (0.5, 2.0, 30.0)


class ServerChild:
    """A server that is kept running.

    Args:
        server: its kind.
        model: directory of the model's files.
        name: what messages and logs call it.
        prepare: awaited with every new life's connection once it is up, before anybody may use it.
        busy: whether something other than answers goes on with the server, which then need not be asked for its health.
        settings: how the server is kept.
        log: file that its output is appended to; None keeps the last lines.
        watch: how it is watched.
    """

    def __init__(
        self,
        server: Server,
        model: Path,
        name: str,
        prepare: Callable[[Http], Awaitable[None]],
        busy: Callable[[], bool],
        settings: ServerSettings,
        *,
        log: Path | None = None,
        watch: Watch = Watch(),
    ) -> None:
        self.server, self._prepare, self._busy = server, prepare, busy
        host, port = free_address()
        self.http = Http(f"http://{host}:{port}", server.kind, silence=settings.silence)
        self._prepared: int | None = None  # process id of the life that has its weights
        self._scratch = OwnDirectory("server")  # of its sockets, which it leaves behind when killed
        environment: Mapping[str, str | None] = {
            **dict.fromkeys(_TORCHRUN),
            "TMPDIR": str(self._scratch.path),
            **server.environment(),
        }
        self.child = Child(
            server.command(model, host, port),
            name=name,
            env=environment,
            health=self._healthy,
            start_deadline=settings.start_deadline,
            health_interval=watch.health_interval,
            health_deadline=watch.health_deadline,
            max_restarts=settings.max_restarts,
            backoff=watch.backoff,
            stop_deadline=0.0,  # it has nothing to save, and some take long to find that out
            log=log,
        )

    async def start(self) -> None:
        """Start it, and wait until it is up.

        Raises:
            ChildDied: it ended or was not up in time; with the end of its log.
        """
        try:
            with work(f"starting {self.server.kind}"):
                await self.child.start()
        except BaseException:
            await self.stop()
            raise

    async def up(self) -> None:
        """Wait until it is up and has its weights. Raises `ChildDied` if it is not started again."""
        await self.child.ready()

    async def after(self, lost: Lost, pause: float) -> None:
        """Wait until it is up after a request was lost: until the next life, if this one ends within `pause` seconds;
        otherwise it lives, and failed that request alone.

        Raises:
            ChildDied: there is no next life.
        """
        try:
            await self.child.after_fault(pause)
        except ChildDied as died:
            died.__cause__ = died.__cause__ or lost
            raise

    async def restart(self) -> None:
        """Replace the process, which hangs or holds what nobody wants."""
        await self.child.restart()

    async def stop(self) -> None:
        """End the process, and let go of the connections."""
        await self.child.stop()
        await self.http.close()
        self.server.close()
        self._scratch.remove()

    async def _healthy(self, child: Child) -> bool:
        pid = child.pid
        if pid is None:
            return False
        if pid != self._prepared:
            await self.server.greet(self.http)
            await self._prepare(self.http)
            self._prepared = pid
        elif not self._busy():
            await self.server.healthy(self.http)
        return True
