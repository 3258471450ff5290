"""verl's keys (`verl/trainer/config/ppo_trainer.yaml` and its Megatron variant) as ours."""

from __future__ import annotations

from typing import Any

from rlinf.cli.conversion.rules import (
    Ours,
    Rule,
    Table,
    absent,
    choice,
    same,
    to,
    unless,
    when,
)
from rlinf.cli.conversion.tables.shared import (
    AGGREGATIONS,
    DEVICES,
    NODES,
    OFFLOADED,
    SCHEDULES,
    clip_range,
    engine_argument,
    every,
    files,
    precision,
    top_k,
)
from rlinf.cli.conversion.tables.verl_rules import (
    chosen_reward,
    critic_learns,
    fsdp_size,
    images,
    judged,
    kl_loss,
    kl_reward,
    logger,
    loss_mode,
    micro_rows,
    micro_tokens,
    minibatches,
    overlong,
    resumed,
    sampled,
    steps,
    strategy,
    turns,
    warmup,
)

DEFAULTS: Ours = {"optimizer.betas": [0.9, 0.999], "placement.mode": "collocated"}
"""Where verl does otherwise than our defaults without a key for it, or where its key is usually left out."""
_ACTOR, _ROLLOUT, _MODEL = "actor_rollout_ref.actor", "actor_rollout_ref.rollout", "actor_rollout_ref.model"
_RECIPES = {
    "grpo": "grpo",
    "gae": "ppo",
    "rloo": "rloo",
    "reinforce_plus_plus": "reinforce_pp",
    "reinforce_plus_plus_baseline": "reinforce_pp_baseline",
}


_PROFILED = same("every run traces itself; `rlinf trace` draws it")
_SHARDED = same("FSDP2 shards, gathers and prefetches layer by layer")
_OFFLOAD = same(OFFLOADED)
_CODE = unless(False, "only code that transformers ships is run", "code from model directories is never run")
_LOADED = same("files are read by safetensors in slices, as each rank needs them")
_OWN_MICRO = same("log-probs are computed in the same micro-batches, trainer.micro_batch_tokens")

_ACTOR_KEYS: Table = {
    "strategy": strategy,
    "ppo_mini_batch_size": minibatches,
    "ppo_micro_batch_size": micro_rows,
    "ppo_micro_batch_size_per_gpu": micro_rows,
    "use_dynamic_bsz": same("micro-batches are always counted in tokens"),
    "ppo_use_dynamic_bsz": same("micro-batches are always counted in tokens"),
    "ppo_max_token_len_per_gpu": micro_tokens,
    "clip_ratio": clip_range(_ACTOR, ""),
    "clip_ratio_low": clip_range(_ACTOR, "low"),
    "clip_ratio_high": clip_range(_ACTOR, "high"),
    "clip_ratio_c": to("algorithm.loss.dual_clip"),
    "policy_loss.loss_mode": loss_mode,
    "policy_loss.*": same("belongs to other loss modes"),
    "loss_agg_mode": choice("algorithm.aggregation.how", AGGREGATIONS, "how losses of tokens become one"),
    "entropy_coeff": to("algorithm.entropy_bonus"),
    "use_kl_loss": kl_loss,
    "kl_loss_coef": kl_loss,
    "kl_loss_type": kl_loss,
    "use_torch_compile": to("trainer.compile"),
    "ppo_epochs": to("algorithm.epochs"),
    "shuffle": same("minibatches are drawn in a new order in each epoch"),
    "checkpoint.*": same(
        "checkpoints have model, optimizer and all else that a run goes on from, and are written beside it"
    ),
    "optim.lr": to("optimizer.lr"),
    "optim.lr_warmup_steps": warmup("optimizer.warmup_steps", f"{_ACTOR}.optim"),
    "optim.lr_warmup_steps_ratio": warmup("optimizer.warmup_steps", f"{_ACTOR}.optim"),
    "optim.min_lr_ratio": to("optimizer.min_lr_ratio"),
    "optim.warmup_style": choice("optimizer.schedule", SCHEDULES, "how the learning rate falls"),
    "optim.lr_scheduler_type": choice("optimizer.schedule", SCHEDULES, "how the learning rate falls"),
    "optim.weight_decay": to("optimizer.weight_decay"),
    "optim.betas": to("optimizer.betas"),
    "optim.num_cycles": unless(0.5, "half a cosine", "the schedule falls once, over all steps"),
    "optim.total_training_steps": same("a schedule ends with the run"),
    "optim.bwd_hook": same("the optimizer steps when all gradients are there"),
    "use_fused_kernels": same("the head's log-probs are computed in chunks, trainer.logprob_chunk"),
    "grad_clip": to("optimizer.grad_clip"),
    "ulysses_sequence_parallel_size": to("trainer.parallel.context"),
    "entropy_from_logits_with_chunking": same("always: trainer.logprob_chunk"),
    "entropy_checkpointing": same("entropies are never kept with their logits"),
    "fsdp_config.param_offload": _OFFLOAD,
    "fsdp_config.optimizer_offload": _OFFLOAD,
    "fsdp_config.offload_policy": _OFFLOAD,
    "fsdp_config.fsdp_size": fsdp_size,
    "fsdp_config.*": _SHARDED,
    "megatron.tensor_model_parallel_size": to("trainer.parallel.tensor"),
    "megatron.pipeline_model_parallel_size": to("trainer.parallel.pipeline"),
    "megatron.virtual_pipeline_model_parallel_size": to("trainer.parallel.interleave"),
    "megatron.context_parallel_size": to("trainer.parallel.context"),
    "megatron.expert_model_parallel_size": to("trainer.parallel.expert"),
    "use_remove_padding": same("sequences are always packed without padding"),
}
_ROLLOUT_KEYS: Table = {
    "name": choice("rollout.engine", {"vllm": "vllm", "sglang": "sglang", "hf": "transformers"}, "an engine"),
    "mode": same("answers stream one by one from every engine"),
    "temperature": to("rollout.temperature"),
    "top_k": top_k("rollout.top_k"),
    "top_p": to("rollout.top_p"),
    "use_fire_sampling": unless(False, "off", "no sampler of that kind"),
    "prompt_length": same("data.max_prompt_tokens says it"),
    "response_length": to("rollout.max_new_tokens"),
    "dtype": precision("rollout.dtype"),
    "gpu_memory_utilization": to("rollout.engine_args.memory_share"),
    "ignore_eos": unless(
        False, "answers end where the model ends them", "answers always end where the model ends them"
    ),
    "enforce_eager": engine_argument("enforce_eager", "--disable-cuda-graph"),
    "cudagraph_capture_sizes": engine_argument("cudagraph_capture_sizes"),
    "free_cache_engine": same("the cache is given up when the devices are needed by others"),
    "tensor_model_parallel_size": to("rollout.engine_args.tensor_parallel"),
    "max_num_batched_tokens": engine_argument("max_num_batched_tokens", "--chunked-prefill-size"),
    "max_model_len": engine_argument("max_model_len", "--context-length"),
    "max_num_seqs": to("rollout.max_rows"),
    "log_prob_*": _OWN_MICRO,
    "log_prob_micro_batch_size": _OWN_MICRO,
    "log_prob_micro_batch_size_per_gpu": _OWN_MICRO,
    "log_prob_use_dynamic_bsz": _OWN_MICRO,
    "log_prob_max_token_len_per_gpu": _OWN_MICRO,
    "disable_log_stats": engine_argument("disable_log_stats"),
    "do_sample": unless(True, "answers are sampled", "set rollout.temperature=0 to take the likeliest token"),
    "n": to("algorithm.group_size"),
    "over_sample_rate": unless((0, 0.0), "none", "rollout.extra draws that many more"),
    "multi_stage_wake_up": same("weights and cache come back when they are needed"),
    "engine_kwargs.*": absent("further arguments of the server: rollout.engine_args.args"),
    "engine_kwargs.vllm": unless((), "none", "rollout.engine_args.args"),
    "engine_kwargs.sglang": unless((), "none", "rollout.engine_args.args"),
    "val_kwargs.top_k": unless((0, -1), "all tokens", "evaluation takes all tokens"),
    "val_kwargs.top_p": to("evaluation.top_p"),
    "val_kwargs.temperature": sampled,
    "val_kwargs.do_sample": sampled,
    "val_kwargs.n": to("evaluation.samples"),
    "multi_turn.*": turns,
    "calculate_log_probs": same("the log-probs of all sampled tokens are kept"),
    "agent.*": same("agents run on the event loop of the rollout; agent.at_once bounds them"),
    "update_weights_bucket_megabytes": same("weights go in buckets of 256 MB"),
    "trace.*": _PROFILED,
    "skip_rollout": unless(False, "answers are generated", "answers cannot be replayed from files"),
    "skip_dump_dir": same("belongs to skip_rollout"),
    "profiler.*": _PROFILED,
    "enable_chunked_prefill": engine_argument("enable_chunked_prefill"),
    "load_format": same("the trainer's weights are published before the first answer"),
    "layered_summon": same("weights leave tensor by tensor"),
}
_MODEL_KEYS: Table = {
    "path": to("model.path"),
    "tokenizer_path": to("model.tokenizer"),
    "custom_chat_template": to("data.chat_template"),
    "use_shm": _LOADED,
    "external_lib": unless((), "none", "import it in a module that your reward or flow names"),
    "override_config": unless((), "none", "change the config.json of the model's directory"),
    "enable_gradient_checkpointing": to("trainer.gradient_checkpointing"),
    "enable_activation_offload": unless(False, "off", "trainer.gradient_checkpointing, or a smaller micro-batch"),
    "use_remove_padding": same("sequences are always packed without padding"),
    "lora_rank": to("model.lora.r"),
    "lora_alpha": to("model.lora.alpha"),
    "target_modules": to("model.lora.target_modules", of=lambda value: [value] if isinstance(value, str) else value),
    "exclude_modules": unless((), "none", "name the others in model.lora.target_modules"),
    "use_liger": same("trainer.compile fuses what lies between products of matrices"),
    "use_fused_kernels": same("the head's log-probs are computed in chunks, trainer.logprob_chunk"),
    "fused_kernel_options.*": same("the head's log-probs are computed in chunks, trainer.logprob_chunk"),
    "trust_remote_code": _CODE,
}
_REFERENCE_KEYS: Table = {
    "strategy": same("the reference is a role of its own, with the model's own forward"),
    "use_torch_compile": same("as the trainer's"),
    "model": unless((), "the policy as it began", "reference.model names another one"),
    "fsdp_config.param_offload": _OFFLOAD,
    "fsdp_config.*": same("the reference has a whole copy on each of its devices"),
    "ulysses_sequence_parallel_size": same("the reference has a whole copy on each of its devices"),
    "profiler.*": _PROFILED,
    "*": _OWN_MICRO,
}
_CRITIC_KEYS: Table = {
    "model.path": to("critic.model"),
    "model.fsdp_config.*": _SHARDED,
    "model.*": same("as the policy's"),
    "optim.lr": to("critic.lr"),
    "optim.lr_warmup_steps": warmup("critic.warmup_steps", "critic.optim"),
    "optim.lr_warmup_steps_ratio": warmup("critic.warmup_steps", "critic.optim"),
    "optim.weight_decay": to("critic.weight_decay"),
    "optim.warmup_style": unless("constant", "constant", "the critic's learning rate stays after warm-up"),
    "optim.min_lr_ratio": same("the critic's learning rate stays after warm-up"),
    "optim.*": same("as the policy's"),
    "grad_clip": to("critic.grad_clip"),
    "cliprange_value": to("algorithm.critic.clip"),
    "enable": same("the recipe says whether there is one"),
    "*": same("trainer and critic share micro-batches, epochs and back end"),
}
_REWARD_MODEL_KEYS: Table = {
    "model.path": to("reward_model.path"),
    "model.input_tokenizer": same("texts are written anew in the reward model's own template and tokens"),
    "max_length": to("reward_model.max_tokens"),
    "reward_manager": unless("naive", "one answer at a time", "a reward of your own: reward.function"),
    "launch_reward_fn_async": same("answers are scored while others are generated"),
    "sandbox_fusion.*": same("programs run in our own sandbox: docs/sandbox.md"),
    "*": same("a whole copy on each of its devices, reward_model.micro_batch_tokens at once"),
}
_DATA_KEYS: Table = {
    "tokenizer": to("model.tokenizer"),
    "use_shm": _LOADED,
    "train_files": files("data.train"),
    "val_files": files("evaluation.data"),
    "prompt_key": to("data.columns.prompt"),
    "reward_fn_key": same("a reward takes any column by its name"),
    "max_prompt_length": to("data.max_prompt_tokens"),
    "max_response_length": to("rollout.max_new_tokens"),
    "train_batch_size": to("algorithm.prompts_per_step"),
    "gen_batch_size": same("algorithm.sampling draws more prompts as they are needed"),
    "val_batch_size": same("all problems are asked at once; the engine takes as many as fit"),
    "return_raw_input_ids": same("a reward takes text, tokens and columns by name"),
    "return_raw_chat": same("a reward takes text, tokens and columns by name"),
    "return_full_prompt": same("a reward takes text, tokens and columns by name"),
    "return_multi_modal_inputs": same("pictures go with the samples that they belong to"),
    "shuffle": to("data.shuffle"),
    "seed": to("seed"),
    "dataloader_num_workers": same("rows are made beside the steps"),
    "validation_shuffle": unless(False, "evaluation problems keep their order", "evaluation problems keep their order"),
    "filter_overlong_prompts": overlong,
    "filter_overlong_prompts_workers": same("rows are made beside the steps"),
    "truncation": overlong,
    "image_key": images,
    "video_key": same("there are no videos for language models"),
    "trust_remote_code": _CODE,
    "custom_chat_template": to("data.chat_template"),
    "apply_chat_template_kwargs": to("data.chat_args"),
    "custom_cls.*": unless((), "none", "pass rows of your own to rlinf.train(data=...)"),
    "sampler.*": unless((), "none", "no sampler of your own"),
    "datagen.*": unless((), "none", "pass rows of your own to rlinf.train(data=...)"),
}
_TRAINER_KEYS: Table = {
    "balance_batch": same("micro-batches are always balanced over ranks by tokens"),
    "total_epochs": steps,
    "total_training_steps": steps,
    "project_name": same("the project of the loggers"),
    "experiment_name": to("name"),
    "logger": logger,
    "log_val_generations": to("metrics.samples", of=lambda count: count or 8),
    "rollout_data_dir": same("samples.jsonl has answers of every step"),
    "validation_data_dir": same("samples.jsonl has answers of every step"),
    "nnodes": to(NODES),
    "n_gpus_per_node": to(DEVICES),
    "save_freq": every("checkpoint.every"),
    "esi_redundant_time": same("a signal before the end makes a checkpoint, checkpoint.grace"),
    "resume_mode": resumed,
    "resume_from_path": same("belongs to resume_mode"),
    "val_before_train": same("evaluation comes before the first step, too"),
    "val_only": unless(False, "the run trains", "`rlinf evaluate` scores a saved model"),
    "test_freq": every("evaluation.every"),
    "critic_warmup": when(critic_learns, to("critic.head_start"), "the recipe has no critic"),
    "default_hdfs_dir": unless((), "none", "output_dir may lie on any file system that is mounted"),
    "del_local_ckpt_after_load": same("checkpoint.keep says how many stay"),
    "default_local_dir": to("output_dir"),
    "max_actor_ckpt_to_keep": to("checkpoint.keep"),
    "max_critic_ckpt_to_keep": same("a checkpoint has all roles"),
    "ray_wait_register_center_timeout": same("there is no Ray"),
    "device": unless("cuda", "GPUs where there are any", "GPUs and CPUs"),
    "use_legacy_worker_impl": same("there is one trainer"),
}


def _table() -> Table:
    found: dict[str, Rule] = {}

    def add(section: str, keys: Table, on: Any = None, why_not: str = "") -> None:
        for key, rule in keys.items():
            found[f"{section}.{key}"] = rule if on is None else when(on, rule, why_not)

    add(_ACTOR, {**_ACTOR_KEYS, "profiler.*": _PROFILED})
    add(_ROLLOUT, _ROLLOUT_KEYS)
    add(_MODEL, _MODEL_KEYS)
    add("actor_rollout_ref.ref", _REFERENCE_KEYS)
    add("critic", _CRITIC_KEYS, critic_learns, "the recipe has no critic")
    add("reward_model", _REWARD_MODEL_KEYS, judged, "reward_model.enable is off")
    add("data", _DATA_KEYS)
    add("trainer", _TRAINER_KEYS)
    return {
        **found,
        "critic.profiler.*": _PROFILED,
        "critic.checkpoint.*": same("a checkpoint has all roles"),
        "actor_rollout_ref.hybrid_engine": to("placement.mode", of=lambda shared: "collocated" if shared else "hybrid"),
        "actor_rollout_ref.nccl_timeout": to("system.host_timeout", of=float),
        "custom_reward_function.path": chosen_reward,
        "custom_reward_function.name": chosen_reward,
        "algorithm.gamma": when(critic_learns, to("algorithm.advantage.gamma"), "the recipe has no critic"),
        "algorithm.lam": when(critic_learns, to("algorithm.advantage.lam"), "the recipe has no critic"),
        "algorithm.adv_estimator": choice("algorithm.name", _RECIPES, "a recipe"),
        "algorithm.norm_adv_by_std_in_grpo": when(
            lambda given: given.get("algorithm.adv_estimator") == "grpo",
            to("algorithm.advantage.scale", of=lambda on: "std" if on else "none"),
            "the recipe is another",
        ),
        "algorithm.use_kl_in_reward": kl_reward,
        "algorithm.kl_penalty": kl_reward,
        "algorithm.kl_ctrl.kl_coef": kl_reward,
        "algorithm.kl_ctrl.type": unless("fixed", "the weight stays", "the weight of a KL penalty stays as it is"),
        "algorithm.kl_ctrl.*": same("belongs to an adaptive weight"),
        "algorithm.use_pf_ppo": unless(False, "off", "no filtering of that kind"),
        "algorithm.pf_ppo.*": same("belongs to use_pf_ppo"),
        "algorithm.filter_groups.enable": unless(False, "off", "algorithm.sampling, or the recipe dapo"),
        "algorithm.filter_groups.*": same("belongs to filter_groups.enable"),
        "global_profiler.*": _PROFILED,
        "ray_kwargs.*": same("there is no Ray"),
        "ray_init.*": same("there is no Ray"),
    }


TABLE = _table()
