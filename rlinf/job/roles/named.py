"""Roles that a configuration names: the user's own, and several teachers; and what is wrong with either.

In: a configuration and a flow. Out: kinds for the placement, roles to start, and mistakes by key. The classes that are
named are imported here.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import Any

from transformers import AutoConfig

from rlinf.config.importing import resolve
from rlinf.config.text import RunConfig
from rlinf.data.tokenizer import pretrained
from rlinf.job.checks.naming import RAISED
from rlinf.job.roles.running import ALWAYS, Role
from rlinf.models.scoring.check import mistakes_in_saved, unreadable
from rlinf.placement.plan import GB
from rlinf.placement.seats import TEXT, RoleKind, own_kinds, teacher_kinds
from rlinf.runtime.actor.actor import Actor


def kinds_of(config: RunConfig, needed: Collection[str]) -> tuple[RoleKind, ...]:
    """The roles of a run, in order of their work.

    Args:
        config: of the run.
        needed: those that it has besides `ALWAYS`, the user's own left out.
    """
    ours = (*TEXT[:-1], *teacher_kinds(config.teachers), TEXT[-1])
    named = tuple(kind for kind in ours if kind.name in (*ALWAYS, *needed))
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
    """What is wrong with a flow's parameters.

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
        path, given = entry["class"], entry.get("settings") or {}
        try:
            found = resolve(path)
        except RAISED as error:
            yield f"roles.{name}.class", path, f"importing it failed: {type(error).__name__}: {error}"
            continue
        if not (inspect.isclass(found) and issubclass(found, Actor)):
            yield f"roles.{name}.class", path, "this is no actor: derive the class from rlinf.Actor"
            continue
        try:
            inspect.signature(found.setup).bind(None, **given)
        except TypeError as error:
            yield f"roles.{name}.settings", dict(given), f"setup of {found.__name__} does not take them: {error}"


def mistakes_in_models(config: RunConfig) -> Iterator[tuple[str, Any, str]]:
    """(key, value, advice) for what is wrong with saved reward models, and with teachers that have names."""
    named = {f"teachers.{name.removeprefix('teacher_')}": each.model for name, each in config.named_teachers.items()}
    for key, path in named.items():
        for reason in () if path is None else unreadable(path, functools.partial(pretrained, AutoConfig)):
            yield key, path, reason
    for key, advice in mistakes_in_saved(config.reward_model):
        yield f"reward_model.{key}", getattr(config.reward_model, key), advice


# Several teachers ----------------------------------------------------------------------------------------------------


class Teachers:
    """Several teachers that a flow calls like one: groups go from each to the next.

    Args:
        teachers: their handles.
    """

    def __init__(self, teachers: Sequence[Any]):
        self._teachers = teachers

    def logprobs(self, groups: Any) -> Any:
        """Groups with what each teacher says, and with the mixture in `teacher_logprobs`."""
        for teacher in self._teachers:
            groups = teacher.logprobs(groups)
        return groups


def with_teachers(flow: Callable[..., Any], names: Collection[str]) -> Callable[..., Any]:
    """The flow as one that takes each of several teachers by its name, and gets all of them as `teacher`.

    Args:
        flow: one step.
        names: of the teachers' roles; none leaves the flow as it is.
    """
    if not names or not inspect.iscoroutinefunction(flow):
        return flow

    @functools.wraps(flow)
    async def taught(*args: Any, **given: Any) -> Any:
        teachers = [given.pop(name) for name in names]
        return await flow(*args, **given, teacher=Teachers(teachers))

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
