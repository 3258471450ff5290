"""Keys that are not ours: what other frameworks call ours (`learning_rate`, `num_generations`), and ours that went.

In: a key that there is not. Out: ours, for the advice; a similar spelling would find another key, or none.
"""

from __future__ import annotations

from collections.abc import Iterable

GONE = {
    "rollout.rescale": "answers move between ranks no more, which gained nothing: delete the line",
}
"""Keys that there were once, with the advice for those who still have them."""

_OURS = {
    "steps": (
        "max_steps", "total_steps", "num_steps", "total_training_steps", "training_steps",
        "num_train_steps", "total_epochs",
    ),
    "log_every": ("logging_steps", "log_interval", "log_freq"),
    "name": ("run_name", "experiment_name", "exp_name"),
    "seed": ("random_seed",),
    "model.path": ("model_name", "model_name_or_path", "model_path", "model_id", "pretrained", "base_model"),
    "model.tokenizer": ("tokenizer_path", "tokenizer_name", "tokenizer_name_or_path"),
    "model.lora.r": ("lora_r", "lora_rank", "rank"),
    "model.lora.alpha": ("lora_alpha",),
    "model.lora.target_modules": ("lora_target_modules", "lora_target"),
    "data.train": ("dataset", "dataset_name", "train_dataset", "train_files", "train_data", "prompt_data"),
    "data.split": ("dataset_split", "train_split"),
    "data.max_prompt_tokens": ("max_prompt_length", "max_prompt_len", "prompt_max_len", "max_input_length"),
    "evaluation.data": ("eval_dataset", "val_files", "eval_data", "test_data"),
    "evaluation.every": ("eval_steps", "eval_interval", "test_freq", "eval_every"),
    "reward.function": ("reward_funcs", "reward_fn", "reward_function", "rm_type"),
    "algorithm.name": ("advantage_estimator", "adv_estimator", "loss_type"),
    "algorithm.prompts_per_step": ("batch_size", "train_batch_size", "rollout_batch_size", "prompts_per_batch"),
    "algorithm.group_size": (
        "num_generations", "n_samples_per_prompt", "rollout_n", "num_samples_per_prompt", "n_samples",
        "num_return_sequences", "n",
    ),
    "evaluation.samples": ("n",),
    "algorithm.epochs": ("num_iterations", "ppo_epochs", "num_ppo_epochs", "update_epochs"),
    "algorithm.minibatches": ("num_mini_batches", "num_minibatches", "ppo_mini_batch_size"),
    "algorithm.kl": ("kl_coef", "kl_beta", "beta", "init_kl_coef", "use_kl_loss", "kl_loss_coef", "kl_loss_type"),
    "algorithm.entropy_bonus": ("entropy_coef", "entropy_coeff", "ent_coef"),
    "algorithm.loss": ("epsilon", "epsilon_high", "clip_ratio", "clip_range", "clip_eps", "eps_clip"),
    "optimizer.lr": ("learning_rate", "actor_learning_rate"),
    "optimizer.grad_clip": ("max_grad_norm", "gradient_clipping", "clip_grad", "grad_norm"),
    "optimizer.schedule": ("lr_scheduler_type", "lr_scheduler", "scheduler", "lr_decay_style"),
    "optimizer.betas": ("adam_beta1", "adam_beta2"),
    "optimizer.warmup_steps": ("lr_warmup_steps", "num_warmup_steps", "warmup_ratio"),
    "rollout.max_new_tokens": (
        "max_tokens_per_answer", "max_completion_length", "max_response_length", "response_length", "max_response_len",
        "generate_max_len", "max_gen_len", "max_length", "max_tokens",
    ),
    "rollout.engine_args": (
        "tensor_model_parallel_size", "vllm_tensor_parallel_size", "gpu_memory_utilization",
        "vllm_gpu_memory_utilization",
    ),
    "rollout.stop": ("stop_strings", "stop_sequences"),
    "trainer.micro_batch_tokens": (
        "per_device_train_batch_size", "micro_batch_size", "ppo_micro_batch_size_per_gpu", "max_tokens_per_gpu",
        "gradient_accumulation_steps", "micro_train_batch_size",
    ),
    "trainer.dtype": ("bf16", "fp16", "precision", "torch_dtype"),
    "checkpoint.every": ("save_steps", "save_interval", "save_freq", "save_every"),
    "checkpoint.keep": ("save_total_limit", "max_ckpts_to_keep"),
    "output_dir": ("save_path", "default_local_dir", "out_dir"),
    "metrics.wandb": ("wandb_project", "report_to", "use_wandb"),
    "placement.device_memory_gb": ("gpu_memory",),
    "algorithm.minibatch": ("minibatch_size", "mini_batch_size"),
    "env.num_envs": ("n_envs", "num_environments"),
    "off_policy.capacity": ("buffer_size", "replay_buffer_size"),
    "off_policy.gamma": ("discount",),
}  # fmt: skip
"""By key of ours: names by which TRL, verl, slime, OpenRLHF and stable-baselines3 have something of the kind."""

OF_TORCHRUN = {
    **dict.fromkeys(("n_gpus_per_node", "gpus_per_node", "num_gpus_per_node", "nproc_per_node"), "--nproc-per-node N"),
    **dict.fromkeys(("nnodes", "num_nodes", "n_nodes"), "--nnodes N"),
}
"""By the last part of a key of others: what says it here."""


def ours(key: str, known: Iterable[str]) -> str | None:
    """The key of ours that another framework calls like the last part of `key`; None if there is none.

    Args:
        key: that there is not.
        known: keys that there are; of several that fit, that of the same section is meant.
    """
    section, _, name = key.rpartition(".")
    there = {*known}
    outer, _, inner = section.partition(".")
    if name == "lr" and bool(outer) == bool(inner):  # as in `optimiser.lr`, a section is one of ours, misspelt
        return next((key for key in (f"{outer}.lr", "optimizer.lr") if key in there), None)
    found = [key for key, names in _OURS.items() if name.lower() in names and key in there]
    return next((key for key in found if key.rpartition(".")[0] == section), next(iter(found), None))
