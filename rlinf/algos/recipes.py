"""The algorithms that have a name, each as published; what a paper leaves open is chosen here and said."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from rlinf.algos.algorithms import (
    Aggregation,
    Aipo,
    AlgorithmSpec,
    Cispo,
    Clipped,
    Correction,
    Critic,
    Decoupled,
    Distillation,
    DynamicSampling,
    Gae,
    GroupRelative,
    Kl,
    LeaveOneOut,
    Overlong,
    ReinforcePP,
    Resolve,
    Sapo,
    override,
)
from rlinf.algos.loss_sum import one_of

_PER_ANSWER = Aggregation("seq-mean-token-mean")

_GRPO = AlgorithmSpec("grpo")
"""GRPO (arXiv:2402.03300) as it is run today: the mean over all tokens, no KL. The paper: `deepseek_grpo`."""

_ALL = (
    _GRPO,
    # DeepSeekMath: eq. 3 and 4, section 4.2 (beta 0.04; it never states the clip, 0.2 is the convention). Not as
    # published: k3 is cut at 10 nats (kl.cut), beyond which a token is not pulled back; `kl/cut` tells how many are.
    replace(_GRPO, name="deepseek_grpo", aggregation=_PER_ANSWER, kl=Kl("loss", "k3", 0.04)),
    # arXiv:2503.20783: neither the standard deviation nor the answer's length divides; 3000 is the paper's limit.
    AlgorithmSpec(
        "dr_grpo",
        advantage=GroupRelative("none"),
        aggregation=Aggregation("seq-mean-token-sum-norm", norm_length=3000.0),
    ),
    # arXiv:2503.14476: clip-higher, dynamic sampling, token-level loss, soft overlong punishment; no KL.
    AlgorithmSpec(
        "dapo",
        loss=Clipped(clip_low=0.2, clip_high=0.28),
        shaping=Overlong(longest=20480, cache=4096),
        sampling=DynamicSampling(max_rounds=10),
    ),
    # GRPO with nothing of DAPO but its wider upper bound, which keeps rare tokens alive.
    replace(_GRPO, name="grpo_clip_higher", loss=Clipped(clip_low=0.2, clip_high=0.28)),
    # arXiv:2507.18071, section 5.1.
    AlgorithmSpec("gspo", loss=Clipped(clip_low=3e-4, clip_high=4e-4, ratio="sequence"), aggregation=_PER_ANSWER),
    # arXiv:2506.13585; the upper bound of ScaleRL (arXiv:2510.13786).
    AlgorithmSpec("cispo", loss=Cispo(clip_low=1.0, clip_high=4.0)),
    # arXiv:2511.20347.
    AlgorithmSpec("sapo", loss=Sapo(tau_pos=1.0, tau_neg=1.05), aggregation=_PER_ANSWER),
    # arXiv:2402.14740; clipped, so that a batch may serve for several steps.
    AlgorithmSpec("rloo", advantage=LeaveOneOut()),
    # arXiv:2501.03262.
    AlgorithmSpec("reinforce_pp", advantage=ReinforcePP(), kl=Kl("reward", "k1", 0.001)),
    AlgorithmSpec("reinforce_pp_baseline", advantage=ReinforcePP(baseline=True), kl=Kl("reward", "k1", 0.001)),
    # arXiv:1707.06347, arXiv:1506.02438; for text without discount, dual clip 3 (arXiv:1912.09729).
    AlgorithmSpec(
        "ppo", advantage=Gae(gamma=1.0, lam=1.0), loss=Clipped(dual_clip=3.0), critic=Critic(clip=0.2, delta=10.0)
    ),
    # On-policy distillation (Thinking Machines, 2025).
    AlgorithmSpec("opd", advantage=Distillation()),
    # AReaL (arXiv:2505.24298) on GRPO: tokens of older weights, proximal policy recomputed.
    AlgorithmSpec("async_grpo", loss=Decoupled(clip_low=0.3, clip_high=0.3, dual_clip=3.0, cap=2.0)),
    # The same without the extra forward pass.
    AlgorithmSpec(
        "async_grpo_interpolated",
        loss=Decoupled(clip_low=0.3, clip_high=0.3, dual_clip=3.0, cap=2.0, proximal="interpolate"),
    ),
    # LlamaRL (arXiv:2505.24034); its bound lies between 2 and 10.
    AlgorithmSpec("aipo", loss=Aipo(cap=4.0)),
    # Truncated importance sampling between engine and trainer (Yao et al., 2025), and its masked form (IcePop, 2025).
    replace(_GRPO, name="grpo_tis", correction=Correction(cap=2.0)),
    replace(_GRPO, name="grpo_icepop", correction=Correction(cap=2.0, floor=0.5, outside="mask")),
)

RECIPES = {recipe.name: recipe for recipe in _ALL}
"""Every recipe by its name."""

NAMES = tuple(RECIPES)

ACTING = {
    **RECIPES,
    # As PPO is run on control (arXiv:1707.06347, table 3; arXiv:2006.05990): rewards come all along, and values are of
    # their scale, so they are discounted, and neither the critic's error nor a bad action's loss is bounded.
    "ppo": AlgorithmSpec(
        "ppo", advantage=Gae(gamma=0.99, lam=0.95), loss=Clipped(), critic=Critic(clip=None, error="square")
    ),
}
"""Recipes where policies act in environments."""


def get(
    name: str,
    overrides: Mapping[str, Any] | None = None,
    *,
    resolve: Resolve | None = None,
    acting: bool = False,
) -> AlgorithmSpec:
    """The recipe of that name, with changes.

    Args:
        name: such as "grpo"; `NAMES` has all.
        overrides: see `algorithms.override`.
        resolve: turns a dotted path into the function it names.
        acting: for policies that act; otherwise for text.

    Raises:
        ValueError: no recipe, place, key or choice of that name (the text gives the nearest), or a bad value.
    """
    one_of("algorithm", "name", name, RECIPES)
    return override((ACTING if acting else RECIPES)[name], overrides or {}, resolve=resolve)
