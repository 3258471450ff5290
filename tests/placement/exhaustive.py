"""The slow reference of the planner: every plan of a small workload, one by one, each judged from its tree alone.

It shares no code with the planner but the data classes: plans are nested tuples, phases are dictionaries.
"""

import math
import random
from itertools import combinations

from rlinf.placement.profile import Release
from rlinf.placement.workload import Edge, Option, Stage, Sync, Workload


def all_plans(workload):
    """Every tree: ("leaf", stage, option, resident), ("temporal", left, right) or ("spatial", left, right)."""
    needs = {stage.name: set() for stage in workload.stages}
    for _ in workload.stages:
        for edge in workload.edges:
            needs[edge.target] |= needs[edge.source] | {edge.source}
    memo = {}

    def plans(names):
        if names in memo:
            return memo[names]
        made = memo[names] = []
        if len(names) == 1:
            stage = workload.stage(next(iter(names)))
            for option in stage.options:
                made.append(("leaf", stage, option, True))
                if option.parked_bytes < option.active_bytes:
                    made.append(("leaf", stage, option, False))
            return made
        for size in range(1, len(names)):
            for chosen in combinations(sorted(names), size):
                first = frozenset(chosen)
                if any(needs[name] & names - first for name in first):
                    continue
                for left in plans(first):
                    for right in plans(names - first):
                        made.append(("temporal", left, right))
                        made.append(("spatial", left, right))
        return made

    return plans(frozenset(needs))


def judge(tree, workload, chunks):
    """Seconds of a plan; infinite if devices or memory do not suffice."""
    found = _visit(tree, workload, chunks)
    for kind, (count, _, most) in found["devices"].items():
        if count > workload.devices.get(kind, 0) or most > workload.memory.get(kind, math.inf):
            return math.inf
    return found["always"] + sum(_seconds(phase, chunks) for phase in found["phases"])


def _visit(tree, workload, chunks):
    if tree[0] == "leaf":
        _, stage, option, resident = tree
        chunk = option.chunk_seconds.get(chunks, option.seconds / chunks)
        if stage.release is not None:
            chunk = max(chunk, option.seconds / chunks)
        phase = {
            "names": {stage.name}, "alone": min(option.seconds, chunks * chunk), "source": None, "driver": None,
            "latency": 0.0, "period": 0.0,
            "on": 0.0 if resident else option.onload_seconds, "off": 0.0 if resident else option.offload_seconds,
        }  # fmt: skip
        if stage.release is None:
            phase["latency"] = phase["period"] = chunk
        else:
            phase["driver"] = stage.name
            phase["source"] = (stage.release, option.seconds, chunk)
        stays = option.active_bytes if resident else option.parked_bytes
        devices = {option.kind: (option.devices, stays, option.active_bytes)} if option.devices else {}
        return {"names": {stage.name}, "phases": [phase], "always": 0.0, "devices": devices}
    left, right = _visit(tree[1], workload, chunks), _visit(tree[2], workload, chunks)
    always = left["always"] + right["always"]
    for sync in workload.sync:
        ends = {sync.source, sync.target}
        if ends & left["names"] and ends & right["names"]:
            always += sync.apart if tree[0] == "spatial" else sync.together
    made = {"names": left["names"] | right["names"], "always": always, "devices": {}}
    for kind in {*left["devices"], *right["devices"]}:
        (n1, stay1, most1), (n2, stay2, most2) = (side["devices"].get(kind, (0, 0, 0)) for side in (left, right))
        if tree[0] == "temporal":
            made["devices"][kind] = (max(n1, n2), stay1 + stay2, max(most1 + stay2, most2 + stay1))
        else:
            made["devices"][kind] = (n1 + n2, max(stay1, stay2), max(most1, most2))
    tail, head = left["phases"][-1], right["phases"][0]
    crossing = [edge for edge in workload.edges if edge.source in tail["names"] and edge.target in head["names"]]
    if tree[0] == "temporal" or any(edge.barrier for edge in crossing):
        made["phases"] = left["phases"] + right["phases"]
    else:
        joint = _join(tail, head, crossing, chunks)
        made["phases"] = [*left["phases"][:-1], joint, *right["phases"][1:]]
    return made


def _join(tail, head, crossing, chunks):
    link = max((edge.seconds / chunks for edge in crossing), default=0.0)
    latency, period, source, driver = head["latency"], head["period"], tail["source"], tail["driver"]
    if head["source"] is not None:
        fed = any(edge.target == head["driver"] for edge in crossing)
        if source is None and not fed:
            source, driver = head["source"], head["driver"]
        elif not fed:
            latency += head["source"][1]
        else:
            latency, period = latency + head["source"][2], max(period, head["source"][2])
    return {
        "names": tail["names"] | head["names"],
        "alone": None,
        "source": source,
        "driver": driver,
        "latency": tail["latency"] + link + latency if crossing else max(tail["latency"], latency),
        "period": max(tail["period"], period, link),
        "on": max(tail["on"], head["on"]),
        "off": max(tail["off"], head["off"]),
    }


def _seconds(phase, chunks):
    switches = phase["on"] + phase["off"]
    if phase["alone"] is not None:
        return phase["alone"] + switches
    arrivals = [0.0] * chunks
    if phase["source"] is not None:
        curve, makespan, _ = phase["source"]
        arrivals = [share * makespan for share in curve.chunks(chunks)]
    lag = phase["latency"]
    return max(at + lag + (chunks - k) * phase["period"] for k, at in enumerate(arrivals, 1)) + switches


def random_workload(seed, *, chain=False, budget=4000):
    """A workload with V <= 5 stages and at most `budget` plans."""
    rng = random.Random(seed)
    count = rng.choice((1, 2, 3, 3, 4, 4, 5, 5))
    kinds = ["a", "b"] if rng.random() < 0.25 and not chain else ["a"]
    devices = {kind: rng.randint(2, 7) for kind in kinds}
    memory = {kind: rng.randint(8, 25) for kind in kinds if rng.random() < 0.5}
    per_stage = {1: 6, 2: 5, 3: 3, 4: 2, 5: 1}[count]
    while True:
        stages = []
        for index in range(count):
            options = []
            for _ in range(rng.randint(1, per_stage)):
                kind = rng.choice(kinds)
                n = rng.choice((0, *range(1, devices[kind] + 1)) if rng.random() < 0.1 else range(1, devices[kind] + 1))
                work = rng.uniform(1, 20)
                active = rng.randint(1, 8)
                options.append(
                    Option(
                        n, work / max(1, n) ** rng.uniform(0.3, 1.0) + rng.random(), kind, active,
                        rng.randint(0, active), rng.uniform(0, 1), rng.uniform(0, 1),
                        {k: work * rng.uniform(0.1, 0.5) for k in (2, 4) if rng.random() < 0.2},
                    )
                )  # fmt: skip
            curve = sorted(rng.random() for _ in range(rng.randint(0, 5)))
            release = Release((*curve, 1.0)) if rng.random() < (0.5 if index == 0 else 0.1) else None
            stages.append(Stage(f"s{index}", tuple(options), release))
        names = [stage.name for stage in stages]
        edges = []
        for index, target in enumerate(names[1:], 1):
            sources = [names[index - 1]] if chain else [name for name in names[:index] if rng.random() < 0.6]
            for source in sources:
                late = rng.random() < 0.3 and not chain
                edges.append(Edge(source, target, rng.random() < 0.2, rng.uniform(0, 3) if late else 0.0))
        sync = (Sync(names[-1], names[0], rng.random(), 2 * rng.random()),) if count > 1 and rng.random() < 0.5 else ()
        try:
            workload = Workload(tuple(stages), tuple(edges), devices, memory, (rng.choice((1, 2, 3, 4, 8)),), sync)
        except ValueError:
            memory = {}
            continue
        if _count(workload) <= budget:
            return workload
        per_stage = max(1, per_stage - 1)
        if per_stage == 1:  # a set without order has too many plans even so: line it up
            chain = True


def _count(workload):
    needs = {stage.name: set() for stage in workload.stages}
    for _ in workload.stages:
        for edge in workload.edges:
            needs[edge.target] |= needs[edge.source] | {edge.source}
    memo = {}

    def count(names):
        if names in memo:
            return memo[names]
        if len(names) == 1:
            options = workload.stage(next(iter(names))).options
            memo[names] = sum(1 + (option.parked_bytes < option.active_bytes) for option in options)
            return memo[names]
        total = 0
        for size in range(1, len(names)):
            for chosen in combinations(sorted(names), size):
                first = frozenset(chosen)
                if not any(needs[name] & names - first for name in first):
                    total += 2 * count(first) * count(names - first)
        memo[names] = total
        return total

    return count(frozenset(needs))
