"""`rlinf.Session`: a model that answers and learns, driven by a program of one's own.

In: settings, then tasks, conversations and groups. Out: metrics, checkpoints and a report, as of a configured run. Who
wakes whom: the program's calls wake the roles; their replies wake the program.

    async with rlinf.Session.local(model="m/qwen2", algorithm="grpo", lr=1e-6, run_dir="outputs/x") as s:
        for step in range(100):
            print(await s.train(s.gather(games, episode, n=8)))

What a session or a run from Python begins with: settings and objects in memory, made into a checked configuration.

In: what a program passed, sorted by `Objects`. Out: the configuration, with what it names imported, and the run's
directory, in which models and tokenizers that were objects are saved once, to be used by path. Nothing of an earlier
run is moved aside before everything was checked.

The training loop of a session: steps as the user's program takes them, in place of a flow's.

In: what surrounds a step, from `TextLoop`. Out: the same files as of a configured run. What differs: nobody knows how
many steps there will be unless it was said, problems are optional, and checkpoints keep the program's own state.
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import sys
from collections.abc import Generator, Mapping
from contextlib import AsyncExitStack, ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rlinf.agents.arguments import Awaited, WrongType, plainly
from rlinf.agents.episodes import Play
from rlinf.config.learning import SUPERVISED
from rlinf.config.load import ConfigError, InputError, Problem, RunFailure
from rlinf.config.text import RunConfig
from rlinf.data.datasets.source import DataError, Source
from rlinf.data.sample import Evaluation, Prompt
from rlinf.flows.session import Running, RunningSession
from rlinf.metrics.progress import shown
from rlinf.metrics.report import in_words
from rlinf.runs.dry_run.transformer import refuse_other_kind
from rlinf.runs.library.objects import Objects, configured, key_of, recipe_name
from rlinf.runs.library.online import Online
from rlinf.runs.prepare import InMemory, Prepared, prepare
from rlinf.runs.resume import beginning_anew, keeping_earlier_run
from rlinf.runs.start import checkpoint_to_resume, leaving_gpus, locked, open_run_directory
from rlinf.runs.text import TextLoop
from rlinf.runtime.base.errors import UserError
from rlinf.runtime.system.system import ActorSystem
from rlinf.runtime.system.torchrun import switching_often
from rlinf.storage.directory import Checkpoint, Lock, RunDirectory


@dataclass(frozen=True, slots=True)
class Given:
    """What a program passed."""

    objects: Objects
    """Models, data and rewards, by name or as objects."""
    settings: Mapping[str, Any]
    """For `configured`; they win over those of `objects`."""
    run_dir: Path
    """The directory of the run, absolute."""
    resume: str
    """`auto`, `never`, or the path of a run or checkpoint to go on from."""


@dataclass(frozen=True, slots=True)
class Opened:
    """A checked run that may begin."""

    config: RunConfig
    """What."""
    prepared: Prepared
    """What it names."""
    directory: RunDirectory
    """The run's."""
    begun: Checkpoint | None
    """Where to go on from."""
    memory: dict[int, int] | None
    """Bytes per device, if they are limited."""


def given(objects: Objects, settings: Mapping[str, Any], run_dir: Any, resume: Any) -> Given:
    """What a program passed, with its paths read.

    Args:
        objects, settings: see `Given`.
        run_dir: a path; None takes outputs/run.
        resume: see `Given`.

    Raises:
        ConfigError: one of the latter is no path.
    """
    run_dir = "outputs/run" if run_dir is None else run_dir
    paths = {"run_dir": (run_dir, "give a path"), "resume": (resume, "give 'auto', 'never', or the path of a run")}
    wrong = {name: each for name, each in paths.items() if not isinstance(each[0], str | os.PathLike)}
    if wrong:
        raise ConfigError([Problem(objects.who, name, *each) for name, each in wrong.items()])
    return Given(objects, settings, Path(run_dir).expanduser().absolute(), os.fspath(resume))


def opened(what: Given, hosts: int, lock: Lock | None, during: ExitStack | AsyncExitStack) -> Opened:
    """Check everything, then open the run's directory; blocking.

    Args:
        what: was passed.
        hosts: processes of the job.
        lock: this program's hold of the run directory.
        during: gets what holds as long as the run does: GPUs that are left alone, an earlier run that is moved back if
            this one fails before anything was measured.

    Raises:
        InputError: with every mistake; nothing was made.
    """
    objects, path = what.objects, what.run_dir
    try:
        begun = checkpoint_to_resume(what.resume, path)
    except InputError as error:
        raise InputError(f"{objects.who}: {str(error).replace('--resume ', 'resume=')}") from None
    again = begun is not None and begun.run == path.resolve()
    aside = path.with_name(f".{path.name}.objects")
    kept = {name for name in objects.to_save if again and (path / name).is_dir()}
    try:
        objects.sketch(aside)
        settings = {**objects.settings, **objects.models_in(aside), **what.settings}
        config = configured(path, settings, objects.who)
        during.enter_context(leaving_gpus(config))
        _check(config, objects.passed, objects.who)
        refuse_other_kind(config.placement)
        prepared = prepare(config, hosts, objects.passed)
        for name in ("path", "tokenizer"):
            place = getattr(config.model, name)
            setattr(config.model, name, place and place.replace(str(aside), str(path)))
        objects.save(aside, objects.to_save.keys() - kept)
        if begun is None and what.resume == "auto":
            sys.stdout.write(f"{beginning_anew(path).replace('--resume ', 'resume=')}\n")
        directory = open_run_directory(path, config, begun, lock, prepared.told)
        during.enter_context(keeping_earlier_run(directory))
        for name in objects.to_save.keys() - kept:
            (aside / name).replace(path / name)
    finally:
        shutil.rmtree(aside, ignore_errors=True)
    prepared = replace(prepared, model=prepared.model.replace(str(aside), str(path)))
    return Opened(prepared.config, prepared, directory, begun, prepared.placed.memory_of(hosts))


def _check(config: RunConfig, passed: InMemory, who: str) -> None:
    """What `validate` cannot see, because objects stand in place of names."""
    own = passed.train is not None or config.data.train is not None
    problems = []
    if config.evaluation.every and own and passed.evaluation is None and config.evaluation.data is None:
        advice = "there is nothing to evaluate on: pass evaluation too"
        problems.append(Problem(who, "evaluation.every", config.evaluation.every, advice))
    if own and config.model.path is None and config.model.tokenizer is None:
        text = "a new model needs one: a directory, or {'characters': '0123456789'}"
        problems.append(Problem(who, "tokenizer", None, text))
    if problems:
        raise ConfigError(problems)


async def taken_by_the_program(step: Any, session: Any = None, **roles: Any) -> dict[str, float]:
    """Stands where a configured run has its flow."""
    raise UserError("session: its steps are taken by session.train, and by nobody else")


def no_problems() -> Any:
    """Stands where a configured run has its problems."""
    return iter(())


class SessionLoop(TextLoop):
    """What surrounds the steps of a session.

    Args:
        system, config, prepared, directory: see `TrainingLoop`.
        steps: how many there will be; None: the program decides.
        state: the program's own, kept by checkpoints as JSON.
    """

    def __init__(
        self,
        system: ActorSystem,
        config: RunConfig,
        prepared: Prepared,
        directory: RunDirectory,
        *,
        steps: int | None,
        state: dict[str, Any],
    ) -> None:
        super().__init__(system, config, prepared, directory)
        self.steps, self.state = steps, state
        self.notes = tuple(each for each in self.notes if not each.startswith(f"{no_problems.__name__}:"))
        self._saved = self._evaluated = 0  # after which step

    def queue(self) -> dict[str, Any]:
        try:
            json.dumps(self.state)
        except (TypeError, ValueError) as error:
            raise UserError(f"session.state cannot be kept by a checkpoint: {error}; put JSON values into it") from None
        return {**super().queue(), "state": self.state}

    async def restore(self, begun: Checkpoint) -> None:
        await super().restore(begun)
        state: Any = begun.queue.get("state", {})
        self.state.update(state)
        self._saved = self._evaluated = begun.step

    async def save(self, position: Mapping[str, Any] | None = None) -> None:
        await super().save(position)
        self._saved = self.done

    def evaluated(self, found: Any) -> dict[str, float]:
        self._evaluated = self.done
        return super().evaluated(found)

    async def ends(self) -> None:
        """Evaluate and save what the last steps came to, as the last step of a configured run does."""
        if self._evaluated < self.done and (found := await self.evaluate()) is not None:
            self.recorder.write(self.done, self.evaluated(found))
        if self._saved < self.done:
            await self.save()


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
    if (name := recipe_name(algorithm)) in SUPERVISED:
        text = f"it learns from given texts, and nothing is played: use rlinf.train(model, data=…, algorithm={name!r})"
        raise ConfigError([Problem(who, "algorithm", name, text)])
