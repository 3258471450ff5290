"""Keys of RLinf's runs on text as ours."""

from __future__ import annotations

from typing import Any

from rlinf.cli.conversion.rules import (
    Absent,
    Given,
    Ours,
    Outcome,
    Rule,
    Same,
    Table,
    absent,
    choice,
    same,
    to,
    unless,
    when,
)
from rlinf.cli.conversion.tables.rlinf_common import (
    CODE,
    COMMON,
    FSDP,
    KERNELS,
    MEGATRON,
    OFFLOAD,
    OPTIMIZER,
    PLACEMENT,
    lora,
    placed,
)
from rlinf.cli.conversion.tables.shared import (
    AGGREGATIONS,
    clip_range,
    engine_argument,
    every,
    files,
    kl_penalty,
    precision,
    top_k,
)

DEFAULTS: Ours = {}
_RECIPES = {
    "grpo": "grpo",
    "gae": "ppo",
    "reinpp": "reinforce_pp",
    "reinpp_baseline": "reinforce_pp_baseline",
    "rloo": "rloo",
}
_ROLES = {
    "actor": "trainer",
    "rollout": "rollout",
    "reward": "judge",
    "critic": "critic",
    "inference": "",
    "actor_inference": "",
    "critic_inference": "",
}


def _critic(given: Given) -> bool:
    return bool(given.get("critic.use_critic_model", False))


def _recipe(key: str, value: Any, given: Given) -> Outcome:
    name = _RECIPES.get(value)
    if name == "reinforce_pp" and given.get("algorithm.use_reinpp_baseline", False):
        name = "reinforce_pp_baseline"
    return {"algorithm.name": name} if name else Absent(f"{value}; recipes: {', '.join(_RECIPES)}")


def _kl(key: str, value: Any, given: Given) -> Outcome:
    beta = given.get("algorithm.kl_beta", 0.0)
    if not beta:
        return Same("kl_beta is 0")
    kind = given.get("algorithm.kl_penalty_type", "low_var_kl")
    return kl_penalty("loss", kind, beta, "kl_penalty_type")


def _micro(key: str, value: Any, given: Given) -> Outcome:
    if given.get("runner.enable_dynamic_batch_size", False):
        return {"trainer.micro_batch_tokens": given.get("runner.max_tokens_per_mbs", 2048)}
    rows = given.get("algorithm.training_batch_size_per_gpu", 1)
    return {"trainer.micro_batch_tokens": rows * given.get("runner.seq_length", 2048)}


def _longest(key: str, value: Any, given: Given) -> Outcome:
    if isinstance(value, int):
        return {"rollout.max_new_tokens": value}
    return Absent("set rollout.max_new_tokens")


def _normalised(key: str, value: Any, given: Given) -> Outcome:
    estimator = given.get("algorithm.adv_type", "grpo")
    if estimator == "gae":
        return {"algorithm.advantage.whiten": bool(value)}
    return (
        {"algorithm.advantage.scale": "std" if value else "none"} if estimator == "grpo" else Same("the recipe's own")
    )


def _reward(key: str, value: Any, given: Given) -> Outcome:
    return (
        {"reward.function": "rlinf.rewards.math"} if value == "math" else Absent("name a function in reward.function")
    )


def _checkpoint(key: str, value: Any, given: Given) -> Outcome:
    return (
        Same("the checkpoint of model.path")
        if value is None
        else Absent("checkpoints here are Hugging Face directories")
    )


_MODEL: Table = {
    "precision": precision("trainer.dtype"),
    "model_path": to("model.path"),
    "model_type": same("the model's config.json says it"),
    "is_lora": same("lora_rank holds where it is on"),
    "tensor_model_parallel_size": to("trainer.parallel.tensor"),
    "pipeline_model_parallel_size": to("trainer.parallel.pipeline"),
    "context_parallel_size": to("trainer.parallel.context"),
    "expert_model_parallel_size": to("trainer.parallel.expert"),
    "expert_tensor_parallel_size": unless(1, "experts are whole", "experts are whole on each of their processes"),
    "recompute_granularity": to("trainer.gradient_checkpointing", of=lambda how: how is not None),
    "recompute_method": same("every block is computed again, where it is asked for"),
    "recompute_num_layers": same("every block is computed again, where it is asked for"),
    "sequence_parallel": same("on where trainer.parallel.tensor is above 1"),
    "moe_aux_loss_coeff": unless((0, 0.0), "no auxiliary loss", "algorithm.router_aux_loss, with trainer.backend=fsdp"),
    "seq_length": same("data.max_prompt_tokens and rollout.max_new_tokens say it"),
    "encoder_seq_length": same("data.max_prompt_tokens and rollout.max_new_tokens say it"),
    "*": same("the model's config.json says it, or it is left to the back end"),
}
_ACTOR: Table = {
    "group_name": same("roles have their names"),
    "training_backend": choice("trainer.backend", {"fsdp": "fsdp", "megatron": "megatron"}, "a back end"),
    "checkpoint_load_path": _checkpoint,
    "seed": to("seed"),
    "global_batch_size": same("the trainer's processes share each minibatch, however many they are"),
    "micro_batch_size": same("algorithm.training_batch_size_per_gpu says it"),
    "enable_dp_load_balance": same("micro-batches are always balanced over ranks by tokens"),
    "calculate_flops": same("every run ends with how far a step was from what is possible"),
    "mcore_gpt": KERNELS,
    "spec_name": KERNELS,
    "tokenizer.tokenizer_model": to("model.tokenizer"),
    "tokenizer.trust_remote_code": CODE,
    "tokenizer.*": same("tokenizers are the fast ones, and sequences are packed"),
    "model.lora_rank": lora("model.lora.r"),
    "model.lora_path": lora("model.lora.path"),
    **dict.fromkeys(("offload_optimizer", "offload_weight", "offload_grad", "enable_offload"), OFFLOAD),
    **{f"model.{key}": rule for key, rule in _MODEL.items()},
    **{f"fsdp_config.{key}": rule for key, rule in FSDP.items()},
    **{f"megatron.{key}": rule for key, rule in MEGATRON.items()},
    **OPTIMIZER,
}
_ALGORITHM: Table = {
    "group_size": to("algorithm.group_size"),
    "n_minibatches": to("algorithm.minibatches"),
    "training_batch_size_per_gpu": _micro,
    "rollout_batch_size_per_gpu": same("the engine takes as many answers as fit, rollout.max_rows"),
    "logprob_forward_micro_batch_size": same("log-probs are computed in the same micro-batches"),
    "val_rollout_batch_size_per_gpu": same("all problems are asked at once; the engine takes as many as fit"),
    "recompute_logprobs": unless(
        False,
        "ratios begin at the engine's log-probs",
        "ratios begin at the engine's log-probs; algorithm.correction={cap: 2.0} recomputes and corrects",
    ),
    "shuffle_rollout": unless(
        False, "minibatches are drawn in a new order in any case", "minibatches are drawn in a new order"
    ),
    "value_clip": when(_critic, to("algorithm.critic.clip"), "there is no critic"),
    "critic_warmup_steps": when(_critic, to("critic.head_start"), "there is no critic"),
    "loss_type": unless(("actor", "actor_critic"), "the recipe's", "a loss of another kind: algorithm.loss, or flow"),
    "loss_agg_func": choice("algorithm.aggregation.how", AGGREGATIONS, "how losses of tokens become one"),
    "kl_beta": _kl,
    "kl_penalty_type": _kl,
    "ratio_clip_eps": clip_range("algorithm", ""),
    "clip_ratio_low": clip_range("algorithm", "low"),
    "clip_ratio_high": clip_range("algorithm", "high"),
    "clip_ratio_c": to("algorithm.loss.dual_clip"),
    "entropy_bonus": to("algorithm.entropy_bonus"),
    "calculate_entropy": same("entropies are always measured"),
    "adv_type": _recipe,
    "gamma": when(_critic, to("algorithm.advantage.gamma"), "there is no critic"),
    "gae_lambda": when(_critic, to("algorithm.advantage.lam"), "there is no critic"),
    "normalize_advantages": _normalised,
    "early_stop_imp_ratio": absent("algorithm.rejection leaves out whole answers, nothing stops a step early"),
    "use_valid_token_scale": unless(False, "off", "losses are divided by all learned tokens"),
    "sampling_params.use_greedy": unless(False, "answers are sampled", "set rollout.temperature=0"),
    "sampling_params.do_sample": unless(True, "answers are sampled", "set rollout.temperature=0"),
    "sampling_params.temperature": to("rollout.temperature"),
    "sampling_params.top_k": top_k("rollout.top_k"),
    "sampling_params.top_p": to("rollout.top_p"),
    "sampling_params.repetition_penalty": unless(1.0, "none", "none: it would not be the policy that is learned"),
    "sampling_params.max_new_tokens": _longest,
    "sampling_params.min_new_tokens": unless((0, 1), "none", "no shortest answer"),
}
_ROLLOUT: Table = {
    "group_name": same("roles have their names"),
    "gpu_memory_utilization": to("rollout.engine_args.memory_share"),
    "model_dir": to("model.path"),
    "model_arch": same("the model's config.json says it"),
    "model.model_path": to("model.path"),
    "model.model_type": same("the model's config.json says it"),
    "precision": precision("rollout.dtype"),
    "model.precision": precision("rollout.dtype"),
    "enforce_eager": engine_argument("enforce_eager", "--disable-cuda-graph"),
    "distributed_executor_backend": engine_argument("distributed_executor_backend"),
    "disable_log_stats": engine_argument("disable_log_stats"),
    "detokenize": same("tokens come and go; texts are made where they are read"),
    "padding": same("nothing is padded"),
    "eos": unless((), "the tokenizer's", "rollout.stop_token_ids"),
    "rollout_backend": choice("rollout.engine", {"sglang": "sglang", "vllm": "vllm"}, "an engine"),
    "return_logprobs": same("the log-probs of all sampled tokens are kept"),
    "tensor_parallel_size": to("rollout.engine_args.tensor_parallel"),
    "pipeline_parallel_size": unless(1, "none", "rollout.engine_args.args, untested"),
    "validate_weight": same("buckets have checksums"),
    "validate_save_dir": same("belongs to validate_weight"),
    "print_outputs": same("samples.jsonl has answers of every step"),
    "max_running_requests": to("rollout.max_rows"),
    "cuda_graph_max_bs": engine_argument("max_cudagraph_capture_size", "--cuda-graph-max-bs"),
}
_SGLANG = {
    "attention_backend": "--attention-backend",
    "decode_log_interval": "--decode-log-interval",
    "use_torch_compile": "--enable-torch-compile",
    "torch_compile_max_bs": "--torch-compile-max-bs",
}
_DATA: Table = {
    "type": same("columns and reward say it"),
    "dataset_name": same("data.train says it"),
    "max_prompt_length": to("data.max_prompt_tokens"),
    "filter_prompt_by_length": to("data.overlong", of=lambda on: "drop" if on else "error"),
    "rollout_batch_size": to("algorithm.prompts_per_step"),
    "val_rollout_batch_size": same("all problems are asked at once; the engine takes as many as fit"),
    "num_workers": same("rows are made beside the steps"),
    "prompt_key": to("data.columns.prompt"),
    "answer_key": to("data.columns.answer"),
    "apply_chat_template": to("data.chat"),
    "shuffle": to("data.shuffle"),
    "validation_shuffle": same("evaluation problems keep their order"),
    "seed": to("seed"),
    "train_data_paths": files("data.train"),
    "val_data_paths": files("evaluation.data"),
}
_CRITIC: Table = {
    "use_critic_model": same("the recipe says whether there is one"),
    "optim.lr": to("critic.lr"),
    "optim.weight_decay": to("critic.weight_decay"),
    "optim.clip_grad": to("critic.grad_clip"),
    "lr_sched.lr_warmup_iters": to("critic.warmup_steps"),
    "lr_sched.lr_decay_style": unless("constant", "constant", "the critic's learning rate stays after warm-up"),
    "tokenizer.*": same("the policy's"),
    "*": same("trainer and critic share back end, precision and how they lie"),
}
_REWARD: Table = {
    "group_name": same("roles have their names"),
    "use_reward_model": unless(False, "a function scores", "reward_model.path names a model"),
    "reward_type": _reward,
    "reward_scale": unless(1.0, "1", "write it into your reward function, or algorithm.advantage.scale makes it void"),
    "tokenizer.*": same("a reward takes text and tokens"),
}


def _server(engine: str, rule: Rule) -> Rule:
    def chosen(key: str, value: Any, given: Given) -> Outcome:
        other = given.get("rollout.rollout_backend") != engine
        return Same("of the other engine") if other else rule(key, value, given)

    return chosen


def _vllm(key: str, value: Any, given: Given) -> Outcome:
    return engine_argument(key.rpartition(".")[2])(key, value, given)


TABLE: Table = {
    **COMMON,
    f"{PLACEMENT}*": placed(_ROLES),
    "runner.val_check_interval": every("evaluation.every"),
    "runner.enable_dynamic_batch_size": same("micro-batches are always counted in tokens"),
    "runner.max_tokens_per_mbs": _micro,
    **{f"algorithm.{key}": rule for key, rule in _ALGORITHM.items()},
    **{f"rollout.{key}": rule for key, rule in _ROLLOUT.items()},
    **{f"rollout.sglang.{key}": _server("sglang", engine_argument(key, word)) for key, word in _SGLANG.items()},
    "rollout.vllm.*": _server("vllm", _vllm),
    **{f"data.{key}": rule for key, rule in _DATA.items()},
    **{f"actor.{key}": rule for key, rule in _ACTOR.items()},
    **{f"inference.fsdp_config.{key}": same("log-probs are computed by the trainer") for key in ("*",)},
    **{f"critic.{key}": when(_critic, rule, "there is no critic") for key, rule in _CRITIC.items()},
    **{f"reward.{key}": rule for key, rule in _REWARD.items()},
}
