"""Environments of gymnasium: by id, one after the other or as a vector environment."""

from rlinf.envs.gymnasium.single import Gymnasium
from rlinf.envs.gymnasium.vector import GymnasiumVector

__all__ = ["Gymnasium", "GymnasiumVector"]
