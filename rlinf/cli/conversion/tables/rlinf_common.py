"""RLinf's keys that all of its runs have: cluster, runner, loggers, optimizer, FSDP and Megatron."""

from __future__ import annotations

from typing import Any

from rlinf.cli.conversion.rules import Absent, Given, Outcome, Rule, Same, Table, choice, same, to, unless
from rlinf.cli.conversion.tables.shared import NODES, OFFLOADED, RESUME, SCHEDULES, every

PLACEMENT = "cluster.component_placement."
_DRAWN = same("every run traces itself; `rlinf trace` draws it")
_BY_HF = same("models are read from Hugging Face directories in slices, and saved as such")
KERNELS = same("left to the back end: nothing here changes what is learned")
OFFLOAD = same(OFFLOADED)


def placed(roles: dict[str, str]) -> Rule:
    """Of `actor,rollout: all`: where each role is; one place for all of them is the mode `collocated`."""

    def rule(key: str, value: Any, given: Given) -> Outcome:
        places = {name: str(each) for name, each in given.values.items() if name.startswith(PLACEMENT)}
        if len(set(places.values())) == 1:
            return {"placement.mode": "collocated"}
        named = [name.strip() for name in key.removeprefix(PLACEMENT).split(",")]
        if isinstance(value, dict) or not all(name in roles for name in named):
            return Absent(f"roles here are {', '.join(dict.fromkeys(roles.values()))}: name them under placement")
        return {f"placement.{roles[name]}": value for name in named if roles[name]}

    return rule


def lora(ours: str) -> Rule:
    """A key of adapters, which holds where `is_lora` is on."""

    def rule(key: str, value: Any, given: Given) -> Outcome:
        on = given.get("actor.model.is_lora", False) and value is not None
        return {ours: value} if on else Same("is_lora is off")

    return rule


def _steps(key: str, value: Any, given: Given) -> Outcome:
    most = given.get("runner.max_steps", -1)
    if most > 0:
        return {"steps": most}
    return Same("not set") if key.endswith("max_steps") else Absent("epochs: set steps")


def _logged(key: str, value: Any, given: Given) -> Outcome:
    project = given.get("runner.logger.project_name", "rlinf")
    named = [name for name in (value if isinstance(value, list) else [value]) if name is not None]
    known: dict[str, tuple[str, Any]] = {
        "tensorboard": ("metrics.tensorboard", True),
        "wandb": ("metrics.wandb", project),
        "swanlab": ("metrics.swanlab", project),
    }
    if others := [str(name) for name in named if name not in known]:
        return Absent(f"{', '.join(others)}: metrics.jsonl has every number")
    return dict(known[name] for name in named) or Same("metrics.jsonl has every number")


def _resumed(key: str, value: Any, given: Given) -> Outcome:
    return Same("a run begins anew unless --resume is given") if value is None else {RESUME: value}


def _name(key: str, value: Any, given: Given) -> Outcome:
    return Same("it names itself") if value is None or "${" in str(value) else {"name": str(value).replace("/", "-")}


def _betas(key: str, value: Any, given: Given) -> Outcome:
    section = key.rpartition(".")[0]
    return {"optimizer.betas": [given.get(f"{section}.adam_beta1", 0.9), given.get(f"{section}.adam_beta2", 0.999)]}


def _falls(key: str, value: Any, given: Given) -> Outcome:
    section = key.rpartition(".")[0]
    if given.get(f"{section}.lr_decay_style", "constant") == "constant":
        return Same("the learning rate does not fall")
    return {"optimizer.min_lr_ratio": (value or 0.0) / (given.get(f"{section}.max_lr") or 1.0)}


COMMON: Table = {
    "hydra.*": same("a run's directory is output_dir/name, and has all it wrote"),
    "cluster.num_nodes": to(NODES),
    "runner.task_type": same("the keys say which kind of run it is"),
    "runner.logger.log_path": same("metrics lie in the run's directory"),
    "runner.logger.project_name": same("the project of the loggers"),
    "runner.logger.experiment_name": _name,
    "runner.logger.logger_backends": _logged,
    "runner.max_epochs": _steps,
    "runner.max_steps": _steps,
    "runner.save_interval": every("checkpoint.every"),
    "runner.seq_length": same("data.max_prompt_tokens and rollout.max_new_tokens say it"),
    "runner.resume_dir": _resumed,
    "runner.experiment_name": _name,
    "runner.output_dir": to("output_dir"),
}
OPTIMIZER: Table = {
    "optim.optimizer": choice("optimizer.kind", {"adam": "adamw", "adamw": "adamw"}, "an optimizer"),
    "optim.lr": to("optimizer.lr"),
    "optim.adam_beta1": _betas,
    "optim.adam_beta2": _betas,
    "optim.adam_eps": unless(1e-8, "AdamW's", "AdamW adds 1e-8"),
    "optim.weight_decay": to("optimizer.weight_decay"),
    "optim.clip_grad": to("optimizer.grad_clip"),
    "optim.min_lr": same("lr_sched says how far it falls"),
    "optim.bf16": same("weights and optimizer are float32; trainer.dtype says what is computed in"),
    "optim.fp16": same("nothing is computed in fp16"),
    "optim.loss_scale": same("nothing is computed in fp16, so no loss is scaled"),
    "optim.use_distributed_optimizer": same("the optimizer lies as the weights do, trainer.sharding"),
    "optim.*": KERNELS,
    "lr_sched.lr_warmup_iters": to("optimizer.warmup_steps"),
    "lr_sched.lr_warmup_fraction": unless((0, 0.0), "no warm-up", "a share of all steps: set optimizer.warmup_steps"),
    "lr_sched.lr_warmup_init": unless((0, 0.0), "from 0", "warm-up begins at 0"),
    "lr_sched.lr_decay_style": choice("optimizer.schedule", SCHEDULES, "how the learning rate falls"),
    "lr_sched.max_lr": same("optim.lr says it"),
    "lr_sched.min_lr": _falls,
    "lr_sched.lr_decay_iters": same("a schedule ends with the run"),
    "lr_sched.start_weight_decay": same("weight decay stays as it is"),
    "lr_sched.end_weight_decay": same("weight decay stays as it is"),
}
FSDP: Table = {
    "strategy": same("FSDP2"),
    "sharding_strategy": choice(
        "trainer.sharding",
        {"full_shard": "shard", "hybrid_shard": "hybrid", "no_shard": "replicate"},
        "how the model lies",
    ),
    "gradient_checkpointing": to("trainer.gradient_checkpointing"),
    "cpu_offload": OFFLOAD,
    "offload_pin_memory": OFFLOAD,
    "fsdp_size": unless(-1, "one group of all devices", "trainer.sharding: hybrid has a copy per machine"),
    "use_liger_kernel": same("trainer.compile fuses what lies between products of matrices"),
    "mixed_precision.*": same("trainer.dtype; gradients are summed in float32"),
    "amp_autocast.*": same("trainer.dtype"),
    "amp_grad_scaler.*": same("nothing is computed in fp16, so no loss is scaled"),
    "*": same("FSDP2 shards, gathers and prefetches layer by layer"),
}
MEGATRON: Table = {
    "use_profiler": _DRAWN,
    "profiler.*": _DRAWN,
    "ckpt_convertor.*": _BY_HF,
    "use_hf_ckpt": _BY_HF,
    "use_dist_ckpt": _BY_HF,
    "ckpt_format": _BY_HF,
    "distributed_timeout_minutes": to("system.host_timeout", of=lambda minutes: 60.0 * minutes),
    "*": KERNELS,
}
CODE = same("only code that transformers ships is run")
