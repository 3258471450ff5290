"""Tasks of ManiSkill 3: finding one by its id, making it, and reading what it shows.

In: what a config says of the task. Out: ManiSkill's own environment, and functions that turn its observations into
ours. Whatever is missing is said in one message that names the command which brings it; nothing asks on the terminal,
as ManiSkill does by itself. `cpu.py` and `gpu.py` step what is made here.
"""

from __future__ import annotations

import difflib
import gc
import importlib
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from rlinf.envs.base import ActionSpec, ArraySpec, CannotSimulate, Observation
from rlinf.envs.maniskill import fast_poses as maniskill_poses
from rlinf.envs.maniskill import headless as maniskill_headless

_MODES = {
    "state": "state",
    "rgb": "rgb",
    "rgbd": "rgb+depth",
    "state+rgb": "state+rgb",
    "state+rgbd": "state+rgb+depth",
}
"""What ManiSkill calls each choice of `Task.observe`."""
_MILLIMETRES = 1000.0
"""Depth comes in whole millimetres, and leaves in metres."""
_DOWNLOAD = "python -m mani_skill.utils.download_asset -y"
"""ManiSkill's own command, without its questions."""


class MissingAssets(CannotSimulate):
    """Files of a task or a robot are not on this machine; the text names the command that downloads them."""


@dataclass(frozen=True, slots=True)
class Task:
    """What to simulate, and how."""

    id: str
    """Registered name, such as "PullCube-v1"."""
    observe: str = "state"
    """"state": all there is to know. "rgb", "rgbd": pictures, and as "state" only what the robot feels and its goal.
    "state+rgb", "state+rgbd": pictures and everything."""
    control: str | None = None
    """What actions mean, such as "pd_ee_delta_pos" or "pd_joint_delta_pos"; None for the robot's first."""
    reward: str = "normalized_dense"
    """"normalized_dense" (at most 1 in each step), "dense", "sparse" (1 when solved) or "none"."""
    robot: str | None = None
    """Another robot than the task's own, such as "fetch"."""
    image_size: int | None = None
    """Height and width of observed pictures; None for the task's own, mostly 128."""
    pictures: bool = False
    """Able to `render` pictures for people."""
    picture_size: int = 256
    """Height and width of pictures for people."""
    modules: Sequence[str] = ()
    """Imported first: they register tasks and robots that ManiSkill does not bring."""
    resets_together: bool | None = None
    """On a GPU, the task's code begins episodes in all environments or in none; None: PutOnPlateInScene25's does."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """Further arguments of ManiSkill's environment, such as `sim_config`."""

    def __post_init__(self) -> None:
        if self.observe not in _MODES:
            raise ValueError(f"observe={self.observe!r} is none of {', '.join(_MODES)}")

    @property
    def draws(self) -> bool:
        """Whether anything must be drawn."""
        return self.pictures or self.observe != "state"


def make(task: Task, num_envs: int, simulation: str, gpu: int | None = None) -> Any:
    """ManiSkill's environment without wrappers, so that nothing but it resets or cuts off episodes.

    Args:
        task: what to make.
        num_envs: how many in it; more than one only on a GPU.
        simulation: "physx_cpu" or "physx_cuda".
        gpu: number of the GPU that simulates and draws; None for the CPU.

    Raises:
        ValueError: no such task, or it has not what was asked for.
        MissingAssets: files must be downloaded first.
        RuntimeError: pictures are asked for where nothing can be drawn.
    """
    spec = find(task.id, task.modules)
    if task.draws and not maniskill_headless.can_draw():
        raise RuntimeError(
            f"{task.id} with observe={task.observe!r}, pictures={task.pictures}: {maniskill_headless.NEEDED}"
        )
    if not maniskill_headless.can_draw():
        maniskill_headless.stand_in()
    if simulation == "physx_cpu":
        maniskill_poses.quicken()
    _refuse_missing(task.id, spec)
    on = "" if gpu is None else f":{gpu}"
    drawing = ("cpu" if gpu is None else f"sapien_cuda{on}") if task.draws else "none"
    arguments: dict[str, Any] = {
        **spec.default_kwargs,
        "num_envs": num_envs,
        "obs_mode": _MODES[task.observe],
        "reward_mode": task.reward,
        "control_mode": task.control,
        "sim_backend": f"{simulation}{on}",
        "render_backend": drawing,
        "render_mode": "rgb_array" if task.pictures else None,
        "human_render_camera_configs": {"width": task.picture_size, "height": task.picture_size},
    }
    if task.image_size is not None:
        arguments["sensor_configs"] = {"width": task.image_size, "height": task.image_size}
    if task.robot is not None:
        arguments["robot_uids"] = task.robot
    try:
        return spec.cls(**{**arguments, **task.options})
    except NotImplementedError as error:  # ManiSkill's way to say that it has no such mode
        raise ValueError(f"{task.id} cannot be made so: {error}") from error
    except (AttributeError, TypeError) as error:
        if not task.draws and drawing == "none":
            error.add_note(f"{task.id} may be one of the few tasks that cannot do without a renderer: {_RENDERER}")
        raise


_RENDERER = f"try pictures=True; {maniskill_headless.NEEDED}"


def find(id: str, modules: Sequence[str] = ()) -> Any:
    """ManiSkill's specification of a task.

    Args:
        id: registered name.
        modules: imported first.

    Raises:
        ImportError: ManiSkill is not installed.
        ValueError: nothing is registered under that name.
    """
    fresh = "mani_skill.envs" not in sys.modules
    try:
        import mani_skill.envs  # noqa: F401  registers ManiSkill's own tasks
        from mani_skill.utils.registration import REGISTERED_ENVS
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] != "mani_skill":
            raise
        raise ImportError(f"{id} needs ManiSkill: pip install 'rlinf[maniskill]'") from error
    for module in modules:
        importlib.import_module(module)
    if fresh:
        # ManiSkill collects garbage whenever it builds or closes a scene. Most of that time, 0.2 s, goes into objects
        # of imported modules, which live as long as the process: setting them aside makes building ten times as fast.
        gc.collect()
        gc.freeze()
    if id not in REGISTERED_ENVS:
        near = difflib.get_close_matches(id, REGISTERED_ENVS, 3)
        raise ValueError(
            f"ManiSkill has no task {id!r}{'; near it: ' + ', '.join(near) if near else ''}. "
            "A task of another package is known once `modules` names the module that registers it"
        )
    return REGISTERED_ENVS[id]


def _refuse_missing(id: str, spec: Any) -> None:
    """Say what must be downloaded for a task, instead of asking on the terminal whether to."""
    from mani_skill.utils import assets, download_asset

    wanted = [part for name in spec.asset_download_ids or () for part in _sources(name)]
    if missing := sorted({name for name in wanted if not assets.is_data_source_downloaded(name)}):
        raise MissingAssets(f"{id} needs {', '.join(missing)}, which are not on this machine: run `{_DOWNLOAD} {id}`")
    # A robot's files are looked for deep inside, and ManiSkill's question is the only place to learn of it.
    download_asset.prompt_yes_no = _answer


def _answer(question: str) -> bool:
    """In the place of ManiSkill's question on the terminal."""
    named = re.search(r"Robot (\S+) has assets", question)
    command = f": run `{_DOWNLOAD} {named[1]}`" if named else ""
    raise MissingAssets(f"{question.partition('. Would')[0]}, but they are not on this machine{command}")


def _sources(name: str) -> list[str]:
    from mani_skill.utils import assets

    return assets.expand_data_group_into_individual_data_source_ids(name) if name in assets.DATA_GROUPS else [name]


def read(observed: Any) -> Observation:
    """What ManiSkill shows, as ours: n rows on its own device, copied.

    Args:
        observed: a tensor [n, S], or a dictionary with "sensor_data" by camera.

    Raises:
        ValueError: cameras differ in size.
    """
    if isinstance(observed, Tensor):
        return {"state": observed.float()}
    felt = [observed["state"]] if "state" in observed else _leaves({key: observed[key] for key in ("agent", "extra")})
    rows = {"state": torch.cat([part.reshape(len(part), -1).float() for part in felt], 1)}
    cameras = list(observed["sensor_data"].values())
    if len({camera["rgb"].shape[1:3] for camera in cameras}) > 1:
        sizes = {name: tuple(camera["rgb"].shape[1:3]) for name, camera in observed["sensor_data"].items()}
        raise ValueError(f"cameras differ in size, {sizes}: set image_size")
    rows["rgb"] = torch.cat([camera["rgb"] for camera in cameras], -1)
    if "depth" in cameras[0]:
        rows["depth"] = torch.cat([camera["depth"] for camera in cameras], -1) / _MILLIMETRES
    return rows


def words(env: Any) -> list[str] | None:
    """What each environment is to do, in words, where a task has them: those of the Bridge data set's scenes do."""
    ask = getattr(env, "get_language_instruction", None)
    return None if ask is None else [str(text) for text in ask()]


def _leaves(tree: Mapping[str, Any]) -> Iterator[Tensor]:
    for value in tree.values():
        if isinstance(value, Mapping):
            yield from _leaves(value)
        else:
            yield value


def observation_spec(env: Any) -> dict[str, ArraySpec]:
    """Arrays that `read` gives."""
    return {name: ArraySpec(tuple(rows.shape[1:]), rows.dtype) for name, rows in read(env._init_raw_obs).items()}


def action_spec(env: Any, id: str) -> ActionSpec:
    """Bounds of an action.

    Raises:
        ValueError: several robots act at once, each by numbers of its own.
    """
    space = env.single_action_space
    if not getattr(space, "shape", None):
        raise ValueError(f"{id} acts by {space}: tasks of several robots are not taken")
    return ActionSpec(torch.as_tensor(space.low).float(), torch.as_tensor(space.high).float())
