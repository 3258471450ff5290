"""Common start of all contestants of `benchmarks.grpo`: the quickstart's warm model, and its problems in order.

In: configs/quickstart.yaml. Out: a Hugging Face directory, and a `Job` per seed.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from benchmarks.peers.grpo_job import Job
from rlinf.config.text import RunConfig
from rlinf.data.datasets.toy_tasks import PromptStream, Task, examples, make_task
from rlinf.data.tokenizer import load_tokenizer
from rlinf.models.language.build import build_model
from rlinf.runs.prepare import algorithm_of


def task_of(config: RunConfig, seed: int) -> Task:
    """The problems of a run with that seed."""
    return make_task(config.task.name, digits=config.task.digits, held_out=config.evaluation.problems, seed=seed)


def warm_model(config: RunConfig, path: Path) -> None:
    """Make the configuration's model, teach it worked problems as `sft` says, and save it with its tokenizer.

    Plain torch instead of the trainer: what the contestants start from must not depend on any of them.

    Raises:
        ValueError: problems and answers are not all of one length.
    """
    task = task_of(config, config.seed)
    tokenizer = load_tokenizer(task.tokenizer)
    model = build_model(config.model.config, tokenizer, seed=config.seed).train()
    problems = PromptStream(task.train, tokenizer, seed=2 * config.seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=config.sft.lr, weight_decay=0.0)
    for _ in range(config.sft.steps):
        batch = examples(problems.take(config.sft.batch_size), tokenizer)
        rows = [[*example.prompt_ids.tolist(), *example.response_ids.tolist()] for example in batch]
        ids = torch.tensor(rows)
        logits = model(input_ids=ids, use_cache=False).logits[:, :-1]
        F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten()).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    model.save_pretrained(path)
    tokenizer.save_pretrained(path)


def job_of(config: RunConfig, model: Path, seed: int, steps: int) -> Job:
    """So many of the configuration's steps, with the problems that our run of that seed draws."""
    task, algorithm, optimizer = task_of(config, seed), config.algorithm, config.optimizer
    spec: Any = algorithm_of(config)
    problems = PromptStream(task.train, load_tokenizer(task.tokenizer), seed=2 * seed + 1)
    drawn = [problems.take(algorithm.prompts_per_step) for _ in range(steps)]
    return Job(
        model=str(model),
        problems=[[(prompt.text, prompt.answer) for prompt in prompts] for prompts in drawn],
        seed=seed,
        group_size=algorithm.group_size,
        epochs=algorithm.epochs,
        max_new_tokens=config.rollout.max_new_tokens,
        temperature=config.rollout.temperature,
        lr=optimizer.lr,
        warmup_steps=optimizer.warmup_steps,
        betas=optimizer.betas,
        weight_decay=optimizer.weight_decay,
        grad_clip=optimizer.grad_clip,
        clip_low=spec.loss.clip_low,
        clip_high=spec.loss.clip_high,
        advantage_scale=spec.advantage.scale,
    )
