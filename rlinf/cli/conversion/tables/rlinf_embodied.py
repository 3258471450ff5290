"""Keys of RLinf's runs in which a policy acts as ours."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from rlinf.cli.conversion.rules import Absent, Given, Ours, Outcome, Same, Table, absent, choice, same, to, unless, when
from rlinf.cli.conversion.tables.rlinf_common import CODE, COMMON, FSDP, OFFLOAD, OPTIMIZER, PLACEMENT, lora, placed
from rlinf.cli.conversion.tables.shared import AGGREGATIONS, every, precision

DEFAULTS: Ours = {"algorithm.epochs": 1}
_ROLES = {"actor": "trainer", "rollout": "policy", "env": "env", "reward": "", "inference": ""}
_POLICIES = {
    "openvla": "openvla",
    "openvla_oft": "openvla-oft",
    "openpi": "pi0",
    "gr00t": "gr00t",
    "mlp_policy": "mlp",
    "cnn_policy": "cnn",
}
_SIMULATORS = {"libero": "rlinf.envs.adapters.libero.Libero"}
"""Those whose options are translated too."""
_LEVELS = {"token_level": "token", "action_level": "action", "chunk_level": "chunk"}


def _recipe(key: str, value: Any, given: Given) -> Outcome:
    names = {"gae": "ppo", "grpo": "grpo", "embodied_grpo": "grpo", "embodied_gae": "ppo"}
    return {"algorithm.name": names[value]} if value in names else Absent(f"{value}; there is ppo, grpo and sac")


def _normalised(key: str, value: Any, given: Given) -> Outcome:
    if "grpo" in str(given.get("algorithm.adv_type")):
        return {"algorithm.advantage.scale": "std" if value else "none"}
    return {"algorithm.advantage.whiten": bool(value)}


def _gae(ours: str) -> Any:
    def rule(key: str, value: Any, given: Given) -> Outcome:
        return Same("the recipe has none") if "grpo" in str(given.get("algorithm.adv_type")) else {ours: value}

    return rule


def _critic(ours: str) -> Any:
    return _gae(ours)


def _values(key: str, value: Any, given: Given) -> Outcome:
    if "grpo" in str(given.get("algorithm.adv_type")):
        return {"policy.settings.value_level": None}  # no critic
    return choice("policy.settings.value_level", _LEVELS, "for what one value stands")(key, value, given)


def _huber(key: str, value: Any, given: Given) -> Outcome:
    if "grpo" in str(given.get("algorithm.adv_type")):
        return Same("the recipe has no critic")
    return {"algorithm.critic.error": "huber", "algorithm.critic.delta": value}


def _bounds(key: str, value: Any, given: Given) -> Outcome:
    if not given.get("algorithm.filter_rewards", False):
        return Same("filter_rewards is off")
    low, high = given.get("algorithm.rewards_lower_bound", 0.0), given.get("algorithm.rewards_upper_bound", 1.0)
    scale = given.get("algorithm.reward_coef", 1.0)
    return {"algorithm.filter_returns": [low / scale, high / scale]}


def _envs(key: str, value: Any, given: Given) -> Outcome:
    groups = given.get("algorithm.num_group_envs")
    if groups is not None:
        return {"env.num_envs": groups * given.get("algorithm.group_size", 1)}
    return {"env.num_envs": value}


def _image(key: str, value: Any, given: Given) -> Outcome:
    return {"env.options.image_size": value[0] if isinstance(value, list) and value else value}


def _unsaid(key: str) -> Callable[[Given], bool]:
    return lambda given: given.get(key) is None


def _suite(key: str, value: Any, given: Given) -> Outcome:
    kind = given.get("env.train.env_type", given.get("env.train.simulator_type"))
    return {"env.options.suite": value} if kind == "libero" else Absent("the simulator's own: env.options")


def _crop(key: str, value: Any, given: Given) -> Outcome:
    """Their models read it on RoboTwin alone; elsewhere they show whole pictures, whatever it says."""
    robotwin = given.get("env.train.env_type") == "robotwin"
    return {"policy.settings.crop": 0.9 if value and robotwin else 1.0}


def _head(key: str, value: Any, given: Given) -> Outcome:
    return Same("the recipe says whether there is a critic")


_ALGORITHM: Table = {
    "auto_reset": same("environments begin anew as their episodes end"),
    "ignore_terminations": to("env.ignore_terminations"),
    "use_fixed_reset_state_ids": same("env.group_size begins a group alike"),
    "use_ordered_reset_state_ids": same("evaluation goes through starts in order"),
    "normalize_advantages": _normalised,
    "kl_penalty": unless(("kl", "kl_penalty"), "kl_beta is 0", "no KL penalty"),
    "kl_beta": unless((0, 0.0), "none", "policies that act are not held to a reference"),
    "group_size": to("env.group_size"),
    "update_epoch": to("algorithm.epochs"),
    "n_chunk_steps": to("policy.horizon"),
    "n_eval_chunk_steps": same("an episode's end says it"),
    "num_group_envs": _envs,
    "rollout_epoch": unless(1, "one", "more environments in its place: env.num_envs, or a longer policy.horizon"),
    "eval_rollout_epoch": same("trials.episodes says how many"),
    "reward_type": _values,
    "logprob_type": choice("policy.settings.level", _LEVELS, "for what one ratio stands"),
    "entropy_type": same("as logprob_type"),
    "adv_type": _recipe,
    "loss_type": same("the recipe's"),
    "loss_agg_func": choice("algorithm.aggregation.how", AGGREGATIONS, "how losses become one"),
    "entropy_bonus": to("algorithm.entropy_bonus"),
    "clip_ratio_high": to("algorithm.loss.clip_high"),
    "clip_ratio_low": to("algorithm.loss.clip_low"),
    "clip_ratio_c": to("algorithm.loss.dual_clip"),
    "value_clip": _critic("algorithm.critic.clip"),
    "huber_delta": _huber,
    "gamma": _gae("algorithm.advantage.gamma"),
    "gae_lambda": _gae("algorithm.advantage.lam"),
    "reward_coef": when(_unsaid("env.train.reward_coef"), to("env.reward_scale"), "the simulator's file says it"),
    "max_episode_steps": when(
        _unsaid("env.train.max_episode_steps"), to("env.max_steps"), "the simulator's file says it"
    ),
    "filter_rewards": _bounds,
    "rewards_lower_bound": _bounds,
    "rewards_upper_bound": _bounds,
    "sampling_params.do_sample": unless(True, "actions are sampled", "set policy.settings.temperature"),
    "sampling_params.use_greedy": unless(False, "actions are sampled", "set policy.settings.temperature"),
    "sampling_params.temperature_train": to("policy.settings.temperature"),
    "sampling_params.temperature_eval": absent("trials.greedy takes the likeliest action, or samples as in training"),
    "sampling_params.top_k": unless((0, -1), "all tokens", "all tokens"),
    "sampling_params.top_p": unless(1.0, "all tokens", "all tokens"),
    "sampling_params.repetition_penalty": unless(1.0, "none", "none"),
    "length_params.*": same("an action has its number of tokens"),
}
_ENV: Table = {
    "group_name": same("roles have their names"),
    "enable_offload": OFFLOAD,
    "channel.*": same("queues between roles belong to the runtime"),
    "train.total_num_envs": _envs,
    "train.auto_reset": same("environments begin anew as their episodes end"),
    "train.use_fixed_reset_state_ids": same("env.group_size begins a group alike"),
    "train.max_episode_steps": to("env.max_steps"),
    "train.ignore_terminations": to("env.ignore_terminations"),
    "train.env_type": choice("env.simulator", _SIMULATORS, "env.simulator: docs/environments.md has a row for each"),
    "train.simulator_type": choice(
        "env.simulator", _SIMULATORS, "env.simulator: docs/environments.md has a row for each"
    ),
    "train.task_suite_name": _suite,
    "train.group_size": to("env.group_size"),
    "train.num_envs": _envs,
    "train.num_group": same("env.num_envs counts all"),
    "train.num_task": same("env.num_envs counts all"),
    "train.reward_coef": to("env.reward_scale"),
    "train.num_images_in_input": unless(1, "one camera", "policy.settings.views says how many cameras"),
    "train.seed": same("`seed` is of all that is drawn"),
    "train.only_eval": unless(False, "the run trains", "`rlinf evaluate` scores a saved policy"),
    "train.is_eval": unless(False, "the run trains", "`rlinf evaluate` scores a saved policy"),
    "train.video_cfg.*": absent("trials.videos films evaluations"),
    "train.*": absent("the simulator's own: env.simulator and env.options, docs/environments.md"),
    "eval.*": absent("the simulator's own: trials.options, docs/environments.md"),
}
_ROLLOUT: Table = {
    "group_name": same("roles have their names"),
    "channel.*": same("queues between roles belong to the runtime"),
    "mode": same("placement says it"),
    "backend": same("policies act by their own code"),
    "generation_backend": same("policies act by their own code"),
    "model_dir": to("policy.path"),
    "model.model_path": to("policy.path"),
    "model.precision": precision("policy.dtype"),
    "enable_offload": OFFLOAD,
    "pipeline_stage_num": to("env.slices"),
}
_MODEL: Table = {
    "model_name": choice("policy.type", _POLICIES, "a policy"),
    "model_type": choice("policy.type", _POLICIES, "a policy"),
    "model_path": to("policy.path"),
    "precision": precision("policy.dtype"),
    "num_action_chunks": to("policy.settings.chunk"),
    "action_dim": same("the checkpoint's and the simulator's"),
    "unnorm_key": to("policy.settings.statistics"),
    "policy_setup": choice(
        "policy.settings.embodiment", {"widowx_bridge": "maniskill", "libero": "libero"}, "a robot: policy.settings"
    ),
    "center_crop": _crop,
    "add_value_head": _head,
    "value_type": _head,
    "image_size": _image,
    "is_lora": same("lora_rank holds where it is on"),
    "lora_rank": lora("policy.lora.r"),
    "lora_path": lora("policy.lora.path"),
    "gradient_checkpointing": to("policy.gradient_checkpointing"),
    "trust_remote_code": CODE,
    "*": same("the checkpoint's config.json says it"),
}
_ACTOR: Table = {
    "group_name": same("roles have their names"),
    "channel.*": same("queues between roles belong to the runtime"),
    "training_backend": unless("fsdp", "FSDP2", "policies that act learn by FSDP2"),
    "checkpoint_load_path": to("policy.path"),
    "checkpoint_save_path": to("output_dir"),
    "micro_batch_size": to("algorithm.micro_batch"),
    "global_batch_size": to("algorithm.minibatch"),
    "seed": to("seed"),
    "enable_offload": OFFLOAD,
    "tokenizer.*": same("the checkpoint's own"),
    "fsdp.*": same("FSDP2 shards, gathers and prefetches layer by layer"),
    "optim.value_lr": _critic("optimizer.critic_lr"),
    "optim.critic_warmup_steps": to("algorithm.critic_warmup"),
    **{f"model.{key}": rule for key, rule in _MODEL.items()},
    **{
        f"fsdp_config.{key}": to("policy.gradient_checkpointing") if key == "gradient_checkpointing" else rule
        for key, rule in FSDP.items()
    },
    **{key: rule for key, rule in OPTIMIZER.items() if key != "optim.optimizer"},
    "optim.optimizer": same("AdamW"),
}


TABLE: Table = {
    **COMMON,
    f"{PLACEMENT}*": placed(_ROLES),
    "runner.only_eval": unless(False, "the run trains", "`rlinf evaluate` scores a saved policy"),
    "runner.eval_policy_path": unless((), "none", "`rlinf evaluate --model DIR`"),
    "runner.val_check_interval": every("trials.every"),
    "runner.max_prompt_length": same("the policy's own"),
    **{f"algorithm.{key}": rule for key, rule in _ALGORITHM.items()},
    **{f"env.{key}": rule for key, rule in _ENV.items()},
    **{f"rollout.{key}": rule for key, rule in _ROLLOUT.items()},
    **{f"actor.{key}": rule for key, rule in _ACTOR.items()},
    "reward.use_reward_model": unless(False, "the simulator scores", "env.reward names a function"),
    "critic.use_critic_model": same("the recipe says whether there is one"),
}
