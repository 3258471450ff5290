"""What TRL's `GRPOTrainer` and `GRPOConfig` call things, and how the same is said to `rlinf.train`.

In: the name of a setting that we do not have. Out: ours, for the error and for the tables in docs/coming-from/trl.md.
Names are those of TRL 1.16.
"""

from __future__ import annotations

from collections.abc import Mapping

OURS: Mapping[str, str] = {
    "reward_funcs": "rewards",
    "reward_weights": "rewards=[(f, 1.0), (g, 0.5)]",
    "train_dataset": "data",
    "eval_dataset": "evaluation",
    "processing_class": "tokenizer",
    "peft_config": 'lora_r=8, **{"model.lora.alpha": 16.0}',
    "rollout_func": "flow",
    "output_dir": "run_dir",
    "max_steps": "steps",
    "learning_rate": "lr",
    "lr_scheduler_type": "schedule",
    "max_grad_norm": "grad_clip",
    "num_generations": "group_size",
    "per_device_train_batch_size": "prompts_per_step; it counts prompts, those of all processes together",
    "gradient_accumulation_steps": "micro_batch_tokens; it changes memory, never what is learned",
    "num_iterations": "epochs",
    "steps_per_generation": "minibatches; optimizer steps on each batch of answers",
    "max_completion_length": "max_new_tokens",
    "chat_template_kwargs": "chat_args",
    "beta": 'kl={"place": "loss", "kind": "k3", "beta": 0.04}',
    "epsilon": 'loss={"clip_low": 0.2, "clip_high": 0.2}',
    "epsilon_high": 'loss={"clip_high": 0.28}',
    "importance_sampling_level": 'loss={"ratio": "sequence"}; or algorithm="gspo"',
    "scale_rewards": 'advantage={"scale": "none"}',
    "loss_type": 'algorithm="grpo"; for TRL\'s default, "dapo"; "dr_grpo", "cispo" and "sapo" have the same names',
    "mask_truncated_completions": 'truncated="mask"',
    "sync_ref_model": 'reference={"kind": "ema"}',
    "use_vllm": "engine",
    "bf16": 'trainer={"dtype": "bfloat16"}, rollout={"dtype": "bfloat16"}',
    "logging_steps": "log_every",
    "report_to": 'wandb="project", tensorboard=True',
    "log_completions": 'metrics={"samples": 8}',
    "eval_steps": '**{"evaluation.every": 20}',
    "save_steps": 'checkpoint={"every": 20}',
    "save_total_limit": 'checkpoint={"keep": 3}',
    "metric_for_best_model": 'checkpoint={"best": "evaluation/accuracy"}, **{"evaluation.every": 20}',
    "resume_from_checkpoint": 'resume="auto"',
}
"""By TRL's name, as an argument of a call, perhaps with a remark after a semicolon; what has the same name and meaning
in both is not here."""
OF_GIVEN_TEXTS: Mapping[str, str] = {
    "per_device_train_batch_size": "batch_size; it counts those of all processes together",
    "num_train_epochs": "epochs",
    "max_length": "max_tokens",
    "loss_type": "loss",
}
"""The same, where `SFTConfig`, `DPOConfig` and `RewardConfig` mean something else."""
