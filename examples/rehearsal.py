"""A rehearsal of 1,024 devices: the real flow of GRPO, in virtual time, on roles that sleep instead of computing.

    python examples/rehearsal.py            # seconds on a CPU; all step times are SIMULATED

What each role costs is a law here: some seconds that no device shortens, and work that devices divide. The planner
finds the best placement of each mode, and the rehearsal runs `rlinf.flows.grpo` on it: streams, leases and all.
"""

from rlinf.flows.grpo import grpo
from rlinf.flows.grpo_async import grpo_async
from rlinf.placement.auto import choose_for
from rlinf.placement.profile import Release
from rlinf.placement.simulate import rehearse
from rlinf.placement.workload import Edge, Option, Stage, Workload

DEVICES, PROMPTS = 1024, 512
COSTS = {"rollout": (40.0, 90_000.0), "judge": (2.0, 4_000.0), "trainer": (3.0, 60_000.0)}  # seconds, device-seconds
TAIL = Release((0.2, 0.3, 0.4, 0.45, 0.5, 0.55, 0.6, 0.7, 0.85, 1.0))  # when tenths of the groups leave generation
COLUMNS = 72


def workload():
    sizes = range(32, DEVICES + 1, 32)
    stages = (
        Stage(name, tuple(Option(n, fixed + work / n) for n in sizes), TAIL if name == "rollout" else None)
        for name, (fixed, work) in COSTS.items()
    )
    return Workload(tuple(stages), (Edge("rollout", "judge"), Edge("judge", "trainer")), {"gpu": DEVICES})


def lanes(seen, slowest):
    """A line per role: when any of its processes was at work."""
    for role in COSTS:
        cells = [" "] * COLUMNS
        for worked in seen.work:
            if worked.actor.startswith(f"{role}["):
                for start, end in worked.intervals:
                    for column in range(int(COLUMNS * start / slowest), int(COLUMNS * end / slowest)):
                        cells[column] = "#"
        print(f"{role:>9} |{''.join(cells)}|")


if __name__ == "__main__":
    costs = workload()
    chosen = choose_for(costs, PROMPTS, grpo)
    slowest = max(row.seconds for row in chosen.best_of_modes)
    for row in chosen.best_of_modes:
        sizes = ", ".join(f"{name} {len(role.devices)}" for name, role in row.plan.roles.items())
        seen = rehearse(grpo, row.plan, costs, items=PROMPTS, devices_per_rank=32)
        share = chosen.bound.seconds / seen.seconds
        print(f"{row.mode}: {sizes}; a step takes {seen.seconds:.0f} s, {share:.0%} of the bound")
        lanes(seen, slowest)
    ahead = choose_for(costs, PROMPTS, grpo_async, staleness=1).rows[0]
    print(f"with answers begun one step early, rlinf.flows.grpo_async: {ahead.mode}, {ahead.seconds:.0f} s a step")
