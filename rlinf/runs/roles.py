"""Roles of a run: those that every run has, those that a configuration names, teachers, and what its session knows.

In: a configuration and its flow; the class and the settings of each role, and where each runs. Out: a handle per role,
under the name by which a flow takes it, started on its hosts, saved into a checkpoint or restored from one; kinds for
the placement. Classes that are named are imported here. Whatever code that users name raises becomes a `Problem` on one
line, `key = value: reason`. Work in flight asks here for what a run's rollout and its agents have begun. Nobody is
woken; the run waits.
"""

from __future__ import annotations

import asyncio
import functools
import inspect
import traceback
from collections.abc import Awaitable, Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlinf.config.importing import RAISED, resolve
from rlinf.config.load import ConfigError, InputError, Problem
from rlinf.config.text import RunConfig
from rlinf.data.tokenizer import pretrained
from rlinf.flows.text import Teachers
from rlinf.models.language.truth import Way
from rlinf.placement.plan import GB
from rlinf.placement.seats import TEXT, Placed, RoleKind, own_kinds, teacher_kinds
from rlinf.runtime.actor.actor import Actor
from rlinf.runtime.base.progress import work
from rlinf.runtime.base.tasks import all_or_none
from rlinf.runtime.system.handles import ActorGroup
from rlinf.runtime.system.system import ActorSystem

if TYPE_CHECKING:  # which runs that act do without
    from transformers import PreTrainedTokenizerBase

    from rlinf.agents.agent import Agent
    from rlinf.flows.session import Running, RunSession

_OURS = str(Path(__file__).parents[1])
_LONGEST = 300
"""Characters of a reason: enough for a sentence of transformers, less than a printed tensor or configuration."""


@contextmanager
def naming(key: str, value: Any, doing: str = "") -> Iterator[None]:
    """Whatever goes wrong inside is a problem of this key.

    Args:
        key: dotted.
        value: what it has.
        doing: what is tried, such as "importing it".

    Raises:
        ConfigError: something went wrong. An `InputError` passes as it is, since it names its key already.
    """
    try:
        yield
    except InputError:
        raise
    except RAISED as error:
        raise ConfigError([problem(key, value, error, doing)]) from error


def problem(key: str, value: Any, error: BaseException, doing: str = "") -> Problem:
    """An exception as a problem of a key; see `naming`."""
    return Problem("configuration", key, value, f"{doing} failed: {reason(error)}" if doing else reason(error))


def reason(error: BaseException) -> str:
    """Format an exception on one line: with its type where the text alone says little, and with the place in the user's
    own code that raised it, if there is one."""
    while error.__cause__ is not None and type(error).__module__.startswith("huggingface_hub"):
        error = error.__cause__  # whose text says the same without a wrapper's heading
    text = " ".join(str(error).split())
    text = text if len(text) <= _LONGEST else f"{text[: _LONGEST - 3]}..."
    named = text if isinstance(error, ValueError | OSError) and text else f"{type(error).__name__}: {text}".rstrip(": ")
    return f"{named} ({place})" if (place := _own_place(error)) else named


def _own_place(error: BaseException) -> str | None:
    """Where the user's own code raised an exception; None if it was a library's, or Python's."""
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        if frame.filename.startswith((_OURS, "<")):
            return None
        if "-packages" in frame.filename or "/lib/python" in frame.filename:
            continue
        return f"{frame.filename}:{frame.lineno}, in {frame.name}"
    return None


def running_of(
    config: RunConfig,
    roles: Callable[[], Mapping[str, Any]],
    tokenizer: PreTrainedTokenizerBase,
    model: Any,
    agent: Agent | None,
    **more: Any,
) -> Running:
    """Gather the state of a run that a session on its roles needs.

    Args:
        config: of the run.
        roles: the roles as they are now.
        tokenizer: the model's.
        model: its transformers config.
        agent: what works on a task.
        more: further fields of `Running`.
    """
    from rlinf.engines.base import no_forms
    from rlinf.flows.session import Running
    from rlinf.models.language.sources import context_length

    limits = (context_length(model), config.rollout.max_tokens)
    return Running(
        roles,
        tokenizer,
        seed=config.seed,
        group_size=config.algorithm.group_size,
        temperature=config.rollout.temperature,
        max_new_tokens=config.rollout.max_new_tokens,
        longest=min((limit for limit in limits if limit is not None), default=None),
        vocabulary=getattr(model, "vocab_size", None),
        at_once=config.agent.at_once or config.rollout.max_rows * len(roles()["rollout"]),
        chat_args=config.data.chat_args,
        evaluation={name: getattr(config.evaluation, name) for name in ("temperature", "top_p", "max_new_tokens")},
        agent=agent,
        timeout=None if agent is None else config.agent.timeout,
        call_format=config.agent.call_format,
        no_forms=no_forms(config.rollout.engine, config.rollout.engine_args),
        **more,
    )


Roles = dict[str, ActorGroup]
"""By name: of a run on text `rollout`, `judge`, `trainer` and those that its algorithm needs; of a run of a policy that
acts `env`, `policy`, `trainer`, and `trials` where there are any."""
TRAINER, CRITIC, REFERENCE, REWARD_MODEL = "trainer", "critic", "reference", "reward_model"
WORLD_TRAINER = "world_trainer"


OWN = "roles"
"""Directory of the user's own roles in a checkpoint."""
ALWAYS = ("rollout", "judge", "trainer")
"""Roles of every run on text."""


@dataclass(frozen=True, slots=True)
class Role:
    """A role that is to be started."""

    actor: type[Actor]
    """Its class."""
    settings: Mapping[str, Any]
    """Arguments of its `setup`."""
    memory: tuple[int, int] = (0, 0)
    """Bytes on each of its devices while it is loaded, and while it is parked."""
    hosts: tuple[int, ...] | None = None
    """Where it runs if the placement does not know it."""
    lease_items: int | None = None
    """After so many items it offers devices that it shares, where the plan says nothing."""


async def spawn_roles(
    system: ActorSystem, placed: Placed, roles: Mapping[str, Role], tell: Callable[[str, Way], None] | None = None
) -> Roles:
    """Start roles, all or none of them.

    Args:
        system: where.
        placed: on which host and devices.
        roles: by name.
        tell: is told how roles compute, by name.

    Returns:
        Their handles, in the same order.
    """
    groups: Roles = {}

    async def spawn(names: Iterable[str]) -> None:
        for name in names:
            role = roles[name]
            where: dict[str, Any] = {"hosts": role.hosts}
            if role.hosts is None:
                where = placed.spawning(name, *role.memory)
            if role.lease_items is not None and "devices" in where:
                where.setdefault("lease_items", role.lease_items)
            group = groups[name] = await system.spawn(role.actor, name=name, **where, **role.settings)
            if tell is not None and "computes" in group.endpoints:
                tell(name, await group[0].computes())
            starting.advance()

    # Each of these makes its model on all its ranks together, with a lock held in every process: two at once could wait
    # for each other for ever, one on each of two hosts.
    from rlinf.actors.base import SpmdActor  # what computes takes seconds to import

    joint = [name for name, role in roles.items() if issubclass(role.actor, SpmdActor)]
    with work("starting", len(roles), "roles") as starting:
        await all_or_none([spawn(joint), *(spawn([name]) for name in roles if name not in joint)])
    return {name: groups[name] for name in roles}


def save_roles(
    roles: Mapping[str, ActorGroup], directory: Path, moving_reference: bool = False, own: Collection[str] = ()
) -> Awaitable[Any]:
    """Begin to write what changes from step to step; every role is called before this returns.

    Args:
        roles: running; those that have nothing to keep are passed over.
        directory: of the checkpoint.
        moving_reference: the reference policy is not the same in every step.
        own: names of the user's own; each process of those with an endpoint `save` writes into a directory of its own.
    """
    calls = []
    if TRAINER in roles:
        calls.append(roles[TRAINER].save(str(directory)))
    for learner in (CRITIC, WORLD_TRAINER):
        if learner in roles:
            calls.append(roles[learner].save(str(directory / learner)))
    if REFERENCE in roles and moving_reference:
        calls.append(roles[REFERENCE][0].save(str(directory / REFERENCE)))
    return asyncio.gather(*calls, save_own(roles, directory, own))


def save_own(roles: Mapping[str, ActorGroup], directory: Path, own: Collection[str]) -> asyncio.Future[Any]:
    """Begin to write what the user's own roles keep; every role is called before this returns. Arguments are those of
    `save_roles`."""
    savers = [(name, roles[name]) for name in own if name in roles and "save" in roles[name].endpoints]
    return asyncio.gather(
        *(ref.save(str(directory / OWN / name / str(rank))) for name, group in savers for rank, ref in enumerate(group))
    )


async def restore_roles(
    roles: Mapping[str, ActorGroup],
    checkpoint: Path,
    run: Path,
    into: Path | None = None,
    own: Collection[str] = (),
) -> None:
    """Take over what `save_roles` wrote; whoever generates still has to be handed the trainer's weights.

    Args:
        roles: running, as new; those that have nothing to restore are passed over.
        checkpoint: its directory.
        run: the directory of the run that wrote it.
        into: the directory of the run that goes on: if that is another, it keeps the frozen reference too, which its
            own checkpoints do not have.
        own: names of the user's own; those with an endpoint `restore` get back what `save` wrote. Of n processes that
            wrote, process r reads what r mod n wrote; a role that the checkpoint does not know starts as new.

    Raises:
        FileNotFoundError: a role's part is missing.
        ValueError: a part does not fit, or is damaged.
    """
    if TRAINER in roles:
        await roles[TRAINER].restore(str(checkpoint / "state"))
    for learner in (CRITIC, WORLD_TRAINER):
        if learner in roles:
            await roles[learner].restore(str(checkpoint / learner))
    if REFERENCE in roles:
        places = [place / REFERENCE for place in (checkpoint, run) if (place / REFERENCE).exists()]
        if places:
            await roles[REFERENCE].restore(str(places[0]))
            if into is not None and not await asyncio.to_thread((into / REFERENCE).exists):
                await roles[REFERENCE][0].save(str(into / REFERENCE))
    await restore_own(roles, checkpoint, own)


async def restore_own(roles: Mapping[str, ActorGroup], checkpoint: Path, own: Collection[str]) -> None:
    """Have the user's own roles take over what `save_own` wrote. Arguments are those of `restore_roles`."""
    for name in own:
        if name in roles and "restore" in roles[name].endpoints:
            wrote = len(list((checkpoint / OWN / name).glob("*")))
            places = [str(checkpoint / OWN / name / str(rank % wrote)) for rank in range(len(roles[name])) if wrote]
            await asyncio.gather(*(ref.restore(place) for ref, place in zip(roles[name], places, strict=False)))


def only(roles: Mapping[str, Role], names: Collection[str] | None) -> dict[str, Role]:
    """Those of these names; all if None."""
    return {name: role for name, role in roles.items() if names is None or name in names}


def kinds_of(config: RunConfig, needed: Collection[str]) -> tuple[RoleKind, ...]:
    """The roles of a run, in order of their work.

    Args:
        config: of the run.
        needed: those that it has besides `ALWAYS`, the user's own left out.
    """
    ours = (*TEXT[:-1], *teacher_kinds(config.teachers), TEXT[-1])
    named = tuple(kind for kind in ours if kind.name in (*ALWAYS, *needed))
    if not config.rollout.own_engine:  # others generate, on devices of their own
        named = tuple(replace(kind, on_devices=kind.on_devices and kind.name != "rollout") for kind in named)
    return (*named[:-1], *own_kinds(config.roles), named[-1])


def own_roles(config: RunConfig) -> dict[str, Role]:
    """The user's own roles, ready to be started; their classes are imported."""
    return {
        name: Role(resolve(entry["class"]), entry.get("settings") or {}, (int(entry.get("memory_gb", 0) * GB), 0))
        for name, entry in config.roles.items()
    }


def mistakes_in_flow(
    flow: Any, roles: Sequence[str], needed: Sequence[str] = (), optional: Sequence[str] = ()
) -> Iterator[str]:
    """Yield mistakes in a flow's parameters.

    Args:
        flow: one step.
        roles: that every flow may take.
        needed: further ones, that this run has and the flow must take.
        optional: further ones that other runs have.
    """
    if not inspect.iscoroutinefunction(flow):
        yield "this is no `async def` function"
        return
    parameters = inspect.signature(flow).parameters
    takes_all = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
    for name, parameter in parameters.items():
        if parameter.kind is parameter.POSITIONAL_ONLY:
            yield f"it takes {name} by position only; remove the `/`"
        elif parameter.kind in (parameter.VAR_KEYWORD, parameter.VAR_POSITIONAL) or (
            name in ("step", *roles, *needed) or parameter.default is not parameter.empty
        ):
            continue
        elif name in optional:
            yield f"it takes {name}, which this run has not"
        else:
            yield f"it takes {name}, which there is not; a flow may take {', '.join(('step', *roles, *optional))}"
    for role in needed:
        if role not in parameters and "session" not in parameters and not takes_all:
            yield f"this run needs a {role}, which the flow does not take; leave `flow` out, or take `{role}`"


def mistakes_in_own(config: RunConfig, flow: Any) -> Iterator[tuple[str, Any, str]]:
    """(key, value, advice) for what only importing the user's own roles shows.

    Args:
        config: right by itself.
        flow: one step.
    """
    if inspect.iscoroutinefunction(flow):
        parameters = inspect.signature(flow).parameters
        takes_all = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
        for name in () if takes_all else sorted(config.roles.keys() - parameters.keys()):
            advice = f"the flow {flow.__qualname__} does not take it: add `{name}` to its parameters"
            yield f"roles.{name}", config.roles[name]["class"], advice
    for name, entry in config.roles.items():
        path, settings = entry["class"], entry.get("settings") or {}
        try:
            actor = resolve(path)
        except RAISED as error:
            yield f"roles.{name}.class", path, f"importing it failed: {type(error).__name__}: {error}"
            continue
        if not (inspect.isclass(actor) and issubclass(actor, Actor)):
            yield f"roles.{name}.class", path, "this is no actor: derive the class from rlinf.Actor"
            continue
        try:
            inspect.signature(actor.setup).bind(None, **settings)
        except TypeError as error:
            yield f"roles.{name}.settings", dict(settings), f"setup of {actor.__name__} does not take them: {error}"


def mistakes_in_models(config: RunConfig) -> Iterator[tuple[str, Any, str]]:
    """(key, value, advice) for what is wrong with saved reward models, and with teachers that have names."""
    if config.reward_model.path is None and not config.teachers:
        return
    from transformers import AutoConfig

    from rlinf.models.scoring import mistakes_in_saved, unreadable  # models come with it

    named = {f"teachers.{name.removeprefix('teacher_')}": each.model for name, each in config.named_teachers.items()}
    for key, path in named.items():
        for reason in () if path is None else unreadable(path, functools.partial(pretrained, AutoConfig)):
            yield key, path, reason
    for key, advice in mistakes_in_saved(config.reward_model):
        yield f"reward_model.{key}", getattr(config.reward_model, key), advice


# Several teachers ----------------------------------------------------------------------------------------------------


def with_teachers(flow: Callable[..., Any], names: Collection[str]) -> Callable[..., Any]:
    """The flow as one that takes each of several teachers by its name, and gets all of them as `teacher`.

    Args:
        flow: one step.
        names: of the teachers' roles; none leaves the flow as it is.
    """
    if not names or not inspect.iscoroutinefunction(flow):
        return flow

    @functools.wraps(flow)
    async def taught(*args: Any, **roles: Any) -> Any:
        teachers = [roles.pop(name) for name in names]
        return await flow(*args, **roles, teacher=Teachers(teachers))

    signature = inspect.signature(flow)
    others = [each for each in signature.parameters.values() if each.name != "teacher"]
    rest = [each for each in others if each.kind is each.VAR_KEYWORD]
    own = [inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY) for name in names]
    taught.__signature__ = signature.replace(  # type: ignore[attr-defined]
        parameters=[*(each for each in others if each not in rest), *own, *rest]
    )
    return taught


def collected(names: Iterable[str]) -> list[str]:
    """Names of roles as a flow takes them: several teachers are one."""
    return list(dict.fromkeys("teacher" if name.startswith("teacher_") else name for name in names))


class RolloutKeeper:
    """Asks all ranks of the rollout, and the session.

    Args:
        rollout: the role as it is now.
        session: plays episodes; None where none was needed yet.
    """

    def __init__(self, rollout: Callable[[], Any], session: Callable[[], RunSession | None] = lambda: None) -> None:
        self._rollout, self._session = rollout, session

    async def version(self) -> int:
        """Return the version of the weights in use, the oldest of all ranks."""
        return min(await self._rollout().version())

    async def partials(self) -> dict[int, Any]:
        """Groups with their answers so far, by prompt, several parts of one, one after the other; and tasks with what
        was said in their episodes."""
        session = self._session()
        tasks = [] if session is None else await session.in_flight()
        by_prompt: dict[int, Any] = {task.prompt.id: (task,) for task in tasks}
        for groups in await self._rollout().in_flight():
            for group in groups:
                by_prompt[group.prompt.id] = (*by_prompt.get(group.prompt.id, ()), group)
        return by_prompt

    async def settled(self, ids: Sequence[int]) -> None:
        """These groups have been received."""
        if (session := self._session()) is not None:
            session.settled(ids)
        await self._rollout().settled(list(ids))

    async def drop(self, ids: Sequence[int]) -> int:
        """End the answers to these prompts; how many tokens there were."""
        counts = await self._rollout().drop(list(ids))
        tokens = sum(count for of_rank in counts for count in of_rank.values())
        return tokens if (session := self._session()) is None else tokens + await session.drop(ids)

    async def split(self) -> None:
        """Let the complete answers of groups under way come by themselves."""
        await self._rollout().split()

    def rest(self, partial: tuple[Any, ...], samples: Collection[int]) -> tuple[Any, ...]:
        """Return the begun work of one prompt without these answers; none of a group that has no others."""
        from rlinf.engines.base import PartialGroup

        groups = [
            replace(group, done={index: one for index, one in group.done.items() if index not in samples})
            for group in partial
            if isinstance(group, PartialGroup)
        ]
        tasks = [task for task in partial if not isinstance(task, PartialGroup)]
        return (*tasks, *(group for group in groups if group.done or group.left))

    async def pause(self) -> None:
        """Stop generating."""
        await self._rollout().pause()

    async def unpause(self) -> None:
        """Generate again."""
        await self._rollout().resume()
