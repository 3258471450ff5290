"""One run, from a checked configuration to a trained model: warm up, evaluate, take the flow's steps, evaluate, save.

In: a `RunConfig`. Out: the run directory and a few printed lines. What a step does is the flow's business; what
surrounds the steps (which prompts, how long they took, when to evaluate and to save) is `learn`.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from transformers import PreTrainedTokenizerBase

from rlinf.actors.judge import Judge
from rlinf.actors.rollout import Rollout
from rlinf.actors.trainer import Trainer
from rlinf.config import InputError, RunConfig, roles_to_hosts
from rlinf.data.sample import Example, Prompt
from rlinf.data.tasks import PromptStream, Task, examples, make_task, prompts
from rlinf.data.tokenizer import load_tokenizer
from rlinf.flows.evaluate import Evaluation, evaluate
from rlinf.flows.sft import sft
from rlinf.flows.step import Step
from rlinf.metrics import MetricsFile
from rlinf.preparation import Prepared
from rlinf.report import Report
from rlinf.run_directory import RunDirectory
from rlinf.runtime.stream import Stream
from rlinf.runtime.system import ActorSystem


@dataclass(frozen=True, slots=True)
class Problems:
    """What is learned from, and what is evaluated on."""

    tokenizer: PreTrainedTokenizerBase
    """The model's."""
    warm_up: PromptStream
    """Problems that are shown with their answers."""
    steps: PromptStream
    """Problems to try."""
    held_out: list[Prompt]
    """Problems never trained on."""

    @staticmethod
    def of(task: Task, config: RunConfig) -> Problems:
        """Those of a task, in an order drawn from the run's seed."""
        tokenizer = load_tokenizer(config.model.path or task.tokenizer)
        warm_up, steps = (PromptStream(task.train, tokenizer, seed=2 * config.seed + part) for part in (0, 1))
        return Problems(tokenizer, warm_up, steps, prompts(task.held_out, tokenizer))

    def worked_batches(self, count: int, size: int) -> Iterator[list[Example]]:
        """So many batches of problems with their answers."""
        for _ in range(count):
            yield examples(self.warm_up.take(size), self.tokenizer)


async def learn(system: ActorSystem, config: RunConfig, prepared: Prepared, directory: RunDirectory) -> None:
    """Train as the configuration says, in a running system.

    Raises:
        InputError: the flow returned no metrics.
        Exception: whatever the flow or a role raised.
    """
    report = Report(config, directory, system.hosts)
    task = make_task(config.task.name, digits=config.task.digits, held_out=config.evaluation.problems, seed=config.seed)
    problems = Problems.of(task, config)
    roles = await spawn_roles(system, config, task, prepared)

    report.begins()
    if config.sft.steps:
        worked = Stream.of(problems.worked_batches(config.sft.steps, config.sft.batch_size))
        report.warmed_up(await sft(worked, roles["rollout"], roles["trainer"], lr=config.sft.lr))
    report.evaluated(before := await _evaluate(problems, roles))

    after = before
    with MetricsFile(directory.metrics) as metrics_file:
        for done in range(1, config.steps + 1):
            last = done == config.steps
            drawn = Stream.of(problems.steps.take(config.algorithm.prompts_per_step))
            metrics = await _timed(prepared, Step(done - 1, drawn, config.algorithm.group_size), roles)
            if last or _due(done, config.evaluation.every):
                after = await _evaluate(problems, roles)
                metrics["evaluation/accuracy"] = after.accuracy
            metrics_file.write(done, metrics)
            report.stepped(done, metrics)
            if last or _due(done, config.checkpoint.every):
                with directory.checkpoint(done) as checkpoint:
                    await roles["trainer"].save(checkpoint / "hf")

    if config.trace:
        await system.trace(directory.trace)
    report.ends(before, after)


async def spawn_roles(system: ActorSystem, config: RunConfig, task: Task, prepared: Prepared) -> dict[str, Any]:
    """Start every role on its hosts, all at once; returns them by the names under which a flow takes them."""
    hosts = roles_to_hosts(config.placement, system.hosts)
    algorithm = config.algorithm
    shared: dict[str, Any] = {
        "model": config.model.path or config.model.config,
        "tokenizer": config.model.path or task.tokenizer,
        "seed": config.seed,
    }
    rollout, judge, trainer = await asyncio.gather(
        system.spawn(Rollout, hosts=hosts["rollout"], name="rollout", **shared, **asdict(config.rollout)),
        system.spawn(Judge, hosts=hosts["judge"], name="judge", reward=prepared.reward),
        system.spawn(
            Trainer,
            hosts=hosts["trainer"],
            name="trainer",
            **shared,
            **asdict(config.optimizer),
            **asdict(config.trainer),
            epochs=algorithm.epochs,
            clip_low=algorithm.clip_low,
            clip_high=algorithm.clip_high,
            advantage_scale=algorithm.advantage_scale,
        ),
    )
    return {"rollout": rollout, "judge": judge, "trainer": trainer[0]}  # one rank: its metrics, not a list of them


async def _timed(prepared: Prepared, step: Step, roles: Mapping[str, Any]) -> dict[str, float]:
    """Metrics of one step of the flow, with how long it took and how fast it was."""
    start = time.perf_counter()
    returned = await prepared.flow(**prepared.arguments({"step": step, **roles}))
    seconds = time.perf_counter() - start
    if not isinstance(returned, Mapping):
        raise InputError(
            f"flow: {prepared.flow.__qualname__} returned {returned!r}; it must return the step's metrics, a dict of "
            "numbers by name, such as what trainer.train gives"
        )
    metrics = {**returned, "timing/step": seconds}
    if "approx_kl" in metrics:  # without a reference model it is the only KL there is: from the policy that sampled
        metrics["kl"] = metrics.pop("approx_kl")
    if "response_tokens" in metrics:
        metrics["tokens_per_s"] = metrics["response_tokens"] / seconds
    return metrics


async def _evaluate(problems: Problems, roles: Mapping[str, Any]) -> Evaluation:
    return await evaluate(Stream.of(problems.held_out), roles["rollout"], roles["judge"])


def _due(done: int, every: int) -> bool:
    return every > 0 and done % every == 0
