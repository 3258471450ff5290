"""`rlinf.Session`: a model that answers and learns, driven by a program of one's own.

In: settings, then tasks, conversations and groups. Out: metrics, checkpoints and a report, as of a configured run. Who
wakes whom: the program's calls wake the roles; their replies wake the program.

    async with rlinf.Session.local(model="m/qwen2", algorithm="grpo", lr=1e-6, run_dir="outputs/x") as s:
        for step in range(100):
            print(await s.train(s.gather(games, episode, n=8)))
"""

from __future__ import annotations

import asyncio
from collections.abc import Generator, Mapping
from contextlib import AsyncExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

from rlinf.agents.awaited import Awaited, plainly
from rlinf.agents.checks import WrongType
from rlinf.agents.episodes import Play
from rlinf.config.loading import ConfigError, InputError, Problem, RunFailure
from rlinf.config.supervised import SUPERVISED
from rlinf.data.datasets.rows import DataError
from rlinf.data.datasets.sources import Source
from rlinf.data.sample import Evaluation, Prompt
from rlinf.flows.parts.answering import Running
from rlinf.flows.parts.running_session import RunningSession
from rlinf.job.start import locked
from rlinf.metrics.console.answers import in_words
from rlinf.metrics.console.progress import shown
from rlinf.runtime.base.errors import UserError
from rlinf.runtime.system.system import ActorSystem
from rlinf.runtime.system.torchrun import switching_often
from rlinf.session.configure import key_of, name_of
from rlinf.session.loop import SessionLoop, no_problems, taken_by_the_program
from rlinf.session.objects import Objects
from rlinf.session.online import Online
from rlinf.session.opening import Given, given, opened

AFTER_STOP = (
    *("step", "checkpoint", "checkpointed", "evaluate", "publish", "stopped"),
    *("tokenizer", "rollout", "trainer", "judge"),
)
"""What a session that was told to end still does."""


class SessionStopped(UserError):
    """The session was told to end; raised by whatever would begin a further step. Its `async with` block ends by it in
    order, and the program goes on behind the block."""


class Session(RunningSession):
    """Conversations, episodes and training, with a run directory of their own; `Session.local(…)` makes one."""

    def __init__(self, what: Given, system: ActorSystem | None, steps: int | None, *, judges: bool) -> None:
        self._given, self._system, self._steps, self._judges = what, system, steps, judges
        self._stack = AsyncExitStack()
        self._loop: SessionLoop | None = None
        self._phase = "new"
        self._learning = False
        self.state: dict[str, Any] = {}
        """The program's own, as JSON values: checkpoints keep it, and `resume="auto"` brings it back."""

    # Opening ----------------------------------------------------------------------------------------------------

    @staticmethod
    def local(
        *,
        model: Any = None,
        tokenizer: Any = None,
        algorithm: Any = "grpo",
        run_dir: str | Path | None = None,
        rewards: Any = None,
        data: Source | None = None,
        evaluation: Source | None = None,
        resume: str = "never",
        **settings: Any,
    ) -> Session:
        """A session in this process, for scripts and notebooks.

        Open it by `async with Session.local(…) as s:`, or by `s = await Session.local(…)` and, at the end,
        `await s.close()`.

        Args:
            model: a directory or hub name; the configuration of a new model, such as `{"model_type": "qwen2", …}`; or a
                transformers model, which is saved into the run's directory and not changed.
            tokenizer: a directory or hub name, `{"characters": "0123456789"}`, or a tokenizer; None takes the model's.
            algorithm: a recipe's name, or a mapping of keys of the section `algorithm`.
            run_dir: where results go; None takes outputs/run. An earlier run there is moved aside unless it is resumed.
            rewards: a reward function, several in a list, or several by name; None: episodes give the rewards. They
                run in processes of their own, with a deadline, and what a notebook or script defines itself goes there
                as a copy; only what cannot be copied runs in this process, which is said.
            data: problems to draw from, by `draw`.
            evaluation: problems that are answered before the first step, at the end, and after every `every` steps.
            resume: `never`; `auto` goes on from the newest checkpoint in run_dir if there is one; or a path.
            settings: keys of a configuration by name: `lr=1e-6`, `max_new_tokens=64`, `group_size=8`,
                `checkpoint={"every": 20}`; see docs/config.md.

        Raises:
            InputError: when it is opened: everything that is wrong with these.
        """
        return _made(
            "Session.local", None, model, tokenizer, algorithm, run_dir, rewards, data, evaluation, resume, settings
        )

    @staticmethod
    def connect(
        system: ActorSystem,
        *,
        model: Any = None,
        tokenizer: Any = None,
        algorithm: Any = "grpo",
        run_dir: str | Path | None = None,
        rewards: Any = None,
        data: Source | None = None,
        evaluation: Source | None = None,
        resume: str = "never",
        **settings: Any,
    ) -> Session:
        """A session on the processes of `rlinf.run(main)`, with roles where `placement` says.

            async def main(system):
                async with rlinf.Session.connect(system, model="m/qwen2", placement={"trainer": "0-1"}) as s: …

            rlinf.run(main)         # torchrun --nproc-per-node 2 script.py

        Args:
            system: what `main` is given.
            model, tokenizer, algorithm, run_dir, rewards, data, evaluation, resume, settings: see `local`.

        Raises:
            TypeError: no system.
            InputError: when it is opened.
        """
        if not isinstance(system, ActorSystem):
            raise WrongType(
                f"Session.connect: {system!r} is no ActorSystem; call it in `async def main(system)` of rlinf.run"
            )
        return _made(
            "Session.connect", system, model, tokenizer, algorithm, run_dir, rewards, data, evaluation, resume, settings
        )

    async def __aenter__(self) -> Session:
        if self._phase != "new":
            raise UserError("session: it was opened before; make another one by Session.local(…)")
        self._phase = "opening"
        with plainly():
            async with AsyncExitStack() as stack:
                await self._start(stack)
                self._stack = stack.pop_all()
        self._phase = "open"
        return self

    async def __aexit__(self, *exception: Any) -> bool | None:
        if self._phase != "open":
            return None
        self._phase = "closed"
        if isinstance(exception[1], SessionStopped):
            await self._stack.__aexit__(None, None, None)
            return True
        return await self._stack.__aexit__(*exception)

    def __await__(self) -> Generator[Any, Any, Session]:
        return self.__aenter__().__await__()

    async def close(self) -> None:
        """Write what is left to be written, and end the roles; for sessions that were opened by `await`."""
        await self.__aexit__(None, None, None)

    def __enter__(self) -> Any:
        raise UserError("with Session.local(…): write `async with rlinf.Session.local(…) as s:`")

    def __exit__(self, *exception: object) -> None:
        """Never comes to be called."""

    async def _start(self, stack: AsyncExitStack) -> None:
        what = self._given
        stack.enter_context(shown())
        lock = stack.enter_context(locked(what.run_dir, what.objects.who))
        hosts = 1 if self._system is None else self._system.hosts
        run = await asyncio.to_thread(opened, what, hosts, lock, stack)
        system = self._system
        if system is None:
            stack.enter_context(switching_often())
            system = await stack.enter_async_context(ActorSystem.local(hosts, device_memory=run.memory))
        loop = await asyncio.to_thread(
            SessionLoop, system, run.config, run.prepared, run.directory, steps=self._steps, state=self.state
        )
        try:
            await stack.enter_async_context(loop.started(run.begun))
        except DataError as error:
            raise InputError(str(error)) from error
        self._loop, self._entered = loop, system
        self._begin_with(loop.running(judges=self._judges))
        loop.step_begins()

    def _open(self, call: str) -> Running:
        if self._phase in ("new", "opening"):
            raise UserError(
                f"session.{call}: the session is not open; write `async with rlinf.Session.local(…) as s:`, or "
                "`s = await rlinf.Session.local(…)`"
            )
        if self._phase == "closed":
            raise UserError(
                f"session.{call}: the session is closed; call it inside its `async with`, or open another one: "
                'Session.local(…, resume="auto") goes on with the same run'
            )
        loop = self._loop
        if loop is not None and loop.stopped is not None and loop.over and call not in AFTER_STOP:
            raise SessionStopped(f"session.{call}: the session was told to end after step {loop.done}: {loop.stopped}")
        self._entered.enter()
        return self._running

    # The run ----------------------------------------------------------------------------------------------------

    @property
    def step(self) -> int:
        """Steps taken, those before a resume included."""
        return self._here("step").done

    @property
    def stopped(self) -> str | None:
        """Why it was told to end, by its live page or a callback; None: it was not. What would begin a further step
        then raises `SessionStopped`."""
        return self._here("stopped").stopped

    @property
    def run_dir(self) -> Path:
        """Where results are."""
        return self._given.run_dir

    @property
    def checkpointed(self) -> bool:
        """There is a checkpoint to go on from."""
        return self._here("checkpointed").directory.latest.exists()

    def _here(self, call: str) -> SessionLoop:
        self._open(call)
        assert self._loop is not None  # it is open
        return self._loop

    async def draw(self, count: int) -> list[Prompt]:
        """The next problems of the session's `data`; where it is, checkpoints keep.

        Raises:
            UserError: the session has no data.
        """
        loop = self._here("draw")
        if self._given.objects.passed.train is no_problems:
            raise UserError("session.draw: the session has no problems; give it data=…")
        return list(await loop.data.train.draw(count))

    def online(self, *, batch: int = 64, max_age: int = 4, keep: int = 10_000) -> Online:
        """Serve answers and learn from what people say of them, however late: `async with s.online() as service:`.

        Args:
            batch: answers of a step, at least; up to four times as many where more wait to be learned from.
            max_age: answers are learned from if the policy has taken at most so many steps since; others are counted.
            keep: answers that wait for feedback; the oldest is forgotten for one more.

        Raises:
            TypeError, ValueError: a bound that cannot be.
        """
        return Online(self, batch, max_age, keep)

    async def _train(self, groups: Any, publish: bool, told: Mapping[str, float]) -> Mapping[str, float]:
        loop = self._here("train")
        if self._learning:
            raise UserError("session.train: a step is under way; await it before the next one")
        self._learning = True
        try:
            learned = await self._learn(groups, publish)
            metrics = await loop.step_ended({**learned, **told})
            await loop.live.controls.between_steps()
        except loop.failures as error:
            raise RunFailure(f"step {loop.done + 1}: {error}") from error
        finally:
            self._learning = False
            loop.step_begins()
        return metrics

    async def checkpoint(self) -> Path:
        """Write a checkpoint of this moment, besides those that `checkpoint.every` asks for.

        Returns:
            Its directory: `hf/` in it is for transformers' from_pretrained.

        Raises:
            RunFailure: it cannot be written.
            UserError: `state` is not JSON.
        """
        loop = self._here("checkpoint")
        with plainly():
            await loop.save()
            await loop.checkpoints.finish()
        return loop.directory.latest.resolve()

    def evaluate(
        self, tasks: Any = None, episode: Play | None = None, n: int = 1, **sampling: Any
    ) -> Awaited[Evaluation]:
        """How good the model is now; await it. Written into metrics.jsonl and told.

        Args:
            tasks: prompts, or with an episode anything; None takes the session's `evaluation`.
            episode, n, sampling: see `RunningSession.evaluate`.
        """
        loop = self._here("evaluate")
        if tasks is None and not loop.data.held_out:
            raise UserError(
                "session.evaluate: there is nothing to evaluate on; pass tasks, or give the session evaluation=…"
            )
        playing = None if tasks is None else super().evaluate(tasks, episode, n, **sampling)

        async def noted() -> Evaluation:
            found = await loop.evaluate() if playing is None else await playing
            assert found is not None  # there is something to evaluate on
            temperature = float(sampling.get("temperature", loop.config.evaluation.temperature))
            loop.report.line(f"evaluation after step {loop.done}: {in_words(found, temperature)}")
            loop.recorder.samples(loop.done, loop.answers(found))
            loop.recorder.write(loop.done, {f"evaluation/{name}": value for name, value in found.metrics.items()})
            return found

        return Awaited(noted(), "session.evaluate(…)")


def _made(
    who: str,
    system: ActorSystem | None,
    model: Any,
    tokenizer: Any,
    algorithm: Any,
    run_dir: str | Path | None,
    rewards: Any,
    data: Source | None,
    evaluation: Source | None,
    resume: str,
    settings: dict[str, Any],
) -> Session:
    """A session that is not open yet."""
    _refuse_given_texts(who, algorithm)
    objects = Objects(who)
    if model is not None or not any(key_of(name) in ("model", "model.path", "model.config") for name in settings):
        objects.take_model(model)
    objects.take_tokenizer(tokenizer, model)
    objects.take_data(data, evaluation)
    objects.take_rewards(rewards)
    if data is None:
        objects.passed = replace(objects.passed, train=no_problems)
    objects.passed = replace(objects.passed, flow=taken_by_the_program)
    steps = settings.get("steps")
    if steps is None and settings.get("schedule", "constant") != "constant":
        text = "a learning rate that falls needs to know how many steps there will be; set steps too"
        raise ConfigError([Problem(who, "schedule", settings["schedule"], text)])
    what = given(objects, {"algorithm": objects.take_algorithm(algorithm), **settings}, run_dir, resume)
    return Session(what, system, steps, judges=rewards is not None)


def _refuse_given_texts(who: str, algorithm: Any) -> None:
    """Say what trains on given texts, where nothing is played.

    Raises:
        ConfigError: the algorithm is one of those.
    """
    if (name := name_of(algorithm)) in SUPERVISED:
        text = f"it learns from given texts, and nothing is played: use rlinf.train(model, data=…, algorithm={name!r})"
        raise ConfigError([Problem(who, "algorithm", name, text)])
