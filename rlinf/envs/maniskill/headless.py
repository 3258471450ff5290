"""ManiSkill on a machine that cannot draw.

ManiSkill draws nothing where it was made without a renderer, but describes colours and textures all the same, and
SAPIEN makes a description only where it finds a Vulkan device. `stand_in` puts plain objects in the place of those
descriptions, so that physics, states and rewards work on any machine. In: nothing. Out: the process, changed for good.
"""

from __future__ import annotations

import sys
from typing import Any

NEEDED = (
    "drawing needs a Vulkan device: a GPU's driver, or Mesa's software renderer 23.1 or newer. "
    "`make renderer` installs the latter; by hand: apt-get install libvulkan1 mesa-vulkan-drivers "
    "(on Debian 12 with -t bookworm-backports, since its own Mesa is too old)"
)
"""What to do where pictures are asked for and cannot be drawn."""

_DESCRIPTIONS = ("RenderMaterial", "RenderTexture2D")
"""Classes that tasks and loaders of robots make without asking whether anything can be drawn."""


class _Description:
    """Takes everything that is said of a material or a texture, and knows nothing else."""

    def __init__(self, *said: Any, **named: Any):
        self.__dict__.update(named)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # copying and pickling ask for these, and must hear that there are none
            raise AttributeError(name)
        return _ignore if name.startswith("set_") else None


def _ignore(*said: Any, **named: Any) -> None:
    """In the place of a setter."""


def can_draw() -> bool:
    """Whether SAPIEN finds a Vulkan device that it can draw with."""
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
            known = getattr(module, "__dict__", {})
            if known.get(name) is original:
                setattr(module, name, replacement)
