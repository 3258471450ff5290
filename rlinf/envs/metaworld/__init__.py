"""Meta-World's fifty tasks of a robot arm, on the CPU."""

from rlinf.envs.metaworld.simulator import MetaWorld

__all__ = ["MetaWorld"]
