"""`rlinf.Session`: a model that answers and learns, driven by a program of one's own.

In: settings, then tasks, conversations and groups. Out: metrics, checkpoints and a report, as of a configured run. Who
wakes whom: the program's calls wake the roles; their replies wake the program.

    async with rlinf.Session.local(model="m/qwen2", algorithm="grpo", lr=1e-6, run_dir="outputs/x") as s:
        for step in range(100):
            print(await s.train(s.gather(games, episode, n=8)))

`s.online(…)` goes on serving while it learns from what people say of its answers: the reward that completes a batch
wakes the learner, which trains one step and publishes the weights. Answers that are being given meanwhile go on by the
new ones, and each token knows its version.

    async with s.online(batch=64) as service:
        answer = await service.complete([{"role": "user", "content": "Dear all,"}])
        ...                                         # shown to a person, for as long as it takes
        service.feedback(answer.id, 1.0)            # accepted
"""

from __future__ import annotations

import asyncio
from collections.abc import Generator, Mapping
from contextlib import AsyncExitStack
from dataclasses import dataclass, fields, replace
from functools import partial
from pathlib import Path
from typing import Any

from rlinf.agents.agent import AgentLLM
from rlinf.agents.arguments import Awaited, WrongType, plainly
from rlinf.agents.chat import are_messages
from rlinf.agents.episodes import Play
from rlinf.agents.feedback import Counts, Feedback
from rlinf.agents.llm import Reply
from rlinf.config.learning import SUPERVISED
from rlinf.config.load import ConfigError, InputError, Problem, RunFailure
from rlinf.data.datasets.source import DataError, Source
from rlinf.data.sample import Evaluation, Prompt
from rlinf.flows.session import Running, RunSession
from rlinf.metrics.progress import progress_bars
from rlinf.metrics.report import in_words
from rlinf.runs.library.objects import Objects, key_of, recipe_name
from rlinf.runs.library.opening import Arguments, Call, arguments_of, opened
from rlinf.runs.loop import TrainingLoop
from rlinf.runs.start import locked
from rlinf.runs.text import TextWorkload
from rlinf.runtime.base.errors import UserError
from rlinf.runtime.base.tasks import cancel_all
from rlinf.runtime.system.system import ActorSystem
from rlinf.runtime.system.torchrun import switching_often
from rlinf.training.optimizer import Adam


async def program_steps(step: Any, session: Any = None, **roles: Any) -> dict[str, float]:
    """Stands where a configured run has its flow."""
    raise UserError("session: its steps are taken by session.train, and by nobody else")


def no_problems() -> Any:
    """Stands where a configured run has its problems."""
    return iter(())


AFTER_STOP = (
    *("step", "checkpoint", "checkpointed", "evaluate", "publish", "stopped"),
    *("tokenizer", "rollout", "trainer", "judge"),
)
"""Calls that a session still takes after it was told to end."""


class SessionStopped(UserError):
    """The session was told to end; raised by whatever would begin a further step. Its `async with` block ends by it in
    order, and the program goes on behind the block."""


class Session(RunSession):
    """Conversations, episodes and training, with a run directory of their own; `Session.local(…)` makes one."""

    def __init__(self, what: Arguments, system: ActorSystem | None, steps: int | None, *, judges: bool) -> None:
        self._arguments, self._system, self._steps, self._judges = what, system, steps, judges
        self._stack = AsyncExitStack()
        self._loop: TrainingLoop | None = None
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
        arguments = {"model": model, "tokenizer": tokenizer, "algorithm": algorithm, "rewards": rewards}
        arguments |= {"data": data, "evaluation": evaluation, "run_dir": run_dir, "resume": resume}
        return _new_session("Session.local", None, Call.of(**arguments, **settings))

    @staticmethod
    def connect(system: ActorSystem, **arguments: Any) -> Session:
        """A session on the processes of `rlinf.run(main)`, with roles where `placement` says.

            async def main(system):
                async with rlinf.Session.connect(system, model="m/qwen2", placement={"trainer": "0-1"}) as s: …

            rlinf.run(main)         # torchrun --nproc-per-node 2 script.py

        Args:
            system: what `main` is given.
            arguments: see `local`.

        Raises:
            TypeError: no system.
            InputError: when it is opened.
        """
        if not isinstance(system, ActorSystem):
            raise WrongType(
                f"Session.connect: {system!r} is no ActorSystem; call it in `async def main(system)` of rlinf.run"
            )
        return _new_session("Session.connect", system, Call.of(**arguments))

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
        what = self._arguments
        stack.enter_context(progress_bars())
        lock = stack.enter_context(locked(what.run_dir, what.objects.who))
        hosts = 1 if self._system is None else self._system.hosts
        run = await asyncio.to_thread(opened, what, hosts, lock, stack)
        system = self._system
        if system is None:
            stack.enter_context(switching_often())
            system = await stack.enter_async_context(ActorSystem.local(hosts, device_memory=run.memory))
        make = partial(TextWorkload, program=self.state)
        loop = await asyncio.to_thread(TrainingLoop, system, run.config, run.plan, run.directory, make)
        loop.state.steps, workload = self._steps, loop.workload
        assert isinstance(workload, TextWorkload)
        workload.notes = [each for each in workload.notes if not each.startswith(f"{no_problems.__name__}:")]
        try:
            await stack.enter_async_context(loop.started(run.checkpoint))
        except DataError as error:
            raise InputError(str(error)) from error
        stack.push_async_exit(self._complete)
        self._loop, self._workload, self._entered = loop, workload, system
        self._resumed_at = 0 if run.checkpoint is None else run.checkpoint.step
        self._attach(workload.running(judges=self._judges))
        loop.step_begins()

    async def _complete(self, kind: type[BaseException] | None, *_: object) -> None:
        """Evaluate and save what the last steps came to, as the last step of a configured run does."""
        loop = self._loop
        if kind is not None or loop is None:
            return
        state = loop.state
        if max(state.evaluated_at or 0, self._resumed_at) < state.done and (metrics := await loop.evaluate()):
            state.recorder.write(state.done, metrics)
        if (state.saved_at or 0) < state.done:
            await loop.saver.save()

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
        run = None if self._loop is None else self._loop.state
        if run is not None and run.stopped is not None and run.over and call not in AFTER_STOP:
            raise SessionStopped(f"session.{call}: the session was told to end after step {run.done}: {run.stopped}")
        self._entered.enter()
        return self._running

    # The run ----------------------------------------------------------------------------------------------------

    @property
    def step(self) -> int:
        """Steps taken, those before a resume included."""
        return self._here("step").state.done

    @property
    def stopped(self) -> str | None:
        """Why it was told to end, by its live page or a callback; None: it was not. What would begin a further step
        then raises `SessionStopped`."""
        return self._here("stopped").state.stopped

    @property
    def run_dir(self) -> Path:
        """Where results are."""
        return self._arguments.run_dir

    @property
    def checkpointed(self) -> bool:
        """There is a checkpoint to go on from."""
        return self._here("checkpointed").state.directory.latest.exists()

    def _here(self, call: str) -> TrainingLoop:
        self._open(call)
        assert self._loop is not None  # it is open
        return self._loop

    async def draw(self, count: int) -> list[Prompt]:
        """The next problems of the session's `data`; where it is, checkpoints keep.

        Raises:
            UserError: the session has no data.
        """
        self._open("draw")
        if self._arguments.objects.passed.train is no_problems:
            raise UserError("session.draw: the session has no problems; give it data=…")
        return await self._workload.tasks(count)

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

    async def _train(self, groups: Any, publish: bool, extra: Mapping[str, float]) -> Mapping[str, float]:
        loop = self._here("train")
        if self._learning:
            raise UserError("session.train: a step is under way; await it before the next one")
        self._learning = True
        try:
            learned = await self._learn(groups, publish)
            metrics = await loop.step_ended({**learned, **extra})
            await loop.live.controls.between_steps()
        except self._workload.failures as error:
            raise RunFailure(f"step {loop.state.done + 1}: {error}") from error
        finally:
            self._learning = False
            loop.step_begins()
        return metrics

    async def _optim_step(self, adam: Adam) -> Mapping[str, float]:
        loop = self._here("optim_step")
        try:
            metrics = await loop.step_ended(await super()._optim_step(adam))
            await loop.live.controls.between_steps()
        except self._workload.failures as error:
            raise RunFailure(f"step {loop.state.done + 1}: {error}") from error
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
            await loop.saver.save()
            await loop.saver.files.finish()
        return loop.state.directory.latest.resolve()

    def evaluate(
        self, tasks: Any = None, episode: Play | None = None, n: int = 1, **sampling: Any
    ) -> Awaited[Evaluation]:
        """How good the model is now; await it. Written into metrics.jsonl and told.

        Args:
            tasks: prompts, or with an episode anything; None takes the session's `evaluation`.
            episode, n, sampling: see `RunSession.evaluate`.
        """
        state = self._here("evaluate").state
        if tasks is None and not self._workload.data.held_out:
            raise UserError(
                "session.evaluate: there is nothing to evaluate on; pass tasks, or give the session evaluation=…"
            )
        playing = None if tasks is None else super().evaluate(tasks, episode, n, **sampling)

        async def noted() -> Evaluation:
            evaluation = await self._workload.evaluate() if playing is None else await playing
            assert evaluation is not None  # there is something to evaluate on
            temperature = float(sampling.get("temperature", self._workload.config.evaluation.temperature))
            state.report.line(f"evaluation after step {state.done}: {in_words(evaluation, temperature)}")
            state.recorder.samples(state.done, self._workload.describe(evaluation).answers)
            state.recorder.write(state.done, {f"evaluation/{key}": value for key, value in evaluation.metrics.items()})
            return evaluation

        return Awaited(noted(), "session.evaluate(…)")


def _new_session(who: str, system: ActorSystem | None, call: Call) -> Session:
    """A session that is not open yet.

    Args:
        who: the call, for errors.
        system: of `connect`.
        call: its arguments.
    """
    _refuse_given_texts(who, call.algorithm)
    objects, settings = Objects(who), call.settings
    if call.model is not None or not any(key_of(name) in ("model", "model.path", "model.config") for name in settings):
        objects.take_model(call.model)
    objects.take_tokenizer(call.tokenizer, call.model)
    objects.take_data(call.data, call.evaluation)
    objects.take_rewards(call.rewards)
    if call.data is None:
        objects.passed = replace(objects.passed, train=no_problems)
    objects.passed = replace(objects.passed, flow=program_steps)
    steps = settings.get("steps")
    if steps is None and settings.get("schedule", "constant") != "constant":
        text = "a learning rate that falls needs to know how many steps there will be; set steps too"
        raise ConfigError([Problem(who, "schedule", settings["schedule"], text)])
    settings = {"algorithm": objects.take_algorithm(call.algorithm), **settings}
    arguments = arguments_of(objects, settings, call.run_dir, call.resume)
    return Session(arguments, system, steps, judges=call.rewards is not None)


def _refuse_given_texts(who: str, algorithm: Any) -> None:
    """Say what trains on given texts, where nothing is played.

    Raises:
        ConfigError: the algorithm is one of those.
    """
    if (name := recipe_name(algorithm)) in SUPERVISED:
        text = f"it learns from given texts, and nothing is played: use rlinf.train(model, data=…, algorithm={name!r})"
        raise ConfigError([Problem(who, "algorithm", name, text)])


# Serving and learning at the same time --------------------------------------------------------------------------------

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
        """Take a person's judgement of an answer, however late; the first one counts.

        Args:
            id: of the answer.
            reward: the higher the better, such as 1 for accepted and 0 for rejected.

        Returns:
            Whether there is such an answer without a reward. One that is too old by then (`max_age`) is counted and
            not learned from.
        """
        return self._opened("feedback").record_reward(id, reward)

    @property
    def counts(self) -> Counts:
        """Counts of answers, and of feedback on them."""
        return self._opened("counts").counts

    @property
    def waiting(self) -> int:
        """Answers that wait for a reward."""
        return self._opened("waiting").waiting

    def _opened(self, call: str) -> Feedback:
        """The feedback under way; the learner's failure is the caller's too.

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
            metrics: Mapping[str, float] = {**feedback.counts.metrics(), "online/waiting": float(feedback.waiting)}
            self._training = True
            try:
                await session.train([*groups.values()], metrics=metrics)
            finally:
                self._training = False
