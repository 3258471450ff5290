"""Does ManiSkill step on the GPU, and on the right one?"""

from __future__ import annotations

import torch

from benchmarks.gpu.checks.judging import Bound, judge, required
from benchmarks.gpu.scale import NotRun, Outcome, Scale

SIMULATED = (
    Bound("steps", least=8),
    Bound("rewards_not_finite", most=0),
    Bound("device", equals="cuda:0", needs="a GPU that simulates"),
)


def maniskill(scale: Scale) -> Outcome:
    """Environments of one task: reset, and random actions."""
    required("mani_skill", "which simulates")
    from rlinf.envs.base import CannotSimulate, Simulator
    from rlinf.envs.maniskill import ManiSkill, ManiSkillBatched

    count = scale.of(64, 2)
    kind: type[Simulator] = ManiSkill if scale.rehearse else ManiSkillBatched
    try:
        simulator = kind(count, id="PushCube-v1", control="pd_ee_delta_pos")  # type: ignore[call-arg]
    except (CannotSimulate, ImportError, ValueError) as error:
        raise NotRun(f"{kind.__name__} cannot simulate here: {error}") from error
    observed = simulator.reset(torch.arange(count), torch.arange(count))
    lost = taken = 0
    width = simulator.action_spec.size
    device = next(iter(observed.values())).device
    for _ in range(8):
        moved = simulator.step(torch.zeros(count, width, device=device), torch.ones(count, dtype=torch.bool))
        lost += int((~moved.reward.isfinite()).sum())
        taken += 1
    return judge(scale, {"steps": taken, "rewards_not_finite": lost, "device": str(moved.reward.device)}, SIMULATED)
