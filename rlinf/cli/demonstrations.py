"""Commands for demonstrations: `rlinf record` records them, `rlinf convert` changes their format.

    rlinf convert FROM TO --format lerobot
    rlinf convert FROM TO --statistics openvla --name my_robot

In: a data set in any format that is read. Out: one in any that is written, complete as soon as it can be seen; or the
file in which published checkpoints keep statistics.

    rlinf record --config FILE --episodes 100 --out DIR --model outputs/x/checkpoints/latest/policy
    rlinf record --config FILE --episodes 100 --out DIR --expert my_robot.scripts.pick --format lerobot

In: a configuration of a run that acts, and who acts in its environments: a policy or a script. Out: whole episodes in
any format, complete as soon as they can be seen. Exit code 1 if nothing can be recorded.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import shutil
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from rlinf.actors.env import EnvActor
from rlinf.actors.policy import Scripted
from rlinf.cli.main import as_input
from rlinf.config.embodied import EmbodiedConfig
from rlinf.config.importing import look_in_working_directory, mistake_in, shipped
from rlinf.config.load import InputError, RunFailure
from rlinf.data.demonstrations.episode import ACTIONS, RGB, Episodes
from rlinf.data.demonstrations.load import FORMATS, WRITTEN, chosen_of, open_episodes, save_demonstrations
from rlinf.data.demonstrations.statistics import (
    FILES,
    GROOT_TAGS,
    as_groot,
    as_openpi,
    as_openvla,
    statistics_of,
    write_statistics,
)
from rlinf.envs.base import CannotSimulate
from rlinf.envs.environment import Decision
from rlinf.envs.workers import EnvironmentLost
from rlinf.flows.record import NothingToKeep, record
from rlinf.placement.seats import CONTROL, place
from rlinf.runs.embodied_roles import TRIALS, _cause, _simulation, _trials, learners_of
from rlinf.runs.roles import Role, Roles, spawn_roles
from rlinf.runs.rules import is_embodied, load_embodied
from rlinf.runtime.base.errors import UserError
from rlinf.runtime.base.progress import track, work
from rlinf.runtime.processes.supervisor import ChildDied
from rlinf.runtime.system.system import ActorSystem

_PATIENCE = 10
"""Rounds of episodes in a row of which none solves its task before recording gives up: a policy that solves one episode
in a hundred is recorded by 16 environments, and one that solves none costs minutes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Recording:
    """Settings of a recording: episodes, who acts, and the format."""

    directory: Path
    """Where the data set goes; not there, or empty."""
    episodes: int
    """How many are kept."""
    form: str = "rlinf"
    """One of `save.WRITTEN`."""
    expert: str | None = None
    """Dotted path of a function that acts, see `Scripted`; None takes the configuration's policy."""
    solved: bool = True
    """Keep only episodes that solved their task."""
    greedy: bool = True
    """The policy takes its likeliest actions."""
    fps: float = 10.0
    """Rows per second, where the format says it."""
    videos: bool = True
    """Pictures become videos, where the format has them."""
    task: str = "unknown"
    """Name of the environment, where the format says it."""


async def record_episodes(
    system: ActorSystem, config: EmbodiedConfig, wanted: Recording, on_episode: Callable[[int, int], None]
) -> int:
    """Record a data set, in episodes that neither training nor trials begin with.

    Args:
        system: where.
        config: the environments, and the policy by `policy.path`.
        wanted: what.
        on_episode: called with how many episodes are kept, and how many were played.

    Returns:
        How many were played.

    Raises:
        InputError: something cannot be made, or the format cannot hold it.
        RunFailure: no episode solves its task, or simulators are lost all the time.
    """
    roles = await _started(system, config, wanted)
    rounds = wanted.directory.absolute().with_name(f".{wanted.directory.absolute().name}.recording")
    await asyncio.to_thread(shutil.rmtree, rounds, ignore_errors=True)  # of a call that was killed
    try:
        played = await record(
            roles[TRIALS],
            roles["policy"],
            rounds,
            wanted.episodes,
            greedy=wanted.greedy,
            solved=wanted.solved,
            patience=_PATIENCE * max(1, config.env.num_envs // wanted.episodes),  # of smaller rounds
            on_progress=on_episode,
        )
        await asyncio.to_thread(_moved, rounds, wanted)
    except NothingToKeep as error:
        raise RunFailure(str(error)) from error
    except EnvironmentLost as error:
        raise RunFailure(f"record: {error}") from error
    except (ValueError, FileExistsError, ImportError) as error:
        raise InputError(f"record: {error}") from error
    finally:
        await asyncio.to_thread(shutil.rmtree, rounds, ignore_errors=True)
    return played


async def _started(system: ActorSystem, config: EmbodiedConfig, wanted: Recording) -> Roles:
    """Simulators with other starts than those of training and of trials, no more than episodes are kept, and who acts
    in them."""
    placed = place(replace(config.placement, mode=None, plan=None), CONTROL[:2], system.hosts)
    hosts, expert = placed.seats["env"].hosts, wanted.expert
    count = min(config.env.num_envs, -(-wanted.episodes // len(hosts)))
    trials = replace(config.trials, episodes=count, videos=0, options={}, suites={}, seed=None)
    config = replace(config, seed=config.seed + (1 << 32), trials=trials)
    # what is learned from never begins as what is evaluated
    suite = config.eval_suites[""]
    simulation = {**_simulation(config, suite.options), **_trials(config, "", suite, None), "held_out": False}
    try:
        roles = await spawn_roles(system, placed, {TRIALS: Role(EnvActor, simulation, hosts=hosts)})
        acting = {"policy": Role(Scripted, {"function": expert}, hosts=hosts)}
        if expert is None:
            acting = await learners_of(config, None, roles)
        roles |= await spawn_roles(system, placed, acting)
        # one decision: what does not fit is told before anything is played
        decided = await roles["policy"][0].act((0, 0), await roles[TRIALS][0].reset(0, 0), keep=False)
        actions = decided.actions if isinstance(decided, Decision) else decided
        size = (await roles[TRIALS][0].shapes())["action_size"]
        if actions.shape[-1] != size:
            raise ValueError(f"actions have {actions.shape[-1]} numbers, and the environment takes {size}")
        if actions.shape[1] > 1 and wanted.form != "rlinf":
            raise ValueError(
                f"{wanted.form} keeps single actions, and {actions.shape[1]} are decided at a time, between which "
                "nothing is seen: record in rlinf's format, which keeps chunks"
            )
        return roles
    except (CannotSimulate, ChildDied, OSError, ImportError, TypeError, UserError, ValueError) as error:
        who = "env, policy" if expert is None else f"env, {expert}"
        raise InputError(f"{who}: {_cause(error)}") from error


def _moved(rounds: Path, wanted: Recording) -> None:
    """Save what was recorded, in its format and at its place."""
    episodes = open_episodes(rounds)
    save_demonstrations(
        wanted.directory,
        chosen_of(episodes, track(range(len(episodes)), f"writing {wanted.directory}", unit="episodes")),
        wanted.form,
        fps=wanted.fps,
        videos=wanted.videos,
        task=wanted.task,
    )


def convert_demonstrations(arguments: Sequence[str]) -> None:
    """Convert a data set.

    Args:
        arguments: what follows `convert` on the command line.

    Raises:
        SystemExit: the arguments are none of the command's.
    """
    options = _convert_parser().parse_args(arguments)
    with as_input(ValueError, OSError, ImportError):  # what data sets and disks raise
        episodes = open_episodes(Path(options.source), options.source_format, names_of(options.names))
        places = episodes.chosen(options.solved)[: options.episodes]
        convert = _statistics if options.statistics else _converted
        sys.stdout.write(convert(options, episodes, places) + "\n")


def _convert_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="rlinf convert",
        description="Bring demonstrations into another format, or compute their statistics. "
        "`rlinf convert THEIRS.yaml OURS.yaml` writes a configuration of verl's or RLinf's as one of ours.",
    )
    parser.add_argument("source", metavar="FROM", help="directory or file with demonstrations, in any format")
    parser.add_argument("target", metavar="TO", help="directory that is not there yet")
    parser.add_argument("--format", choices=WRITTEN, default="rlinf", help="what is written; default: rlinf")
    parser.add_argument("--source-format", choices=[*FORMATS], help="what is read; default: by its files")
    parser.add_argument(
        "--names",
        nargs="+",
        metavar="THEIRS=OURS",
        help="our names of features, such as observation.images.front=rgb observation.state=state action=actions; "
        "several of one name are joined; default: the format's own choice",
    )
    parser.add_argument("--solved", action="store_true", help="leave out episodes that did not solve their task")
    parser.add_argument("--episodes", type=whole_number, metavar="N", help="no more than the first N")
    add_format_options(parser)
    parser.add_argument(
        "--statistics", choices=[*FILES], help=f"write statistics instead: {', '.join(FILES.values())} into TO"
    )
    parser.add_argument("--name", default="data", help="of the data set (openvla), or tag of the robot (groot)")
    parser.add_argument(
        "--unmasked",
        nargs="+",
        type=int,
        default=[],
        metavar="PLACE",
        help="numbers of an action that are not to be normalised, such as -1 for a gripper (openvla)",
    )
    return parser


def add_format_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of single formats, for both commands."""
    parser.add_argument(
        "--fps", type=_rate, metavar="F", help="rows per second (lerobot, groot); default: 10, or as FROM"
    )
    parser.add_argument("--png", action="store_true", help="keep pictures exactly, in rows instead of videos (lerobot)")
    parser.add_argument("--task", default="unknown", help="name of the environment (maniskill)")


def names_of(words: Sequence[str] | None) -> dict[str, str] | None:
    """Our names by theirs.

    Raises:
        InputError: one is not THEIRS=OURS.
    """
    if words is None:
        return None
    pairs = [each.partition("=") for each in words]
    if odd := [f"{theirs}{sign}{ours}" for theirs, sign, ours in pairs if not (theirs and sign)]:
        raise InputError(f"--names {odd[0]}: write THEIRS=OURS, such as observation.state=state")
    return {theirs: ours for theirs, _, ours in pairs}


def _converted(options: argparse.Namespace, episodes: Episodes, places: Sequence[int]) -> str:
    written = save_demonstrations(
        Path(options.target).expanduser(),
        chosen_of(episodes, track(places, f"converting {options.source}", unit="episodes")),
        options.format,
        fps=rate_of(options, episodes),
        videos=not options.png,
        task=options.task,
    )
    omitted = len(episodes) - written
    return f"{options.target}: {written} episodes as {options.format}" + (f", {omitted} left out" if omitted else "")


def _statistics(options: argparse.Namespace, episodes: Episodes, places: Sequence[int]) -> str:
    statistics = statistics_of(episodes, places)
    statistics[ACTIONS] = statistics[ACTIONS].masked(options.unmasked)
    if options.statistics == "openvla":
        content: Mapping[str, object] = as_openvla(statistics, options.name, len(places))
    elif options.statistics == "openpi":
        content = as_openpi(statistics)
    else:
        observation = episodes.read(places[0]).observation
        pictures = observation[RGB][0].split(3, -1) if RGB in observation else ()
        cameras = {f"camera_{number}": tuple(each.shape) for number, each in enumerate(pictures)}
        content = as_groot(statistics, options.name, cameras=cameras, fps=rate_of(options, episodes))
    path = Path(options.target).expanduser() / FILES[options.statistics]
    write_statistics(path, content)
    foreign = options.statistics == "groot" and options.name not in GROOT_TAGS
    remark = f"; NVIDIA's own loader takes {', '.join(GROOT_TAGS)} alone: --name new_embodiment" if foreign else ""
    return f"{path}: of {statistics[ACTIONS].count} actions in {len(places)} episodes{remark}"


def rate_of(options: argparse.Namespace, episodes: Episodes) -> float:
    """Rows per second: as asked for, as the data set says, or 10."""
    fps = getattr(getattr(episodes, "info", None), "fps", 10.0)
    return float(fps if options.fps is None else options.fps)


def whole_number(text: str) -> int:
    """A number of things from the command line, at least 1."""
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError("it must be at least 1")
    return number


def _rate(text: str) -> float:
    rate = float(text)
    if not 0 < rate < 1e6:
        raise argparse.ArgumentTypeError("it must be above 0")
    return rate


def record_demonstrations(arguments: Sequence[str]) -> None:
    """Record a data set.

    Args:
        arguments: what follows `record` on the command line.

    Raises:
        SystemExit: the arguments are none of the command's.
    """
    _record(_parser().parse_args(arguments))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="rlinf record", description="Record whole episodes of a policy, or of a script, as demonstrations."
    )
    parser.add_argument("--config", required=True, metavar="FILE", help="the environments, as in training")
    parser.add_argument("--episodes", required=True, type=whole_number, metavar="N", help="how many are kept")
    parser.add_argument("--out", required=True, metavar="DIR", help="directory that is not there yet")
    parser.add_argument("--format", choices=WRITTEN, default="rlinf", help="default: rlinf")
    who = parser.add_mutually_exclusive_group()
    who.add_argument("--model", metavar="DIR", help="saved policy that acts; default: policy.path")
    who.add_argument(
        "--expert",
        metavar="PATH",
        help="dotted path of a function that acts: of observations and instructions, actions in [-1, 1], [N, C, A]",
    )
    parser.add_argument("--all", action="store_true", help="keep episodes that did not solve their task, too")
    parser.add_argument("--draw", action="store_true", help="draw actions instead of taking the likeliest")
    add_format_options(parser)
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="set a key of the configuration")
    return parser


def _record(options: argparse.Namespace) -> None:
    look_in_working_directory()
    path = shipped(options.config)
    if Path(path).is_file() and not is_embodied(path):
        raise InputError(f"--config {options.config}: it has no section env, so nothing can be acted in")
    hosts = int(os.environ.get("WORLD_SIZE", "1"))
    from rlinf.runs.embodied import acting

    config = load_embodied(path, acting(options.model, options.overrides), hosts)
    if options.expert is not None:
        if (advice := mistake_in(options.expert)) is not None:
            raise InputError(f"--expert {options.expert}: {advice}")
    elif config.policy.path is None:
        raise InputError("nobody acts: name a saved policy by --model, or a function by --expert")
    out = Path(options.out).expanduser()
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise InputError(f"--out {options.out}: it is there and not empty; name another directory, or remove it")
    _run(options, config, out)


def _run(options: argparse.Namespace, config: EmbodiedConfig, out: Path) -> None:
    from rlinf.runs.resume import check_parts
    from rlinf.runs.start import run_to_end

    if os.environ.get("RANK", "0") == "0" and options.expert is None:
        check_parts(config)
    wanted = Recording(
        directory=out,
        episodes=options.episodes,
        form=options.format,
        expert=options.expert,
        solved=not options.all,
        greedy=not options.draw,
        fps=10.0 if options.fps is None else options.fps,
        videos=not options.png,
        task=options.task,
    )

    async def recorded(system: ActorSystem) -> None:
        with work("recording", options.episodes, "episodes") as recording:
            played = await record_episodes(system, config, wanted, lambda count, _: recording.at(count))
        dated = f"; rows dated {wanted.fps:g} per second (--fps)" if options.format.startswith("lerobot") else ""
        sys.stdout.write(
            f"{options.out}: {options.episodes} episodes as {options.format}, of {played} that were played{dated}\n"
        )

    run_to_end(recorded, config.system)
