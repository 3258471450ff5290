"""ManiSkill 3 on the CPU and on a GPU: tasks by their ids, observations as ours, and mends of what it lacks.

On the CPU, N simulations of one task are stepped one after the other in one process; `workers.py` puts such simulators
into processes, one per core. An episode follows from its seed and its actions bit for bit, which ManiSkill alone does
not give: PhysX solves contacts in an order that remembers earlier episodes, and bodies keep how long they have lain
still. After another history, one episode in ten that had contacts was seen to end differently. So every reset moves the
bodies into a new physics scene (0.3 ms; building all anew would take 20).

On a GPU, N simulations of one task are all in one, and everything stays there. It differs from the CPU's in three ways,
all PhysX's. An episode does not repeat bit for bit. The seeds of one reset are used together: equal seeds of a reset
give equal starts, but a start also depends on which other seeds were reset with it. And a state is that of bodies and
joints: what a task draws when an episode begins, and keeps elsewhere, is not in it.

Whatever is missing is said in one message that names the command which brings it; nothing asks on the terminal, as
ManiSkill does by itself.

Two functions change the process for good. `stand_in` is for a machine that cannot draw: ManiSkill made without a
renderer draws nothing, but describes colours and textures all the same, and SAPIEN makes a description only where it
finds a Vulkan device. Plain objects in the place of those descriptions let physics, states and rewards work on any
machine.

`quicken` makes ManiSkill's small sums on the CPU in a third of the time. ManiSkill multiplies quaternions number by
number, in forty operations of torch on tensors of one row; it makes a row of seven numbers by three tensors, looks for
NaN in a tensor by numpy, and hands joints their targets as tensors of one number. With hand control that is the larger
part of a step. The functions that replace them do the same sums in the same order, so that every bit comes out the
same; what is on a GPU goes ManiSkill's way.
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

import numpy as np
import torch
from torch import Tensor

from rlinf.envs.base import (
    ActionSpec,
    ArraySpec,
    CannotRender,
    CannotSimulate,
    Moved,
    Observation,
    SerialSimulator,
    Simulator,
    State,
    Transition,
    check_arguments,
    stacked_trees,
    tree_on_cpu,
    tree_rows,
)
from rlinf.runtime.base.tensors import enter_device

NEEDED = (
    "drawing needs a Vulkan device: a GPU's driver, or Mesa's software renderer 23.1 or newer. "
    "`make renderer` installs the latter; by hand: apt-get install libvulkan1 mesa-vulkan-drivers "
    "(on Debian 12 with -t bookworm-backports, since its own Mesa is too old)"
)
"""Advice where pictures are asked for and cannot be drawn."""

_DESCRIPTIONS = ("RenderMaterial", "RenderTexture2D")
"""Classes that tasks and loaders of robots make without asking whether anything can be drawn."""


class _Description:
    """Takes everything that is said of a material or a texture, and knows nothing else."""

    def __init__(self, *args: Any, **named: Any):
        self.__dict__.update(named)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # copying and pickling ask for these, and must hear that there are none
            raise AttributeError(name)
        return _ignore if name.startswith("set_") else None


def _ignore(*args: Any, **named: Any) -> None:
    """Stand-in for a setter, which does nothing."""


def can_draw() -> bool:
    """True if SAPIEN has a Vulkan device that it can draw with."""
    import sapien.render

    if issubclass(sapien.render.RenderMaterial, _Description):
        return False
    try:  # SAPIEN's own `Device.can_render` says no to the software renderer, which draws well
        sapien.render.RenderMaterial()
    except RuntimeError:
        return False
    return True


def stand_in() -> None:
    """Put stand-ins wherever SAPIEN's descriptions are known by now; modules imported later find them there."""
    import sapien.render
    import sapien.wrapper.urdf_loader  # it copies the names when it is imported, so it must have been

    for name in _DESCRIPTIONS:
        original = getattr(sapien.render, name)
        if issubclass(original, _Description):
            continue
        replacement = type(name, (_Description,), {})
        for module in list(sys.modules.values()):
            names = getattr(module, "__dict__", {})
            if names.get(name) is original:
                setattr(module, name, replacement)


_PLACES = np.array([[0, 1, 2, 3], [1, 0, 3, 2], [2, 3, 0, 1], [3, 2, 1, 0]])
"""Row k: which numbers of the right factor meet number k of the left one."""
_SIGNS = np.array([[1, 1, 1, 1], [-1, 1, -1, 1], [-1, 1, 1, -1], [-1, -1, 1, 1]], np.float32)
"""By which sign."""
_CPU = torch.device("cpu")
_INVERSE = np.array([1, -1, -1, -1], np.float32)


def quicken() -> None:
    """Let ManiSkill compute by the functions here."""
    from mani_skill.agents.base_agent import BaseAgent
    from mani_skill.utils.structs.articulation import Articulation
    from mani_skill.utils.structs.pose import Pose

    if Pose.__mul__ is not _times:
        _original.update(times=Pose.__mul__, inverse=Pose.inv, create=Pose.create.__func__)
        Pose.__mul__, Pose.inv, Pose.create = _times, _inverse, classmethod(_create)
    if BaseAgent.set_action is not _act:
        _original.update(act=BaseAgent.set_action, aim=Articulation.set_joint_drive_targets)
        BaseAgent.set_action, Articulation.set_joint_drive_targets = _act, _aim


_original: dict[str, Any] = {}
"""ManiSkill's own, for what is not on the CPU."""


def product(first: np.ndarray, right: np.ndarray) -> np.ndarray:
    """Products of quaternions, real part first, float32 [n, 4] or [1, 4].

    sum over k = 0, 1, 2, 3 of left_k * (plus or minus the numbers of right), added in this order
    """
    terms = first[:, :, None] * (right[:, _PLACES] * _SIGNS)
    result: np.ndarray = terms[:, 0] + terms[:, 1]
    result += terms[:, 2]
    result += terms[:, 3]
    return result


def rotated(turn: np.ndarray, points: np.ndarray) -> np.ndarray:
    """Points [n, 3] turned by unit quaternions [n, 4]: q p q*."""
    pure = np.zeros((len(points), 4), np.float32)
    pure[:, 1:] = points
    return product(product(turn, pure), turn * _INVERSE)[:, 1:]


def _times(self: Any, other: Any) -> Any:
    other = type(self).create(other, device=self.device)
    if not (_is_plain(self.raw_pose) and _is_plain(other.raw_pose)):
        return _original["times"](self, other)
    mine, theirs = self.raw_pose.numpy(), other.raw_pose.numpy()
    turn = product(mine[:, 3:], theirs[:, 3:])
    result = np.empty((len(turn), 7), np.float32)
    result[:, :3] = mine[:, :3] + rotated(mine[:, 3:], theirs[:, :3])
    result[:, 3:] = np.where(turn[:, :1] < 0, -turn, turn)
    return type(self)(raw_pose=torch.from_numpy(result))


def _inverse(self: Any) -> Any:
    if not _is_plain(self.raw_pose):
        return _original["inverse"](self)
    mine = self.raw_pose.numpy()
    result = mine.copy()
    result[:, 4:] = -mine[:, 4:]
    result[:, :3] = rotated(result[:, 3:], -mine[:, :3])
    return type(self)(raw_pose=torch.from_numpy(result))


def _create(kind: Any, pose: Any, device: Any = None) -> Any:
    import sapien

    if device is not None and device != _CPU and torch.device(device) != _CPU:
        return _original["create"](kind, pose, device)
    single = pose[0] if type(pose) is list and len(pose) == 1 else pose
    if type(single) is sapien.Pose:
        raw = np.empty((1, 7), np.float32)
        raw[0, :3], raw[0, 3:] = single.p, single.q
        return kind(raw_pose=torch.from_numpy(raw))
    if type(single) is kind and single.raw_pose.device == _CPU:
        return kind(raw_pose=single.raw_pose)
    return _original["create"](kind, pose, device)


def _act(self: Any, action: Any) -> None:
    if not isinstance(action, Tensor) or action.device != _CPU:
        _original["act"](self, action)
    elif bool(torch.isnan(action).any()):
        raise ValueError(f"an action must be numbers, not NaN: {action}")
    else:
        self.controller.set_action(action)


def _aim(self: Any, targets: Any, joints: Any = None, joint_indices: Any = None) -> None:
    if self.scene.gpu_sim_enabled or not isinstance(targets, Tensor) or targets.dtype != torch.float32:
        _original["aim"](self, targets, joints, joint_indices)
        return
    numbers = targets[0].numpy()
    for index, joint in enumerate(joints):
        joint._objs[0].drive_target = numbers[index : index + 1]


def _is_plain(rows: Tensor) -> bool:
    return rows.device.type == "cpu" and rows.dtype == torch.float32 and rows.ndim == 2 and not rows.requires_grad


_MODES = {
    "state": "state",
    "rgb": "rgb",
    "rgbd": "rgb+depth",
    "state+rgb": "state+rgb",
    "state+rgbd": "state+rgb+depth",
}
"""ManiSkill's name of each choice of `Task.observe`."""
_MILLIMETRES = 1000.0
"""Depth comes in whole millimetres, and leaves in metres."""
_DOWNLOAD = "python -m mani_skill.utils.download_asset -y"
"""ManiSkill's own command, without its questions."""


class MissingAssets(CannotSimulate):
    """Files of a task or a robot are not on this machine; the text names the command that downloads them."""


@dataclass(frozen=True, slots=True)
class Task:
    """A task to simulate, and its observations and actions."""

    id: str
    """Registered name, such as "PullCube-v1"."""
    observe: str = "state"
    """"state": all there is to know. "rgb", "rgbd": pictures, and as "state" only what the robot feels and its goal.
    "state+rgb", "state+rgbd": pictures and everything."""
    control: str | None = None
    """Controller that gives actions their meaning, such as "pd_ee_delta_pos" or "pd_joint_delta_pos"; None for the
    robot's first."""
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
        """True if anything must be drawn."""
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
    if task.draws and not can_draw():
        raise RuntimeError(f"{task.id} with observe={task.observe!r}, pictures={task.pictures}: {NEEDED}")
    if not can_draw():
        stand_in()
    if simulation == "physx_cpu":
        quicken()
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


_RENDERER = f"try pictures=True; {NEEDED}"


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
    """Convert ManiSkill's observation into ours: n rows on its own device, copied.

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
    """Instruction of each environment, in words, where a task has them: those of the Bridge data set's scenes do."""
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


class _OfTask(Simulator):
    """A simulator whose options are the fields of `Task`."""

    _task: Task

    @classmethod
    def check_options(cls, options: Mapping[str, Any]) -> None:
        """See `Simulator.check_options`."""
        check_arguments(cls.__name__, Task, options)
        Task(**options)

    def _check_pictures(self) -> None:
        if not self._task.pictures:
            raise CannotRender(
                f"{self._task.id} has no pictures: set trials.options={{pictures: true}}, or trials.videos=0"
            )


class ManiSkill(_OfTask, SerialSimulator):
    """Environments of ManiSkill 3, simulated on the CPU.

    Args:
        num_envs: how many.
        task: the fields of `tasks.Task`, such as id="PullCube-v1", control="pd_ee_delta_pos".

    Raises:
        ImportError: ManiSkill is not installed.
        ValueError: no such task, or it has not what was asked for.
        MissingAssets: files must be downloaded first; the text names the command.
        RuntimeError: pictures are asked for where nothing can be drawn; the text names the packages.
    """

    def __init__(self, num_envs: int, **task: Any):
        self._task = Task(**task)
        with torch.inference_mode():
            self._envs = [make(self._task, 1, "physx_cpu") for _ in range(num_envs)]
            self._bodies = [_bodies(env) for env in self._envs]
            self.observation_spec = observation_spec(self._envs[0])
        self.action_spec = action_spec(self._envs[0], self._task.id)
        self.max_steps = find(self._task.id).max_episode_steps
        self._track(num_envs)

    def instructions(self) -> list[str] | None:
        texts = [words(env) for env in self._envs]
        return None if texts[0] is None else [text for each in texts for text in each or ()]

    def render(self, env_ids: Tensor) -> Tensor:
        self._check_pictures()
        with torch.inference_mode():
            pictures = [self._envs[env].render_rgb_array() for env in env_ids.tolist()]
        return torch.cat(pictures)

    def close(self) -> None:
        for env in self._envs:
            env.close()

    @torch.inference_mode()
    def _begin(self, env: int, seed: int) -> dict[str, np.ndarray]:
        simulation = self._envs[env]
        if simulation.reconfiguration_freq == 0:
            _renew(simulation)
            for body in self._bodies[env]:
                body.put_to_sleep()  # a body wakes with its full time until it may sleep again
                body.wake_up()
        return _row(simulation.reset(seed=seed)[0])

    @torch.inference_mode()  # a tenth faster: ManiSkill does hundreds of tiny operations in a step
    def _move(self, env: int, action: np.ndarray) -> Moved:
        observed, reward, terminated, _, info = self._envs[env].step(torch.from_numpy(action)[None])
        success = bool(info["success"]) if "success" in info else None
        return Moved(_row(observed), float(reward), bool(terminated), False, success)


def _row(observed: Any) -> dict[str, np.ndarray]:
    return {name: array[0].numpy() for name, array in read(observed).items()}


def _bodies(env: Any) -> list[Any]:
    """Bodies of a simulation that move by themselves and may fall asleep."""
    from sapien.physx import PhysxRigidDynamicComponent

    parts = [entity.find_component_by_type(PhysxRigidDynamicComponent) for entity in env.scene.sub_scenes[0].entities]
    return [part for part in parts if part is not None and not part.kinematic]


def _renew(env: Any) -> None:
    """Move everything into a new physics scene, so that nothing of earlier episodes is left in the solver."""
    import sapien
    from sapien.physx import PhysxCpuSystem

    scene = env.scene
    old = scene.sub_scenes[0]
    env._set_scene_config()  # PhysX's settings are the process's, and a new scene takes them as they are
    physics = PhysxCpuSystem()
    physics.timestep = scene.px.timestep
    drawing = [old.render_system] if scene.can_render() else []
    entities = sorted(old.entities, key=lambda entity: entity.per_scene_id)
    for entity in entities:
        entity.remove_from_scene()
    new = sapien.Scene([physics, *drawing])
    for entity in entities:  # in their order, by which they are numbered and drawn
        entity.add_to_scene(new)
    scene.sub_scenes[0] = new
    scene.px = physics


_TOGETHER = "InScene25"
"""In the ids of tasks whose code asserts that all environments are reset at once."""


class ManiSkillBatched(_OfTask):
    """Environments of ManiSkill 3, simulated on one GPU.

    Args:
        num_envs: how many.
        task: the fields of `tasks.Task`, such as id="PullCube-v1", control="pd_ee_delta_pos".

    Raises:
        ImportError, ValueError, MissingAssets: as `ManiSkill` does.
        RuntimeError: there is no CUDA device, or nothing can be drawn where pictures are asked for.
    """

    def __init__(self, num_envs: int, **task: Any):
        self._task = Task(**task)
        if not torch.cuda.is_available():
            raise CannotSimulate(f"{self._task.id}: ManiSkillBatched needs a CUDA device; on the CPU, take ManiSkill")
        self.device = enter_device()  # of this process or of whoever started it; PhysX itself would take GPU 0
        together = self._task.resets_together
        self.resets_together = _TOGETHER in self._task.id if together is None else together
        self._env = make(self._task, num_envs, "physx_cuda", self.device.index)
        self.num_envs = num_envs
        self.observation_spec = observation_spec(self._env)
        self.action_spec = action_spec(self._env, self._task.id)
        self.max_steps = find(self._task.id).max_episode_steps
        self._seeds = torch.arange(num_envs)

    @torch.no_grad()
    def reset(self, seeds: Tensor, env_ids: Tensor) -> Observation:
        rows = env_ids.to(self.device)
        self._seeds[env_ids] = seeds
        all_seeds = self._seeds.clone()
        all_seeds[0] = seeds[0]  # ManiSkill seeds torch by the first, whichever environments it resets
        observed, _ = self._env.reset(seed=all_seeds.tolist(), options={"env_idx": rows})
        first = {seed: row for row, seed in reversed(list(enumerate(seeds.tolist())))}
        source = env_ids[[first[seed] for seed in seeds.tolist()]].to(self.device)
        if not torch.equal(source, rows):  # members of a group: each takes over the start of its first
            observed = self._put(tree_rows(self._env.get_state_dict(), source), rows)
        return {name: array[rows] for name, array in read(observed).items()}

    @torch.no_grad()
    def step(self, actions: Tensor, active: Tensor) -> Transition:
        observed, reward, terminated, _, info = self._env.step(actions)
        return Transition(
            observation=read(observed),
            reward=reward.float().clone(),
            terminated=terminated.clone(),
            truncated=torch.zeros_like(terminated),
            success=info["success"].clone() if "success" in info else None,
        )

    def instructions(self) -> list[str] | None:
        return words(self._env)

    @torch.no_grad()
    def render(self, env_ids: Tensor) -> Tensor:
        self._check_pictures()
        return self._env.render_rgb_array()[env_ids.to(self.device)]

    def save(self) -> list[State]:
        everything = self._env.get_state_dict()
        return [
            {"bodies": tree_on_cpu(tree_rows(everything, torch.tensor([env], device=self.device)))}
            for env in range(self.num_envs)
        ]

    @torch.no_grad()
    def restore(self, states: Sequence[State], env_ids: Tensor) -> None:
        self._put(stacked_trees([state["bodies"] for state in states], self.device), env_ids.to(self.device))

    def close(self) -> None:
        self._env.close()

    def _put(self, state: dict[str, Any], env_ids: Tensor) -> Any:
        """Put environments into states, and look."""
        self._env.set_state_dict(state, env_ids)
        if "controller" in state:
            whole = _placed(self._env.agent.get_controller_state(), env_ids, state["controller"])
            self._env.agent.set_controller_state(whole)
        return self._env.get_obs()


def _placed(tree: Any, rows: Tensor, new: Any) -> Any:
    """A copy of a tree whose rows are those of another."""
    if isinstance(tree, dict):
        return {name: _placed(part, rows, new[name]) for name, part in tree.items() if name in new}
    whole = tree.clone()
    whole[rows] = new
    return whole
