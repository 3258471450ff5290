"""Pictures of Meta-World's simulations, drawn by MuJoCo with OpenGL.

In: a simulation. Out: pictures the right way up. One context draws all simulations of a task. A machine without OpenGL
is told what is missing.
"""

from __future__ import annotations

import importlib
import os
from typing import Any

import numpy as np

from rlinf.envs.base import CannotSimulate
from rlinf.envs.metaworld.simulation import Simulation

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
"""What to do where pictures are asked for and cannot be drawn."""


def can_draw() -> bool:
    """Whether MuJoCo can draw in this process."""
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
