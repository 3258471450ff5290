"""TRL's `GRPOTrainer` on a job of `benchmarks.grpo`: `.venv-trl/bin/python -m benchmarks.peers.trl_grpo JOB.json`.

Set as near to ours as its options allow, and as fast as they allow: no logging, saving, gradient checkpointing or
reference model, and bfloat16 with `--bf16` alone. `loss_type="dapo"` is the token-level mean over the batch, which is
ours too. What stays different is TRL's own: it adds 1e-4, not 1e-6, to a group's standard deviation, and it computes
the old log-probs by a forward pass of its own, because `generate` does not give them.
"""

from __future__ import annotations

import argparse
import os
import tempfile
from typing import Any

import torch
import trl
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback

from benchmarks.peers.grpo_job import Job, Result, Stopwatch


class Steps(TrainerCallback):
    """Times every batch of answers, which is `epochs` optimizer steps; on rank 0, for which the others wait."""

    def __init__(self, watch: Stopwatch, epochs: int) -> None:
        self._watch, self._epochs = watch, epochs

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.is_world_process_zero:
            self._watch.next_step()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        done = state.global_step % self._epochs == 0 and state.global_step < state.max_steps
        if done and state.is_world_process_zero:
            self._watch.next_step()


def train(job: Job, rows: int, bf16: bool = False) -> Result:
    """Run a job.

    Args:
        job: what to do.
        rows: answers to a micro-batch.
        bf16: compute in bfloat16, with weights in float32.
    """
    result = Result(version=f"trl {trl.__version__}, torch {torch.__version__}")
    tokenizer = AutoTokenizer.from_pretrained(job.model, padding_side="left")
    model = AutoModelForCausalLM.from_pretrained(job.model, dtype=torch.float32)
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=job.lr, betas=job.betas, weight_decay=job.weight_decay, fused=True
    )
    warmup = max(1, job.warmup_steps)  # transformers' own schedule would take its first step at learning rate 0
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda done: min(1.0, (done + 1) / warmup))
    processes = int(os.environ.get("WORLD_SIZE", "1"))
    batch = len(job.problems[0]) * job.group_size

    def exact(prompts: list[str], completion_ids: list[list[int]], answer: list[str], **_: Any) -> list[float]:
        """1 for the right answer and an end token, or a right answer cut by the limit; else 0, as ours."""
        texts = [tokenizer.decode(ids[:-1] if ids[-1] == tokenizer.eos_token_id else ids) for ids in completion_ids]
        rewards = [1.0 if text == right else 0.0 for text, right in zip(texts, answer, strict=True)]
        result.rewards.append(sum(rewards) / len(rewards))  # of this process's share of the batch
        return rewards

    problems = [problem for step in job.problems for problem in step]
    with tempfile.TemporaryDirectory() as directory:
        trainer = trl.GRPOTrainer(
            model=model,
            processing_class=tokenizer,
            reward_funcs=exact,
            train_dataset=Dataset.from_list([{"prompt": text, "answer": answer} for text, answer in problems]),
            optimizers=(optimizer, schedule),
            callbacks=[Steps(Stopwatch(result), job.epochs)],
            args=trl.GRPOConfig(
                output_dir=directory,
                seed=job.seed,
                use_cpu=True,
                bf16=bf16,
                gradient_checkpointing=False,
                per_device_train_batch_size=rows,
                gradient_accumulation_steps=batch // processes // rows,
                num_generations=job.group_size,
                num_iterations=job.epochs,
                max_steps=len(job.problems) * job.epochs,
                shuffle_dataset=False,
                max_completion_length=job.max_new_tokens,
                temperature=job.temperature,
                top_k=0,
                top_p=1.0,
                beta=0.0,
                epsilon=job.clip_low,
                epsilon_high=job.clip_high,
                loss_type="dapo",
                scale_rewards={"std": "group", "none": "none"}[job.advantage_scale],
                max_grad_norm=job.grad_clip,
                ddp_find_unused_parameters=False,
                dataloader_pin_memory=False,
                logging_strategy="no",
                save_strategy="no",
                report_to="none",
                disable_tqdm=True,
            ),
        )
        trainer.train()
    return result


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("job")
    parser.add_argument("--rows", type=int, default=128)
    parser.add_argument("--bf16", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    done = train(Job.read(options.job), options.rows, options.bf16)
    if int(os.environ.get("RANK", "0")) == 0:
        done.tell()
