"""Rules and words that several tables have: files, precision, arguments of servers, kinds of KL penalties."""

from __future__ import annotations

from pathlib import PurePath
from typing import Any

from rlinf.cli.conversion.rules import Absent, Given, Outcome, Rule, Same, choice

NODES, DEVICES, RESUME = "launch.nodes", "launch.devices", "launch.resume"
"""What is no key of ours, but an argument of the command that starts a run."""
PRECISIONS = {
    **dict.fromkeys(("bf16", "bf16-mixed", "bfloat16"), "bfloat16"),
    **dict.fromkeys(("fp32", "32", "float32"), "float32"),
}
AGGREGATIONS = {
    each: each for each in ("token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm")
}
KL_KINDS = {"low_var_kl": "k3", "k3": "k3", "kl": "k1", "k1": "k1", "mse": "k2", "k2": "k2"}
SCHEDULES = {"constant": "constant", "linear": "linear", "cosine": "cosine"}
OFFLOADED = "roles that do not fit side by side are parked in host memory by themselves, placement.device_memory_gb"
SERVER = "for the server: rollout.engine_args.args"


def precision(ours: str) -> Rule:
    """bf16 or fp32."""
    return choice(ours, PRECISIONS, "what it is computed in; fp16 is not, and auto takes bfloat16 on GPUs")


def every(ours: str) -> Rule:
    """Once in so many steps; not above 0 means never."""

    def rule(key: str, value: Any, given: Given) -> Outcome:
        return {ours: value if isinstance(value, int) and value > 0 else 0}

    return rule


def files(ours: str) -> Rule:
    """Files of data: one is one, several are a list with commas where ours takes one."""

    def rule(key: str, value: Any, given: Given) -> Outcome:
        named = value if isinstance(value, list) else [value]
        if not named or named[0] is None:
            return Same("null leaves the default")
        if len(named) > 1:
            return Absent(f"{len(named)} files: join them, or name a directory with all of them in {ours}")
        return {ours: str(named[0])}

    return rule


def top_k(ours: str) -> Rule:
    """All tokens: 0 for us; -1, 0 or more than any vocabulary for others."""

    def rule(key: str, value: Any, given: Given) -> Outcome:
        return {ours: value if isinstance(value, int) and 0 < value < 1_000_000 else 0}

    return rule


def engine_argument(ours: str, sglang: str | None = None) -> Rule:
    """An argument of the server: by name for vLLM; for SGLang as a word of its command line, where it has one."""

    def rule(key: str, value: Any, given: Given) -> Outcome:
        engine = given.get("rollout.rollout_backend") or given.get("actor_rollout_ref.rollout.name")
        if value is None:
            return Same("null leaves the server's default")
        if engine == "vllm":
            return {f"rollout.engine_args.args.{ours}": value}
        if value is False:
            return Same("off is the server's default")
        if sglang is not None:
            return {"rollout.engine_args.args": [sglang] if value is True else [sglang, str(value)]}
        return Absent(SERVER)

    return rule


def reward_function(path: str, name: str) -> str:
    """The dotted path of a function in a file, which is found where it lies in the working directory."""
    return f"{PurePath(path).stem}.{name}"


def kl_penalty(place: str, kind: str, beta: float, named: str) -> Outcome:
    """A KL penalty.

    Args:
        place: "loss" or "reward".
        kind: how they call its estimator.
        beta: its weight.
        named: their key of the estimator.
    """
    if kind not in KL_KINDS:
        return Absent(f"{named} {kind}; there is {', '.join(KL_KINDS)}")
    return {"algorithm.kl": {"place": place, "kind": KL_KINDS[kind], "beta": beta}}


def clip_range(section: str, side: str) -> Rule:
    """A bound on ratios: of one side, or, for "", of those sides that have none of their own in their section."""

    def rule(key: str, value: Any, given: Given) -> Outcome:
        own = [each for each in ("low", "high") if given.get(f"{section}.clip_ratio_{each}") is None]
        sides = [side] if side else own
        if not sides:
            return Same("clip_ratio_low and clip_ratio_high are set")
        return Same("null is not set") if value is None else {f"algorithm.loss.clip_{each}": value for each in sides}

    return rule
