"""Meta-World on the CPU: N simulations, each of a task that its seed chooses, one after the other in one process.

Each task is simulated once; rows of one task take turns in it, and the start of each goal is computed once and then
loaded. Tasks and suites are looked up by name in Meta-World's registry, with words for what each task asks for; nothing
of Meta-World is imported before.

A simulation begins from a goal's vector, steps, and is saved and loaded to the last bit. Meta-World alone does not
repeat an episode: where some tasks put their objects depends on how often they were reset before. Here every episode
begins as in a simulation that was just made. A state is what MuJoCo integrates, the two arrays of its model that tasks
write to, and the numbers that the task keeps beside them: so little that all episodes of a task in one process take
turns in one simulation, which costs less than models that push each other out of the cache.

Pictures are drawn by MuJoCo with OpenGL, the right way up. One context draws all simulations of a task. On a machine
without OpenGL an error names what is missing.
"""

from __future__ import annotations

import importlib
import inspect
import os
import sys
from collections.abc import Mapping, Sequence
from functools import cache, partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rlinf.config.schema import nearest
from rlinf.envs.base import ActionSpec, ArraySpec, CannotSimulate, Moved, SerialSimulator, State, WrongOption

INSTRUCTIONS: Mapping[str, str] = {
    "assembly-v3": "Pick up a nut and place it onto a peg",
    "basketball-v3": "Dunk the basketball into the basket",
    "bin-picking-v3": "Grasp the puck from one bin and place it into another bin",
    "box-close-v3": "Grasp the cover and close the box with it",
    "button-press-topdown-v3": "Press a button from the top",
    "button-press-topdown-wall-v3": "Bypass a wall and press a button from the top",
    "button-press-v3": "Press a button",
    "button-press-wall-v3": "Bypass a wall and press a button",
    "coffee-button-v3": "Push a button on the coffee machine",
    "coffee-pull-v3": "Pull a mug from a coffee machine",
    "coffee-push-v3": "Push a mug under a coffee machine",
    "dial-turn-v3": "Rotate a dial 180 degrees",
    "disassemble-v3": "Pick a nut out of a peg",
    "door-close-v3": "Close a door with a revolving joint",
    "door-lock-v3": "Lock the door by rotating the lock clockwise",
    "door-open-v3": "Open a door with a revolving joint",
    "door-unlock-v3": "Unlock the door by rotating the lock counter-clockwise",
    "drawer-close-v3": "Push and close a drawer",
    "drawer-open-v3": "Open a drawer",
    "faucet-close-v3": "Rotate the faucet clockwise",
    "faucet-open-v3": "Rotate the faucet counter-clockwise",
    "hammer-v3": "Hammer a screw on the wall",
    "hand-insert-v3": "Insert the gripper into a hole",
    "handle-press-side-v3": "Press a handle down sideways",
    "handle-press-v3": "Press a handle down",
    "handle-pull-side-v3": "Pull a handle up sideways",
    "handle-pull-v3": "Pull a handle up",
    "lever-pull-v3": "Pull a lever down 90 degrees",
    "peg-insert-side-v3": "Insert a peg sideways",
    "peg-unplug-side-v3": "Unplug a peg sideways",
    "pick-out-of-hole-v3": "Pick up a puck from a hole",
    "pick-place-v3": "Pick and place a puck to a goal",
    "pick-place-wall-v3": "Pick a puck, bypass a wall and place the puck",
    "plate-slide-back-side-v3": "Get a plate from the cabinet sideways",
    "plate-slide-back-v3": "Get a plate from the cabinet",
    "plate-slide-side-v3": "Slide a plate into a cabinet sideways",
    "plate-slide-v3": "Slide a plate into a cabinet",
    "push-back-v3": "Pull a puck to a goal",
    "push-v3": "Push the puck to a goal",
    "push-wall-v3": "Bypass a wall and push a puck to a goal",
    "reach-v3": "Reach a goal position",
    "reach-wall-v3": "Bypass a wall and reach a goal",
    "shelf-place-v3": "Pick and place a puck onto a shelf",
    "soccer-v3": "Kick a soccer into the goal",
    "stick-pull-v3": "Grasp a stick and pull a box with the stick",
    "stick-push-v3": "Grasp a stick and push a box using the stick",
    "sweep-into-v3": "Sweep a puck into a hole",
    "sweep-v3": "Sweep a puck off the table",
    "window-close-v3": "Push and close a window",
    "window-open-v3": "Push and open a window",
}
"""The fifty tasks, and what each is to do in the words of Meta-World's paper (arXiv:1910.10897, appendix A)."""

SUITES: Mapping[str, tuple[str, str | None]] = {
    "MT10": ("MT10_V3", None),
    "MT25": ("MT25_V3", None),
    "MT50": ("MT50_V3", None),
    "ML10-train": ("ML10_V3", "train"),
    "ML10-test": ("ML10_V3", "test"),
    "ML25-train": ("ML25_V3", "train"),
    "ML25-test": ("ML25_V3", "test"),
    "ML45-train": ("ML45_V3", "train"),
    "ML45-test": ("ML45_V3", "test"),
}
"""Suites: the name of each in `metaworld.env_dict`, and its part. The goal is seen in those that begin with MT."""


class MissingMetaWorld(CannotSimulate):
    """Meta-World is not installed; the text names the command that brings it."""


def registry() -> Any:
    """Meta-World's module of tasks and suites.

    Raises:
        MissingMetaWorld: it is not installed.
    """
    try:
        from metaworld import env_dict
    except ModuleNotFoundError as error:
        if error.name not in ("metaworld", "mujoco"):
            raise
        raise MissingMetaWorld("Meta-World is not installed: pip install 'rlinf[metaworld]'") from error
    return env_dict


def chosen_tasks(suite: str | None, tasks: Sequence[str] | None) -> list[str]:
    """Names of the tasks that a configuration asks for, in Meta-World's order where it names a suite.

    Args:
        suite: one of `SUITES`, or None.
        tasks: names of tasks; with a suite, those of it that are taken.

    Raises:
        WrongOption: neither is given, or a name is unknown.
    """
    if suite is None and not tasks:
        raise WrongOption("tasks", f"name tasks, such as [reach-v3], or a suite: {', '.join(SUITES)}")
    if suite is None:
        names = list(INSTRUCTIONS)
    elif suite in SUITES:
        name, part = SUITES[suite]
        names = list(getattr(registry(), name) if part is None else getattr(registry(), name)[part])
    else:
        raise WrongOption("suite", f"suite={suite!r} is none of {', '.join(SUITES)}")
    if isinstance(tasks, str):
        raise WrongOption("tasks", f"it must be a list of names: [{tasks}]")
    for task in tasks or ():
        if task not in names:
            near = nearest(str(task), names)
            there = "Meta-World" if suite is None else suite
            raise WrongOption("tasks", f"{there} has no task {task!r}" + (f"; did you mean {near}?" if near else ""))
    return list(tasks) if tasks else names


GOALS = 50
"""Goals that Meta-World draws for each task."""
_NEVER = 1 << 60
"""Steps after which Meta-World refuses to go on: whoever owns the simulator cuts episodes off."""
_KEPT = (bool, int, float, np.generic, type(None))
"""Kinds of a task's own attributes that are part of its state, besides arrays and lists of numbers."""

Snapshot = dict[str, Any]
"""A state as arrays: "physics" float64 [P], "body_pos" [B, 3], "site_pos" [T, 3], "own" by attribute's name."""


@cache
def goal_vectors(task: str, seed: int) -> NDArray[np.float64]:
    """The vectors that Meta-World's own `MT1(task, seed)` draws, of which each fixes objects and goal, [GOALS, V].

    What the arm does between two draws has no part in them, so it is left out.
    """
    import mujoco

    env = _made(task)
    env.np_random = np.random.RandomState(seed)  # the stream of np.random.seed, which Meta-World draws from
    env.seeded_rand_vec, env._freeze_rand_vec, env._set_task_called = True, False, True
    env.do_simulation = lambda *about: mujoco.mj_forward(env.model, env.data)
    vectors = []
    for _ in range(GOALS):
        env.reset()
        vectors.append(env._last_rand_vec)
    return np.array(vectors, np.float64)


class Simulation:
    """The one simulation of a task in this process, which episodes share by turns.

    Args:
        task: its name.
        hidden: whether the goal is left out of the observation, as zeros.
    """

    def __init__(self, task: str, hidden: bool):
        import mujoco

        self._mujoco: Any = mujoco
        self.task = task
        env = _made(task)
        env._partially_observable, env._set_task_called, env._freeze_rand_vec = hidden, True, True
        vars(env).pop("sawyer_observation_space", None)  # kept since the environment was made, when the goal was hidden
        env.max_path_length = _NEVER
        self._env = env
        self._kind = mujoco.mjtState.mjSTATE_INTEGRATION
        self._size = mujoco.mj_stateSize(env.model, self._kind)
        self._fresh = _copied(vars(env))
        self._placed = env.model.body_pos.copy(), env.model.site_pos.copy()
        self._kept: list[str] = []

    @property
    def model(self) -> Any:
        """MuJoCo's model."""
        return self._env.model

    @property
    def data(self) -> Any:
        """MuJoCo's data."""
        return self._env.data

    def begin(self, vector: NDArray[np.float64]) -> NDArray[np.float32]:
        """Begin an episode as in a simulation that was just made; the first observation, [39].

        Args:
            vector: fixes objects and goal, one row of `goal_vectors`.
        """
        vars(self._env).clear()
        vars(self._env).update(_copied(self._fresh))
        self.model.body_pos[:], self.model.site_pos[:] = self._placed
        self._env._last_rand_vec = vector.copy()
        observed, _ = self._env.reset()
        self._kept = [name for name, value in vars(self._env).items() if _is_kept(value)]
        return np.asarray(observed, np.float32)

    def step(self, action: NDArray[np.float32]) -> tuple[NDArray[np.float32], float, bool]:
        """Do one action; the observation [39], Meta-World's reward from 0 to 10, and whether the task is solved."""
        observed, reward, _, _, info = self._env.step(action)
        return np.asarray(observed, np.float32), float(reward), bool(info["success"])

    def save(self) -> Snapshot:
        """The state, from which `load` goes on bit for bit. The simulation must load one before it steps again."""
        physics = np.empty(self._size)
        self._mujoco.mj_getState(self.model, self.data, physics, self._kind)
        attributes = vars(self._env)
        return {
            "physics": physics,
            "body_pos": self.model.body_pos.copy(),
            "site_pos": self.model.site_pos.copy(),
            "own": {name: attributes[name] for name in self._kept},
        }

    def load(self, snapshot: Snapshot) -> None:
        """Go on from a state of this task. The simulation must have begun an episode before."""
        model = self.model
        model.body_pos[:], model.site_pos[:] = snapshot["body_pos"], snapshot["site_pos"]
        self._mujoco.mj_setState(model, self.data, snapshot["physics"], self._kind)
        vars(self._env).update(
            {n: v.copy() if type(v) is np.ndarray or type(v) is list else v for n, v in snapshot["own"].items()}
        )

    def look(self) -> None:
        """After `load`, bring all positions to what the state says, for pictures; a step does so by itself."""
        physics = np.empty(self._size)
        self._mujoco.mj_getState(self.model, self.data, physics, self._kind)
        self._mujoco.mj_forward(self.model, self.data)
        self._mujoco.mj_setState(self.model, self.data, physics, self._kind)  # where the solver starts was moved


def _made(task: str) -> Any:
    """Meta-World's environment of a task, which trusts MuJoCo that its matrices are rotations: a tenth of a step."""
    turns: Any = importlib.import_module("scipy.spatial.transform").Rotation
    kind = registry().ALL_V3_ENVIRONMENTS[task]
    its = vars(sys.modules[kind.__module__])
    if its.get("Rotation") == turns and "assume_valid" in inspect.signature(turns.from_matrix).parameters:
        its["Rotation"] = SimpleNamespace(from_matrix=partial(turns.from_matrix, assume_valid=True))
    return kind()


def packed(snapshot: Snapshot) -> dict[str, Any]:
    """A snapshot of tensors, numbers, lists and dicts alone."""
    own = {name: _tensor(value) for name, value in snapshot["own"].items()}
    return {"own": own, **{name: _tensor(snapshot[name]) for name in ("physics", "body_pos", "site_pos")}}


def unpacked(state: dict[str, Any]) -> Snapshot:
    """The inverse of `packed`."""
    own = {name: _array(value) for name, value in state["own"].items()}
    return {"own": own, **{name: _array(state[name]) for name in ("physics", "body_pos", "site_pos")}}


def _tensor(value: Any) -> Any:
    return torch.from_numpy(np.array(value)) if isinstance(value, np.ndarray | np.generic) else value


def _array(value: Any) -> Any:
    return value.numpy()[()] if isinstance(value, torch.Tensor) else value  # [()]: a number, where there is but one


def _is_kept(value: Any) -> bool:
    if isinstance(value, np.ndarray):
        while isinstance(value.base, np.ndarray):
            value = value.base
        return value.base is None  # others look into MuJoCo's memory, and follow it
    return isinstance(value, _KEPT) or (isinstance(value, list) and all(isinstance(each, _KEPT) for each in value))


def _copied(attributes: dict[str, Any]) -> dict[str, Any]:
    """A copy of attributes, which share only what is not part of the state."""
    return {
        name: value.copy() if isinstance(value, np.ndarray | list) and _is_kept(value) else value
        for name, value in attributes.items()
    }


CAMERAS = ("corner2", "corner", "corner3", "corner4", "topview", "behindGripper", "gripperPOV")
"""Cameras of every task; people see by the first."""
_TURNED = ("corner", "corner2", "corner3", "corner4")
"""Cameras that hang upside down."""
_MOVED = {"corner2": (0.75, 0.075, 0.7)}
"""Where cameras stand that are nearer here than in Meta-World, as data sets and policies have it, in metres."""
NEEDED = (
    "drawing Meta-World needs OpenGL without a display: MUJOCO_GL=egl and `apt-get install libegl1 libgl1-mesa-dri`, "
    "or MUJOCO_GL=osmesa and `apt-get install libosmesa6`"
)
"""Advice where pictures are asked for and cannot be drawn."""


def can_draw() -> bool:
    """True if MuJoCo can draw in this process."""
    try:
        _renderer("<mujoco/>", 8).close()
    except CannotSimulate:
        return False
    return True


class Painter:
    """Draws simulations by some cameras.

    Args:
        cameras: their names; pictures come one behind the other along the channels.
        size: height and width.
    """

    def __init__(self, cameras: tuple[str, ...], size: int):
        self._cameras = cameras
        self._size = size
        self._renderers: dict[str, Any] = {}

    def drawn(self, simulation: Simulation) -> np.ndarray:
        """A picture, uint8 [H, W, 3 k] for k cameras.

        Raises:
            CannotSimulate: there is no OpenGL.
        """
        if simulation.task not in self._renderers:
            self._renderers[simulation.task] = _renderer(simulation.model, self._size)
        renderer = self._renderers[simulation.task]
        pictures = []
        for camera in self._cameras:
            if camera in _MOVED:
                number = simulation.model.camera(camera).id
                simulation.data.cam_xpos[number] = _MOVED[camera]
            renderer.update_scene(simulation.data, camera)
            picture = renderer.render()
            pictures.append(picture[::-1, ::-1] if camera in _TURNED else picture)
        return np.concatenate(pictures, axis=2)

    def close(self) -> None:
        """Give the contexts back."""
        for renderer in self._renderers.values():
            renderer.close()
        self._renderers.clear()


def _renderer(model: Any, size: int) -> Any:
    """MuJoCo's renderer of a model, or of what a text describes."""
    import mujoco

    if not os.environ.get("MUJOCO_GL"):
        os.environ["MUJOCO_GL"] = "egl"  # the only one that needs no display and uses a GPU where one is
        try:
            importlib.reload(mujoco.gl_context)  # MuJoCo looks at the variable when it is imported
        except Exception as error:  # of whatever OpenGL library was found, or was not
            del os.environ["MUJOCO_GL"]
            raise CannotSimulate(f"{NEEDED} ({type(error).__name__}: {error})") from error
    try:
        return mujoco.Renderer(mujoco.MjModel.from_xml_string(model) if isinstance(model, str) else model, size, size)
    except ValueError:  # of a size that the model has no room for
        raise
    except Exception as error:
        raise CannotSimulate(f"{NEEDED} ({type(error).__name__}: {error})") from error


MAX_STEPS = 500
"""Steps of an episode in Meta-World."""
STATE = 39
"""Numbers of Meta-World's observation: hand, gripper and objects now and one step before, and the goal."""
_FELT = 4
"""Numbers at its beginning that the robot itself feels: where the hand is, and how far the gripper is open."""
_MOST_REWARD = 10.0
"""Meta-World's reward where a task is solved."""
_OBSERVE = ("state", "rgb", "state+rgb")
_REWARDS = ("dense", "normalized_dense", "sparse")
_STILL = np.array([0.0, 0.0, 0.0, -1.0], np.float32)
"""No motion, with an open gripper."""


class MetaWorld(SerialSimulator):
    """Environments of Meta-World's tasks.

    The seed of an episode chooses the task, and which of its 50 goals: seed modulo the number of tasks, and the
    quotient modulo 50. The goals are those of Meta-World's own `MT1(task, goal_seed)`, so that another `goal_seed`
    gives goals that were never trained on. An episode begins as in a simulation that was just made.

    Args:
        num_envs: how many.
        suite: "MT10", "MT25", "MT50", or "ML10-train", "ML10-test" and likewise 25 and 45; None if tasks are named.
        tasks: names such as "reach-v3"; with a suite, those of it that are drawn from.
        observe: "state": Meta-World's 39 numbers. "rgb": pictures, and as "state" the four that the robot feels.
            "state+rgb": pictures and all numbers.
        reward: "normalized_dense" (at most 1 in each step), "dense" (at most 10) or "sparse" (1 where it is solved).
        hide_goal: the goal is zeros in the state; None does so in suites that begin with ML.
        number_tasks: which of the tasks it is follows on the state, one-hot.
        goal_seed: of the goals.
        settle: steps without motion at the start of an episode.
        end_on_success: a solved task ends the episode; in Meta-World it goes on until its limit.
        cameras: of the observed pictures: corner, corner2, corner3, corner4, topview, behindGripper, gripperPOV.
        image_size: height and width of the observed pictures.
        picture_size: height and width of pictures for people.

    Raises:
        WrongOption: there is no such suite, task, camera or mode.
        MissingMetaWorld: Meta-World is not installed.
        CannotSimulate: pictures are asked for where nothing can be drawn; the text says what is missing.
    """

    @classmethod
    def check_options(cls, options: Mapping[str, Any]) -> None:
        """See `Simulator.check_options`."""
        super().check_options(options)
        chosen_tasks(options.get("suite"), options.get("tasks"))
        for name, values in (("observe", _OBSERVE), ("reward", _REWARDS)):
            if name in options and options[name] not in values:
                raise WrongOption(name, f"{name}={options[name]!r} is none of {', '.join(values)}")
        cameras = options.get("cameras", CAMERAS[:1])
        if not cameras or isinstance(cameras, str) or not set(cameras) <= set(CAMERAS):
            raise WrongOption("cameras", f"cameras={cameras!r} must be a list of some of {', '.join(CAMERAS)}")

    def __init__(
        self,
        num_envs: int,
        *,
        suite: str | None = None,
        tasks: Sequence[str] | None = None,
        observe: str = "state",
        reward: str = "normalized_dense",
        hide_goal: bool | None = None,
        number_tasks: bool = False,
        goal_seed: int = 0,
        settle: int = 0,
        end_on_success: bool = False,
        cameras: Sequence[str] = ("corner2",),
        image_size: int = 224,
        picture_size: int = 256,
    ):
        MetaWorld.check_options(
            {"suite": suite, "tasks": tasks, "observe": observe, "reward": reward, "cameras": cameras}
        )
        self._tasks = chosen_tasks(suite, tasks)
        self._hidden = hide_goal if hide_goal is not None else suite is not None and suite.startswith("ML")
        self._reward, self._end, self._settle = reward, end_on_success, settle
        self._goal_seed = goal_seed
        self._one_hot = np.eye(len(self._tasks), len(self._tasks) if number_tasks else 0)
        self._felt = _FELT if observe == "rgb" else STATE
        self.max_steps = MAX_STEPS
        self.action_spec = ActionSpec(-torch.ones(4), torch.ones(4))
        self.observation_spec = {"state": ArraySpec((self._felt + self._one_hot.shape[1],), torch.float32)}
        self._eyes = None
        if observe != "state":
            self._eyes = Painter(tuple(cameras), image_size)
            self.observation_spec["rgb"] = ArraySpec((image_size, image_size, 3 * len(cameras)), torch.uint8)
        self._people = Painter(CAMERAS[:1], picture_size)
        self._simulations: dict[str, Simulation] = {}
        self._starts: dict[tuple[str, int], tuple[Snapshot, np.ndarray]] = {}
        self._names = [self._tasks[0]] * num_envs  # the task of each row
        self._inside: dict[str, int | None] = {}  # the row whose episode a simulation holds
        self._left: list[Snapshot | None] = [None] * num_envs  # the episodes of the others
        self._track(num_envs)

    def tasks(self) -> list[str]:
        return list(self._names)

    def instructions(self) -> list[str]:
        return [INSTRUCTIONS[name] for name in self._names]

    def render(self, env_ids: Tensor) -> Tensor:
        pictures = []
        for env in env_ids.tolist():
            simulation = self._enter(env)
            simulation.look()
            pictures.append(self._people.drawn(simulation))
        return torch.from_numpy(np.stack(pictures))

    def save(self) -> list[State]:
        return [
            {
                "task": self._names[env],
                "seed": self._seeds[env],
                "row": {name: torch.from_numpy(array.copy()) for name, array in self._rows[env].items()},
                **packed(self._enter(env).save()),
            }
            for env in range(self.num_envs)
        ]

    def restore(self, states: Sequence[State], env_ids: Tensor) -> None:
        for env, state in zip(env_ids.tolist(), states, strict=True):
            self._seeds[env] = state["seed"]
            self._rows[env] = {name: array.numpy().copy() for name, array in state["row"].items()}
            self._put(env, state["task"], unpacked(state))

    def close(self) -> None:
        for painter in (self._eyes, self._people):
            if painter is not None:
                painter.close()

    def _restart(self, env: int, seed: int) -> None:
        self._rows[env], self._seeds[env] = self._begin(env, seed), seed

    def _advance(self, env: int, action: np.ndarray) -> Moved:
        moved = self._move(env, action)
        self._rows[env] = moved.row
        return moved

    def _begin(self, env: int, seed: int) -> dict[str, np.ndarray]:
        task, goal = self._tasks[seed % len(self._tasks)], seed // len(self._tasks) % GOALS
        if (task, goal) not in self._starts:
            self._leave(task)
            simulation = self._simulation(task)
            observed = simulation.begin(goal_vectors(task, self._goal_seed)[goal])
            for _ in range(self._settle):
                observed, *_ = simulation.step(_STILL)
            self._starts[task, goal] = simulation.save(), observed
        start, observed = self._starts[task, goal]
        self._put(env, task, start)
        if self._eyes is not None:
            self._enter(env).look()
        return self._seen(self._enter(env), observed)

    def _move(self, env: int, action: np.ndarray) -> Moved:
        simulation = self._enter(env)
        observed, reward, solved = simulation.step(action)
        if self._reward == "sparse":
            reward = float(solved)
        elif self._reward == "normalized_dense":
            reward /= _MOST_REWARD
        return Moved(self._seen(simulation, observed), reward, solved and self._end, False, solved)

    def _seen(self, simulation: Simulation, observed: np.ndarray) -> dict[str, np.ndarray]:
        number = self._one_hot[self._tasks.index(simulation.task)]
        row = {"state": np.concatenate((observed[: self._felt], number), dtype=np.float32)}
        if self._eyes is not None:
            row["rgb"] = self._eyes.drawn(simulation)
        return row

    def _put(self, env: int, task: str, snapshot: Snapshot) -> None:
        """Put an environment into this state."""
        if self._inside.get(self._names[env]) == env:
            self._inside[self._names[env]] = None
        self._names[env], self._left[env] = task, snapshot

    def _enter(self, env: int) -> Simulation:
        """The simulation of an environment's task, in which its episode goes on."""
        task = self._names[env]
        simulation = self._simulation(task)
        if self._inside.get(task) != env:
            if (snapshot := self._left[env]) is None:
                raise RuntimeError(f"environment {env} has no episode yet: call reset() first")
            self._leave(task)
            simulation.load(snapshot)
            self._inside[task] = env
        return simulation

    def _leave(self, task: str) -> None:
        """Keep the state of the episode that is in a simulation."""
        if (inside := self._inside.get(task)) is not None:
            self._left[inside] = self._simulations[task].save()
            self._inside[task] = None

    def _simulation(self, task: str) -> Simulation:
        if task not in self._simulations:
            self._simulations[task] = Simulation(task, self._hidden)
            self._simulations[task].begin(goal_vectors(task, self._goal_seed)[0])  # its own arrays, as in an episode
        return self._simulations[task]
