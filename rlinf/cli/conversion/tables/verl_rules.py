"""Rules for verl's keys of which several make one of ours, or one means something under a condition alone."""

from __future__ import annotations

from typing import Any

from rlinf.cli.conversion.rules import Absent, Given, Outcome, Rule, Same
from rlinf.cli.conversion.tables.shared import RESUME, kl_penalty, reward_function

_ACTOR, _ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"


def critic_learns(given: Given) -> bool:
    return given.get("algorithm.adv_estimator", "gae") == "gae"


def judged(given: Given) -> bool:
    return bool(given.get("reward_model.enable", False))


def minibatches(key: str, value: Any, given: Given) -> Outcome:
    whole = given.get("data.train_batch_size", 1024)
    if not isinstance(value, int) or value < 1 or value >= whole:
        return {"algorithm.minibatches": 1}
    count = round(whole / value)
    return {"algorithm.minibatches": count}


def longest(given: Given) -> int:
    return int(given.get("data.max_prompt_length", 512)) + int(given.get("data.max_response_length", 512))


def micro_rows(key: str, value: Any, given: Given) -> Outcome:
    if given.get(f"{_ACTOR}.use_dynamic_bsz", False):
        return Same("use_dynamic_bsz counts tokens, as ours always does")
    if value is None:
        return Same("null leaves the default")
    return {"trainer.micro_batch_tokens": value * longest(given)}


def micro_tokens(key: str, value: Any, given: Given) -> Outcome:
    if given.get(f"{_ACTOR}.use_dynamic_bsz", False):
        return {"trainer.micro_batch_tokens": value}
    return Same("holds with use_dynamic_bsz alone")


def kl_loss(key: str, value: Any, given: Given) -> Outcome:
    if not given.get(f"{_ACTOR}.use_kl_loss", False):
        return Same("use_kl_loss is off")
    kind = given.get(f"{_ACTOR}.kl_loss_type", "low_var_kl")
    beta = given.get(f"{_ACTOR}.kl_loss_coef", 0.001)
    return kl_penalty("loss", kind, beta, "kl_loss_type")


def kl_reward(key: str, value: Any, given: Given) -> Outcome:
    if not given.get("algorithm.use_kl_in_reward", False):
        return Same("use_kl_in_reward is off")
    kind = given.get("algorithm.kl_penalty", "kl")
    beta = given.get("algorithm.kl_ctrl.kl_coef", 0.001)
    return kl_penalty("reward", kind, beta, "kl_penalty")


def loss_mode(key: str, value: Any, given: Given) -> Outcome:
    if value in (None, "vanilla"):
        return Same("the recipe's own loss")
    if value in ("cispo", "sapo"):
        return {"algorithm.loss.name": value}
    return {"algorithm.loss.ratio": "sequence"} if value == "gspo" else Absent("a loss of your own: algorithm.loss")


def _loss_mode(given: Given) -> Any:
    return given.get(f"{_ACTOR}.policy_loss.loss_mode", "vanilla")


def clips(given: Given) -> bool:
    return _loss_mode(given) != "sapo"


def clips_twice(given: Given) -> bool:
    return _loss_mode(given) not in ("sapo", "cispo")


def is_sapo(given: Given) -> bool:
    return _loss_mode(given) == "sapo"


def gradient_clip(key: str, value: Any, given: Given) -> Outcome:
    if given.get(f"{_ACTOR}.strategy", "fsdp") != "megatron" and value == given.get(f"{_ACTOR}.grad_clip", value):
        return Same("grad_clip says it")
    return Same("null leaves the default") if value is None else {"optimizer.grad_clip": value}


def recomputed(key: str, value: Any, given: Given) -> Outcome:
    return {"trainer.gradient_checkpointing": value is not None}


def correction(key: str, value: Any, given: Given) -> Outcome:
    section = "algorithm.rollout_correction"
    level = given.get(f"{section}.rollout_is")
    if level is None:
        return Same("rollout_is is off")
    if level not in ("token", "sequence"):
        return Absent("a weight for each token or each sequence")
    return {"algorithm.correction": {"cap": float(given.get(f"{section}.rollout_is_threshold", 2.0)), "level": level}}


def warmup(ours: str, section: str) -> Rule:
    def rule(key: str, value: Any, given: Given) -> Outcome:
        steps = given.get(f"{section}.lr_warmup_steps", -1)
        if steps is not None and steps > 0:
            return {ours: steps}
        ratio = given.get(f"{section}.lr_warmup_steps_ratio", 0.0)
        total = given.get("trainer.total_training_steps")
        if not ratio:
            return {ours: 0}
        return Absent(f"a share of all steps: set {ours}") if not total else {ours: round(ratio * total)}

    return rule


def images(key: str, value: Any, given: Given) -> Outcome:
    return Same("a column of that name is recognised") if value in (None, "images") else {"data.columns.images": value}


def overlong(key: str, value: Any, given: Given) -> Outcome:
    if given.get("data.filter_overlong_prompts", False):
        return {"data.overlong": "drop"}
    return {"data.overlong": "error" if given.get("data.truncation", "error") == "error" else "truncate"}


def chosen_reward(key: str, value: Any, given: Given) -> Outcome:
    path = given.get("custom_reward_function.path")
    if path is None and judged(given):
        return Same("the reward model alone scores")
    if path is None:
        return {"reward.function": "rlinf.rewards.math"}
    return {"reward.function": reward_function(path, given.get("custom_reward_function.name", "compute_score"))}


def logger(key: str, value: Any, given: Given) -> Outcome:
    named = value if isinstance(value, list) else [value]
    found: dict[str, Any] = {}
    if "wandb" in named:
        found["metrics.wandb"] = given.get("trainer.project_name", "verl")
    if "swanlab" in named:
        found["metrics.swanlab"] = given.get("trainer.project_name", "verl")
    if "tensorboard" in named:
        found["metrics.tensorboard"] = True
    others = [each for each in named if each not in ("console", "wandb", "swanlab", "tensorboard", None)]
    if others:
        return Absent(f"{', '.join(map(str, others))}: metrics.jsonl has every number")
    return found or Same("the console is always there")


def resumed(key: str, value: Any, given: Given) -> Outcome:
    if value in (None, "disable"):
        return Same("a run begins anew unless --resume is given")
    return {RESUME: "auto" if value == "auto" else given.get("trainer.resume_from_path", "auto")}


def strategy(key: str, value: Any, given: Given) -> Outcome:
    return {"trainer.backend": "megatron" if value == "megatron" else "fsdp"}


def fsdp_size(key: str, value: Any, given: Given) -> Outcome:
    if value in (None, -1):
        return {"trainer.sharding": "shard"}
    if value == given.get("trainer.n_gpus_per_node", 8):
        return {"trainer.sharding": "hybrid"}
    return Absent("slices of that size: trainer.sharding has shard (all), hybrid (a copy per machine) and replicate")


def turns(key: str, value: Any, given: Given) -> Outcome:
    if not given.get(f"{_ROLLOUT}.multi_turn.enable", False):
        return Same("multi_turn is off")
    return Absent("conversations and tools are an agent of yours: agent.function, docs/agents.md")


def steps(key: str, value: Any, given: Given) -> Outcome:
    total = given.get("trainer.total_training_steps")
    if total:
        return {"steps": total}
    return (
        Absent("epochs: set steps to epochs x rows / prompts_per_step") if key.endswith("epochs") else Same("not set")
    )


def sampled(key: str, value: Any, given: Given) -> Outcome:
    greedy = not given.get(f"{_ROLLOUT}.val_kwargs.do_sample", False)
    return {"evaluation.temperature": 0.0 if greedy else given.get(f"{_ROLLOUT}.val_kwargs.temperature", 1.0)}
