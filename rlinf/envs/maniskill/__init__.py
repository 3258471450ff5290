"""Robot tasks of ManiSkill 3, on the CPU and on a GPU."""

from rlinf.envs.maniskill.cpu import ManiSkill
from rlinf.envs.maniskill.gpu import ManiSkillBatched

__all__ = ["ManiSkill", "ManiSkillBatched"]
