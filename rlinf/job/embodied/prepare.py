"""What only importing can show to be wrong with a run in which a policy acts; the counterpart of `job.prepare`.

In: a configuration that is right by itself. Out: its flow and algorithm, and where its roles run, or everything that is
wrong with it.
"""

from __future__ import annotations

from typing import Any

from rlinf.config.embodied import EmbodiedConfig
from rlinf.config.loading import ConfigError
from rlinf.data.step import works_ahead
from rlinf.flows.sac import sac
from rlinf.job.algorithm import acting_flow_of, control_algorithm_of, mistakes_acting
from rlinf.job.callbacks import Callbacks
from rlinf.job.checks.embodied import check_memory, unusable
from rlinf.job.prepare import (
    Prepared,
    _algorithm,
    _flow_problems,
    _imported,
    _planned,
    _problem,
    _tracker_problems,
)
from rlinf.placement.seats import CONTROL


def prepare_embodied(config: EmbodiedConfig, hosts: int) -> Prepared:
    """Import what a configuration names, and check what only that can show; see `job.prepare.prepare`.

    Raises:
        ConfigError: with every mistake.
    """
    algorithm, path = _algorithm(config.algorithm.name, lambda: control_algorithm_of(config)), acting_flow_of(config)
    flow, model, items = _imported(path), _described(config), config.env.num_envs
    in_flow = _flow_problems(path, flow, tuple(kind.name for kind in CONTROL))
    problems = [*in_flow, *unusable(config), *_tracker_problems(config.metrics)]
    problems += [_problem(*each) for each in mistakes_acting(config, algorithm)]
    if config.placement.mode == "auto" and flow is sac and algorithm is None:
        advice = "roles cannot move while something for the next step is under way: name a mode, or take another flow"
        problems.append(_problem("placement.mode", "auto", advice))
    told = Callbacks.of(config.callbacks, problems)
    if problems:
        raise ConfigError(problems)
    staleness = config.algorithm.staleness if works_ahead(flow) else 0
    said: dict[str, Any] = {"flow": flow, "path": path, "model": model, "items": items, "staleness": staleness}
    placed, plan = _planned(config.placement, CONTROL, hosts, **said)
    check_memory(config, placed)
    return Prepared(**said, algorithm=algorithm, kinds=CONTROL, placed=placed, chosen=plan, held={}, callbacks=told)


def _described(config: EmbodiedConfig) -> str:
    env, policy = config.env, config.policy
    settings = " ".join(f"{key}={value}" for key, value in sorted({**env.options, **policy.settings}.items()))
    return f"{policy.type} in {env.simulator} {settings}, {policy.horizon} decisions in {env.slices} slices"
