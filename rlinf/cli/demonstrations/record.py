"""Records demonstrations: a policy or a script acts in the environments of a configuration.

    rlinf record --config FILE --episodes 100 --out DIR --model outputs/x/checkpoints/latest/policy
    rlinf record --config FILE --episodes 100 --out DIR --expert my_robot.scripts.pick --format lerobot

In: a configuration of a run that acts, and who acts. Out: whole episodes in any format, complete as soon as they can be
seen. Exit code 0; 1 if nothing can be recorded; 2 with a line that says what is wrong with the input.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from rlinf.cli.demonstrations.convert import add_format_options, whole_number
from rlinf.config.embodied import EmbodiedConfig
from rlinf.config.importing import look_in_working_directory, mistake_in, shipped
from rlinf.config.loading import InputError, RunFailure
from rlinf.job.validate import is_embodied, load_embodied
from rlinf.runtime.base.errors import HostLost
from rlinf.runtime.base.progress import work

if TYPE_CHECKING:
    from rlinf.runtime.system.system import ActorSystem


def main(arguments: Sequence[str]) -> int:
    """Record a data set; returns the exit code.

    Args:
        arguments: what follows `record` on the command line.

    Raises:
        SystemExit: the arguments are none of the command's.
    """
    options = _parser().parse_args(arguments)
    try:
        _record(options)
    except (InputError, RunFailure) as error:
        if os.environ.get("RANK", "0") == "0":
            sys.stderr.write(f"error: rlinf record: {error}\n")
        return 2 if isinstance(error, InputError) else 1
    except HostLost:
        return 1  # it has been printed
    return 0


def _parser() -> argparse.ArgumentParser:
    from rlinf.data.demonstrations.save import WRITTEN

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
    from rlinf.job.embodied.trials import acting

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
    from rlinf.job.checks.whole import check_parts
    from rlinf.job.embodied.recording import Recording, record_episodes
    from rlinf.job.start import run_to_end

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
            played = await record_episodes(system, config, wanted, lambda kept, _: recording.at(kept))
        dated = f"; rows dated {wanted.fps:g} per second (--fps)" if options.format.startswith("lerobot") else ""
        sys.stdout.write(
            f"{options.out}: {options.episodes} episodes as {options.format}, of {played} that were played{dated}\n"
        )

    run_to_end(recorded, config.system)
