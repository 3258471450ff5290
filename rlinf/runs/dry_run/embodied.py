"""Dry-run checks of a configuration of a policy that acts: simulator, policy, saved files, demonstrations, sizes.

In: a configuration that is right by itself. Out: what is wrong, by key; of the section `imitation`, a
`DemonstrationSet`, the shapes of what demonstrations show, and its statistics as a policy takes them. No simulator is
made and no process is started: options are held to the signature of the simulator's class, and the policy is built on
the meta device, without memory.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rlinf.config.embodied import IMITATION, OFF_POLICY, EmbodiedConfig, ImitationConfig
from rlinf.config.importing import RAISED, resolve
from rlinf.config.load import ConfigError, Problem
from rlinf.data.demonstrations import DemonstrationSet, Window, open_episodes, open_parts
from rlinf.data.demonstrations.episode import ACTIONS, STATE
from rlinf.data.demonstrations.statistics import Accumulator, tell_rare
from rlinf.data.demonstrations.stream import Part
from rlinf.envs.base import CannotRender, Simulator, WrongOption
from rlinf.envs.interventions import mistake_in_intervener
from rlinf.envs.learned import fitted_world, make_world
from rlinf.envs.wrappers import mistake_in_function
from rlinf.models.policy.base import Policy
from rlinf.models.policy.build import (
    CONFIG,
    WEIGHTS,
    build_policy_model,
    configured,
    fitted,
    policy_class,
    policy_config,
)
from rlinf.models.policy.published import tensor_shapes, tensors_in
from rlinf.models.policy.robots import RobotActions, Scaling
from rlinf.models.policy.sac import SoftPolicy
from rlinf.placement.seats import Placed
from rlinf.runs.dry_run.estimate import acting_lines
from rlinf.runs.dry_run.footprint import MOST_BYTES, MOST_PARTS, control_footprints, too_much, unfit
from rlinf.runs.roles import problem
from rlinf.training.embodied.ppo import Preparation

_GB = 1 << 30


def shown_of(settings: ImitationConfig) -> DemonstrationSet | None:
    """The demonstrations that are learned from; None where none are named."""
    one = {"path": settings.path, "format": settings.format, "names": settings.names, "bounds": settings.bounds}
    sets = settings.mixture or ({} if settings.path is None else {"data": one})
    if not sets:
        return None
    memory = int(settings.memory_gb * _GB)
    return DemonstrationSet(
        sets=sets,
        solved=settings.solved,
        broken=settings.broken,
        held_out=settings.held_out,
        frames=settings.frame_stack,
        memory=memory,
    )


def shapes_of(settings: ImitationConfig) -> dict[str, Any]:
    """Return the shapes that a policy must fit which learns from demonstrations without a simulator, as
    `EnvActor.shapes` has them.

    Raises:
        ValueError: they are broken, or none are named.
    """
    if (demonstrations := shown_of(settings)) is None:
        raise ValueError("no demonstrations are named")
    parts = open_parts(demonstrations)[0]
    part = parts[0]
    first = part.read(part.places[0])
    shapes = {name: tuple(rows.shape[1:]) for name, rows in first.observation.items()}
    size = first.actions.shape[-1]
    described = {"shapes": shapes, "action_size": size, "max_steps": None, "choices": None}
    return {**described, "bounds": _bounds(parts) or ((-1.0,) * size, (1.0,) * size)}


def statistics_settings(
    settings: ImitationConfig, seed: int, policy: Mapping[str, Any], path: str | None
) -> dict[str, Any]:
    """Settings of a policy that make it act on the scale of what is learned from. Blocking: it reads all of it.

    Args:
        settings: with `statistics`.
        seed: of which episodes are held out.
        policy: its configuration, fitted to the simulator, whose bounds are the robot's units of actions.
        path: of its directory.

    Raises:
        ValueError: the demonstrations are broken, or the policy keeps no statistics of its own.
    """
    name, demonstrations = settings.statistics, shown_of(settings)
    if name is None or demonstrations is None:
        return {}
    kind = policy_class(policy)
    unmeasured(kind, name, path)
    config = policy_config(policy if path is None else configured(policy, Path(path).expanduser()))
    nothing = torch.zeros(0, dtype=torch.float64)
    robot = kind.actions_of(config, Scaling(nothing, nothing))  # what it predicts is in the robot's units
    accumulators: dict[str, Accumulator] = {}
    parts = open_parts(demonstrations, seed)[0]
    for part in parts:
        for feature, rows in _features(part, robot, config.chunk):
            accumulators.setdefault(feature, Accumulator()).add(rows)
    episodes = sum(len(part.places) for part in parts)
    statistics = {feature: each.done() for feature, each in accumulators.items()}
    for feature, each in statistics.items():
        tell_rare(f"imitation.statistics: {feature}", each)
    return kind.with_statistics(name, statistics, episodes)


def unmeasured(kind: type[Policy], name: str, path: str | None) -> dict[str, Any]:
    """Return stand-ins for the statistics of `statistics_settings`, of a robot with one number that is always 0.

    Raises:
        ValueError: such a policy keeps no statistics, or that of the directory keeps those that it has.
    """
    if path is not None and (Path(path).expanduser() / CONFIG).is_file():
        raise ValueError(f"{path} is a policy that was saved with its statistics, and goes on with them: remove it")
    number = Accumulator()
    number.add(torch.zeros(1, 1))
    return kind.with_statistics(name, {ACTIONS: number.done(), STATE: number.done()}, 1)


def _features(part: Part, robot: RobotActions, chunk: int) -> Iterator[tuple[str, Tensor]]:
    """The actions of each episode in the robot's units, and the states before them, [n, D].

    Actions that are relative to the state before their chunk count once in each chunk that they can lie in.
    """
    for place in part.places:
        episode = part.read(place, pictures=False)
        state = episode.observation.get(STATE)
        if state is not None:
            yield STATE, state[:-1]
        if robot.relative and state is not None:
            rows = Window([episode], chunk).between(0, len(episode.actions))
            yield ACTIONS, robot.to_model(rows.actions, rows.observation[STATE])[rows.valid]
        else:
            yield ACTIONS, robot.to_model(episode.actions[episode.valid])


def _bounds(parts: Sequence[Part]) -> tuple[tuple[float, ...], tuple[float, ...]] | None:
    """Return the bounds in the robot's units that stand for -1 and 1, where all data sets agree; else None."""
    pairs = {
        None if part.low is None or part.high is None else (tuple(part.low.tolist()), tuple(part.high.tolist()))
        for part in parts
    }
    return pairs.pop() if len(pairs) == 1 else None


_LEAST = 16
"""Bytes that are kept of every decision at least: a number each of observation, action, log-prob and reward."""
_ARM = 7
"""Numbers of an action where seconds depend on it and no simulator is made to be asked: of an arm with a gripper."""
_MOST_WORKERS = 4096
"""Processes that no machine has cores for."""


def unusable(config: EmbodiedConfig) -> Iterator[Problem]:
    """Yield the problems that would keep a run of this configuration from working.

    Args:
        config: of the run.
    """
    if config.algorithm.name != IMITATION or config.trials.episodes:
        yield from _simulator_mistakes(config)
    yield from _function_mistakes(config)
    policy = _policy(config)
    if isinstance(policy, Problem):
        yield policy
    else:
        if config.trials.greedy == "from_noise" and not policy.starts:
            other = f"{config.policy.type} denoises nothing, so that it begins at no noise: take true, or false"
            yield Problem("configuration", "trials.greedy", "from_noise", other)
        yield from _memory_mistakes(config, policy)
        yield from _too_large(config, policy, None)
    if config.policy.path is not None:
        yield from _saved_mistakes(config.policy.path, config.policy.type)
    yield from _demonstration_mistakes(config)
    if isinstance(policy, Problem):  # its chunk is not known, but as it is written
        written = config.policy.settings.get("chunk")
        chunk = written if isinstance(written, int) and written > 0 else 1
    else:
        chunk = policy.config.chunk
    if (
        config.env.max_steps is not None
        and (advice := horizon_mistake(config, config.env.max_steps, chunk)) is not None
    ):
        yield Problem("configuration", "policy.horizon", config.policy.horizon, advice)
    yield from _world_mistakes(config, chunk)
    yield from _oversized(config, chunk)


def _world_mistakes(config: EmbodiedConfig, chunk: int) -> Iterator[Problem]:
    """Yield problems of the world model, as far as they show without the environments' sizes."""
    world = config.world
    if world.model is None:
        return
    if chunk > 1:
        advice = "a world model is learned from what is seen after each action: let policy.settings.chunk be 1"
        yield Problem("configuration", "policy.settings.chunk", chunk, advice)
    try:
        path, settings = fitted_world(world.model, world.settings, {"state": (1,)}, 1)
        with torch.device("meta"):
            make_world(path, settings)
    except RAISED as error:
        yield problem("world.settings", world.settings, error)


def _demonstration_mistakes(config: EmbodiedConfig) -> Iterator[Problem]:
    """Yield problems of demonstrations, as far as their index and their first episode show."""
    wanted: list[tuple[str, Mapping[str, Any], bool]] = []
    if (demonstrations := shown_of(config.imitation)) is not None:
        key = "imitation.mixture.{}" if config.imitation.mixture else "imitation.path"
        wanted += [(key.format(name), about, demonstrations.solved) for name, about in demonstrations.sets.items()]
    elif config.algorithm.name == IMITATION:
        advice = "there is nothing to imitate: name demonstrations"
        yield Problem("configuration", "imitation.path", None, advice)
    if (directory := config.off_policy.demonstrations) is not None:
        solved = not config.off_policy.failed_demonstrations
        wanted.append(("off_policy.demonstrations", {"path": directory}, solved))
    for key, about, solved in wanted:
        try:
            source = open_episodes(Path(about["path"]), about.get("format"), about.get("names") or None)
            source.read(source.chosen(solved)[0])
        except Exception as error:  # of files that may hold anything
            yield problem(key, about["path"], error)


def _function_mistakes(config: EmbodiedConfig) -> Iterator[Problem]:
    """Yield problems of what `env.reward`, `env.success` and `env.intervener` name."""
    env = config.env
    one_person = partial(mistake_in_intervener, num_envs=env.num_envs)
    for key, path, arguments, mistake_of in (
        ("env.reward", env.reward, env.reward_args, mistake_in_function),
        ("env.success", env.success, env.reward_args, _of_those if env.reward is not None else mistake_in_function),
        ("env.intervener", env.intervener, env.intervener_args, one_person),
    ):
        if path is None:
            continue
        try:
            advice = mistake_of(resolve(path), arguments)
        except RAISED as error:
            yield problem(key, path, error, "importing it")
            continue
        if advice is not None:
            yield Problem("configuration", key, path, advice)


def _of_those(function: Any, arguments: Mapping[str, Any]) -> str | None:
    """`mistake_in_function` of a function that gets only those of another one's arguments that it takes."""
    names = inspect.signature(function).parameters if callable(function) else ()
    return mistake_in_function(function, {name: value for name, value in arguments.items() if name in names})


def horizon_mistake(config: EmbodiedConfig, limit: int | None, chunk: int) -> str | None:
    """Return advice if no episode can end in a step of the flow, though the next step begins others; else None.

    Args:
        config: of the run.
        limit: steps of an episode at most; None for no limit.
        chunk: actions of each decision.
    """
    done = config.policy.horizon * chunk
    if not (config.env.fresh and config.env.ignore_terminations) or limit is None or done >= limit:
        return None
    return (
        f"a step of the flow does {done} steps in each environment, all episodes last {limit}, and each step begins "
        f"new ones, so that none would ever end: take horizon={-(-limit // chunk)}, or env.fresh=false"
    )


def horizon_warning(config: EmbodiedConfig, limit: int | None, chunk: int) -> str | None:
    """A sentence about episodes that may last longer than a step of the flow, and begin anew with the next: those do
    not count; None where all end in time.

    Args:
        config: of the run.
        limit: steps of an episode at most; None for no limit.
        chunk: actions of each decision.
    """
    done = config.policy.horizon * chunk
    if not config.env.fresh or (limit is not None and done >= limit):
        return None
    longest = "end by themselves alone" if limit is None else f"last up to {limit} steps"
    return (
        f"policy.horizon: a step of the flow does {done} steps in each environment, and episodes {longest}; those that "
        "last longer are cut off, and count neither as solved nor in reward/mean; env.fresh=false goes on with them"
    )


def expected_horizon_warning(config: EmbodiedConfig) -> str | None:
    """Return `horizon_mistake`'s advice before a simulator is made, where its configuration or Gymnasium's registry
    says how long episodes last; None where neither does."""
    if config.algorithm.name == IMITATION:  # whose steps act nowhere
        return None
    limit, id = config.env.max_steps, config.env.options.get("id")
    if limit is None and isinstance(id, str) and str(config.env.simulator).startswith("rlinf.envs.gymnasium"):
        import gymnasium

        with suppress(*RAISED):  # an id that there is not was told already, or is of a package that is not here
            limit = gymnasium.spec(id.rpartition(":")[2]).max_episode_steps
    policy = _policy(config)
    if limit is None or isinstance(policy, Problem):
        return None
    return horizon_warning(config, limit, policy.config.chunk)


# Simulators -----------------------------------------------------------------------------------------------------------


def _simulator_mistakes(config: EmbodiedConfig) -> Iterator[Problem]:
    name = config.env.simulator
    try:
        simulator = resolve(name)
    except RAISED as error:
        yield problem("env.simulator", name, error, "importing it")
        return
    advice = None
    if not (isinstance(simulator, type) and issubclass(simulator, Simulator)):
        advice = "it is no class derived from rlinf.envs.base.Simulator; docs/adding-an-environment.md has one"
    elif inspect.isabstract(simulator):
        advice = f"it leaves out {', '.join(sorted(simulator.__abstractmethods__))}, which every simulator needs"
    if advice is not None:
        yield Problem("configuration", "env.simulator", name, advice)
        return
    wanted: list[tuple[str, Mapping[str, Any]]] = [("env.options", config.env.options)]
    for name, suite in config.eval_suites.items():
        wanted.append((f"trials.suites.{name}.options" if name else "trials.options", suite.options))
    for number, task in enumerate(config.env.tasks):
        wanted.append((f"env.tasks[{number}].options", {**config.env.options, **task.get("options", {})}))
    if config.env.tasks:
        wanted = wanted[-len(config.env.tasks) :]  # the others lack what each task adds
    for key, options in wanted:
        try:
            simulator.check_options(options)
        except WrongOption as error:
            where = key if error.name not in options else f"{key}.{error.name}"
            yield Problem("configuration", where, options.get(error.name, dict(options)), str(error))
            return
        except RAISED as error:
            yield problem(key, dict(options), error)
            return
    if config.trials.videos:
        yield from _video_mistakes(simulator, config)


def _video_mistakes(simulator: type[Simulator], config: EmbodiedConfig) -> Iterator[Problem]:
    """Videos that are asked of a simulator which is known to draw nothing."""
    tasks = [task.get("options", {}) for task in config.env.tasks] or [{}]
    try:
        for suite in config.eval_suites.values():
            for own in tasks:
                simulator.check_pictures({**suite.options, **own})
    except CannotRender as error:
        yield Problem("configuration", "trials.videos", config.trials.videos, str(error))


# Policies -------------------------------------------------------------------------------------------------------------


def _policy(config: EmbodiedConfig, numbers: int = 1) -> Policy | Problem:
    """The policy on the meta device, in an environment of the smallest sizes but for numbers of an action; or what is
    wrong with it."""
    off_policy = config.algorithm.name in OFF_POLICY
    overrides = config.policy_settings
    kind = overrides["type"]
    try:
        wanted = policy_class({"type": kind})
    except RAISED as error:
        return problem("policy.type", kind, error)
    if off_policy and not issubclass(wanted, SoftPolicy):
        name = config.algorithm.name
        advice = f"it has no critics of actions, which {name} needs: take soft, or a class derived from its SoftPolicy"
        return Problem("configuration", "policy.type", kind, advice)
    if (measures := config.imitation.statistics) is not None:
        try:
            overrides |= unmeasured(wanted, measures, config.policy.path)
        except ValueError as error:
            return problem("imitation.statistics", measures, error)
    if (many := _too_many(config.policy.settings)) is not None:
        return Problem("configuration", f"policy.settings.{many[0]}", many[1], f"no model has more than {MOST_PARTS:,}")
    if (path := config.policy.path) is not None and wanted.published:  # its files say what is not set
        directory = Path(path).expanduser()
        return _built("policy.path", path, lambda: _smallest(configured(overrides, directory), numbers, config))
    return _built("policy.settings", config.policy.settings, lambda: _smallest(overrides, numbers, config))


def without_path(config: EmbodiedConfig) -> Problem | None:
    """Return the problem of a run whose policy acts only where it was read from a directory, and names none; else None.

    Without weights such a configuration can be checked all the same, so that `--dry-run` merely warns of it.

    Args:
        config: of the run, which has passed `unusable`.
    """
    kind = config.policy_settings["type"]
    if config.policy.path is not None or not policy_class({"type": kind}).needs_path:
        return None
    advice = (
        f"{kind} is read from a directory that has its weights and its tokenizer, as its authors publish it: name one"
    )
    return Problem("configuration", "policy.path", None, advice)


def held_by(config: EmbodiedConfig, placed: Placed) -> dict[str, tuple[int, int]]:
    """Bytes that each role with a policy takes of a device while it is loaded, and while it is parked, activations left
    out; empty where there is no such policy.

    Args:
        config: of the run, which has passed `unusable`.
        placed: where its roles are.
    """
    if isinstance(policy := _policy(config), Problem):
        return {}
    how, ranks = Preparation(**config.policy.preparation), len(placed.seats["trainer"].hosts)
    roles = control_footprints(policy, how, ranks=ranks, targets=config.has_targets)
    return {role: (each.active_bytes, each.parked_bytes) for role, each in roles.items()}


def seconds_of(config: EmbodiedConfig, placed: Placed) -> Iterator[str]:
    """Lines about the seconds of a step, where they follow from the policy's size and the devices' figures.

    Args:
        config: of the run, which has passed `unusable`.
        placed: where its roles are.
    """
    if placed.fleet.hardware and not isinstance(policy := _policy(config, _ARM), Problem):
        yield from acting_lines(config, policy, placed)


def check_memory(config: EmbodiedConfig, placed: Placed) -> None:
    """See that the policy and what learns it fit into the memory of devices; the configuration has passed `unusable`.

    Args:
        config: of the run.
        placed: where its roles are.

    Raises:
        ConfigError: they do not.
    """
    if placed.memory is None or isinstance(policy := _policy(config), Problem):
        return
    if problems := list(_too_large(config, policy, placed)):
        raise ConfigError(problems)


def _too_large(config: EmbodiedConfig, policy: Policy, placed: Placed | None) -> Iterator[Problem]:
    """Yield problems of how the policy is to learn, and of its size."""
    preparation = config.policy.preparation
    targets, ranks = config.has_targets, 1 if placed is None else len(placed.seats["trainer"].hosts)
    how = Preparation(**preparation)
    try:
        footprints = control_footprints(policy, how, ranks=ranks, targets=targets)
    except ValueError as error:
        key = "policy.lora" if str(error).startswith("lora") else "policy.train"
        yield problem(key, preparation["lora" if key == "policy.lora" else "train"], error)
        return
    if (most := max(each.active_bytes for each in footprints.values())) > MOST_BYTES:
        yield too_much("policy.settings", config.policy.settings, most, "the policy and what learns it")
    elif placed is not None:
        yield from unfit(config, placed, footprints)
    if config.policy.gradient_checkpointing and not policy.blocks():
        advice = "a policy without blocks, such as this one, keeps little for the gradient: remove it"
        yield Problem("configuration", "policy.gradient_checkpointing", True, advice)


def _smallest(settings: Mapping[str, Any], numbers: int, config: EmbodiedConfig) -> dict[str, Any]:
    """A configuration fitted to an environment of the smallest sizes, whose actions have so many numbers; a gripper is
    behind another one."""
    numbers = max(numbers, 2) if settings.get("gripper") is True else numbers
    bounds, frames = ((-1.0,) * numbers, (1.0,) * numbers), max(config.env.frame_stack, config.imitation.frame_stack)
    shapes = {"state": (frames,), "rgb": (_side(settings),) * 2 + (3 * frames,)}
    return fitted(settings, shapes, numbers, bounds=bounds)


def _memory_mistakes(config: EmbodiedConfig, policy: Policy) -> Iterator[Problem]:
    """Yield settings that do not go with a policy that has a memory."""
    if config.policy.horizon % policy.sequence:
        advice = (
            f"it must be a multiple of policy.settings.sequence={policy.sequence}, the decisions learned from in a row"
        )
        yield Problem("configuration", "policy.horizon", config.policy.horizon, advice)
    if getattr(policy.config, "memory", 0) and (demonstrations := shown_of(config.imitation)) is not None:
        advice = "demonstrations are learned from decision by decision: leave policy.settings.memory out"
        key = "imitation.mixture" if config.imitation.mixture else "imitation.path"
        yield Problem(
            "configuration", key, ", ".join(str(each.get("path")) for each in demonstrations.sets.values()), advice
        )


def _built(key: str, value: Any, whole: Callable[[], Mapping[str, Any]]) -> Policy | Problem:
    try:
        with torch.device("meta"):
            return build_policy_model(whole())
    except RAISED as error:
        return problem(key, value, error)


def _side(settings: Mapping[str, Any]) -> int:
    """Height of a picture that a policy of these settings can read: both patches and convolutions divide it."""
    patch, channels = settings.get("patch_size"), settings.get("channels")
    layers = len(channels) if isinstance(channels, list | tuple) else 3
    return (patch if type(patch) is int and 0 < patch < 1000 else 16) * 2 ** min(layers, 12)


def _too_many(settings: Mapping[str, Any], prefix: str = "") -> tuple[str, Any] | None:
    """A number of layers, heads or critics so large that building them one by one would not end."""
    for name, value in settings.items():
        if isinstance(value, Mapping):
            if (excess := _too_many(value, f"{prefix}{name}.")) is not None:
                return excess
        elif (
            isinstance(value, int | float) and value > MOST_PARTS and str(name).endswith(("layers", "heads", "critics"))
        ):
            return f"{prefix}{name}", value
    return None


def _saved_mistakes(path: str, kind: str | None) -> Iterator[Problem]:
    """Yield problems of a saved policy: its own configuration, or weights that are not of it."""
    directory = Path(path).expanduser()
    try:
        if kind is not None and policy_class({"type": kind}).published:
            return  # built from that directory already
        about = configured({}, directory)
        saved = _built("policy.path", path, lambda: about)
        if isinstance(saved, Problem):
            yield saved
            return
        if saved.published:
            return
        there = tensor_shapes(tensors_in(directory / WEIGHTS))
    except Exception as error:  # of files that may hold anything
        yield problem("policy.path", path, error)
        return
    wanted = {name: tuple(tensor.shape) for name, tensor in saved.state_dict().items()}
    if odd := sorted(name for name in {*there, *wanted} if there.get(name) != wanted.get(name)):
        advice = f"the weights in {WEIGHTS} are not of the policy in {CONFIG}, which differs in {', '.join(odd[:3])}"
        yield Problem("configuration", "policy.path", path, advice)


# Sizes ----------------------------------------------------------------------------------------------------------------


def _oversized(config: EmbodiedConfig, chunk: int) -> Iterator[Problem]:
    """Yield settings for which no machine has enough memory, however little the simulator shows."""
    env, policy = config.env, config.policy
    if env.workers > _MOST_WORKERS:
        yield Problem("configuration", "env.workers", env.workers, f"no machine runs more than {_MOST_WORKERS:,}")
    decision_bytes = _LEAST * chunk
    factors = {"env.num_envs": env.num_envs, "policy.horizon": policy.horizon, "policy.settings.chunk": chunk}
    most = max(factors, key=lambda key: factors[key])
    rows = [(most, factors[most], decision_bytes * env.num_envs * policy.horizon, "what environments show in a step")]
    if config.imitation.path is not None or config.imitation.mixture:
        rows.append(("imitation.batch", config.imitation.batch, decision_bytes * config.imitation.batch, "a batch"))
    if config.algorithm.name in OFF_POLICY:
        learned = config.off_policy
        rows.append(
            (
                "off_policy.capacity",
                learned.capacity,
                decision_bytes * learned.capacity,
                "the transitions that are kept",
            )
        )
        rows.append(("off_policy.batch", learned.batch, decision_bytes * learned.batch, "a batch"))
    for key, value, needed, what in rows:
        if needed > MOST_BYTES:
            yield too_much(key, value, needed, what, "each host")
