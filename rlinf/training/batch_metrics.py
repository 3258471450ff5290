"""Metrics of a batch of groups, apart from learning; its samples for people, and the file of a batch that failed.

Pure functions of groups: what they earned, how long they are, how far engine and trainer are apart. `show_samples` and
`token_rows` show responses as texts and token by token: how likely each was, what is learned of it, who made it.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from safetensors.numpy import save_file

from rlinf.algos import recipes
from rlinf.algos.algorithms import AlgorithmSpec
from rlinf.algos.loss_sum import Explained, LossSum
from rlinf.data.packing import Row
from rlinf.data.sample import REWARDS, Group, Sample
from rlinf.data.tokenizer import shown_prompt
from rlinf.training.policy import AGES, REFERENCE, RETURNS, TEACHER, VALUES, shaped_rewards, teaches

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

MOST = 1024
"""Tokens of a response that are told, from its beginning: more take longer to read than a step takes."""
DIGITS = 3
"""Digits of log-probs, nats."""
_INCOMPLETE = "\ufffd"
"""Stands in a tokenizer's text for bytes that are no character yet."""


def token_rows(sample: Sample, tokenizer: PreTrainedTokenizerBase) -> dict[str, Any]:
    """The tokens of a response in order; those of a conversation's tools, users and templates among them.

    Args:
        sample: of any kind; log-probs and versions of tokens that the model did not generate are unknown.
        tokenizer: its texts.

    Returns:
        Lists of equal length: `texts`; `logprobs`, nats, None where unknown; `mask`, 1 for what is learned; `versions`
        of the weights, -1 where unknown. `cut`, if there are more tokens: how many.
    """
    ids = sample.response_ids[:MOST]
    count = len(ids)
    mask = np.ones(count, bool) if sample.loss_mask is None else sample.loss_mask[:MOST]
    has_logprob = [bool(mask[at]) and math.isfinite(sample.logprobs[at]) for at in range(count)]
    metrics: dict[str, Any] = {
        "texts": token_texts([int(one) for one in ids], tokenizer),
        "logprobs": [round(float(sample.logprobs[at]), DIGITS) if has_logprob[at] else None for at in range(count)],
        "mask": [int(one) for one in mask],
        "versions": [int(sample.versions[at]) if mask[at] else -1 for at in range(count)],
    }
    if (cut := len(sample.response_ids) - count) > 0:
        metrics["cut"] = cut
    return metrics


def read_spans(sample: Sample, text: str, tokenizer: PreTrainedTokenizerBase) -> list[list[int]]:
    """Spans of a response that the model only read: tool output, users' turns, templates.

    Args:
        sample: of any kind; only of a conversation there can be such text.
        text: the response as it is shown, which may end before its last tokens.
        tokenizer: its texts.

    Returns:
        Of each such run [begin, end] in characters of `text`; none if that is not what the tokens say.
    """
    if sample.loss_mask is None or bool(sample.loss_mask.all()):
        return []
    bounds = [0, *(np.flatnonzero(np.diff(sample.loss_mask)) + 1).tolist(), len(sample.loss_mask)]
    ids = [int(one) for one in sample.response_ids]

    def decoded(begin: int, end: int) -> str:
        return str(tokenizer.decode(ids[begin:end], skip_special_tokens=False))

    spans, joined, before = [], "", 0  # the run before: tokens may read otherwise at the beginning of a text
    for begin, end in pairwise(bounds):
        start = len(joined)
        joined += decoded(before, end)[len(decoded(before, begin)) :]
        before = begin
        if not sample.loss_mask[begin]:
            spans.append([min(start, len(text)), min(len(joined), len(text))])
    return [span for span in spans if span[0] < span[1]] if joined.startswith(text) else []


def token_texts(ids: list[int], tokenizer: PreTrainedTokenizerBase) -> list[str]:
    """The text that each token adds; joined they are the whole.

    A token that ends in the middle of a character adds nothing, and the one that completes it the whole character.
    """
    texts: list[str] = []
    begin, context = 0, 0  # a token's text may depend on the one before it, such as the space between two words

    def decoded(end: int) -> str:
        return str(tokenizer.decode(ids[begin:end], skip_special_tokens=False, clean_up_tokenization_spaces=False))

    for end in range(1, len(ids) + 1):
        before, now = decoded(context), decoded(end)
        if now.endswith(_INCOMPLETE) and end < len(ids):
            texts.append("")
            continue
        texts.append(now[len(before) :])
        begin, context = context, end
    return texts


Advantages = Sequence[float | np.ndarray]
"""One for each scored sample, or for its learned tokens, [learned]."""
_ROUNDING = 1e-6
"""Relative to values and returns; some ten times the precision of float32, for sums over long answers."""
_GRPO = recipes.get("grpo")
_OUTCOMES = ("ok", "truncated", "timeout", "error")


def taken_steps(steps: Sequence[tuple[LossSum, dict[str, float]]]) -> dict[str, float]:
    """Metrics of a batch's optimizer steps: what gathered in all of them, and the numbers of the last.

    Without a step loss, gradient norm and learning rate are 0, and `update/skipped` is 1.
    """
    if not steps:
        return {"loss": 0.0, "grad_norm": 0.0, "lr": 0.0, "update/skipped": 1.0}
    sums = [gathered for gathered, _ in steps]
    return {**sum(sums[1:], sums[0]).values(), **steps[-1][1]}


def describe(
    groups: Sequence[Group], version: int, spec: AlgorithmSpec = _GRPO, *, oldest: int = 0
) -> dict[str, float]:
    """Metrics of a batch; samples without a reward, and groups without a scored sample, count only as outcomes.

    Args:
        groups: judged, with at least one scored sample. `response_length` counts generated tokens, `tokens` everything
            that is read.
        version: of the weights that the batch met.
        spec: the algorithm that learns from it.
        oldest: by how many versions tokens may be older; above 0, `staleness/share/AGE` tells the share of learned
            tokens of each age up to that, `AGES` at most.
    """
    everyone = [sample for group in groups for sample in group.samples]
    outcomes = [_outcome(sample) for sample in everyone]
    learned = [group for group in groups if group.scored]
    samples = [sample for group in learned for sample in group.scored]
    rewards = torch.tensor([reward for group in learned for reward in group.rewards], dtype=torch.float64)
    lengths = torch.tensor([sample.generated_tokens for sample in samples], dtype=torch.float64)
    token_count = sum(len(sample.prompt.token_ids) + len(sample.response_ids) for sample in samples)
    learns_cut = spec.truncated == "keep"
    return {
        "reward/mean": float(rewards.mean()),
        "reward/std": float(rewards.std(correction=0)),
        **_shaping(spec, learned),
        **_means("reward/parts", samples),
        **_ages([sample for sample in samples if learns_cut or not sample.truncated], version, oldest),
        "response_length/mean": float(lengths.mean()),
        "response_length/max": float(lengths.max()),
        "truncated": sum(sample.truncated for sample in samples) / len(samples),
        "groups": float(len(learned)),
        "groups/uniform": sum(not teaches(spec, group) for group in learned) / len(learned),
        "samples": float(len(samples)),
        "tokens": float(token_count),
        "response_tokens": float(lengths.sum()),
        **{f"outcomes/{name}": outcomes.count(name) / len(everyone) for name in _OUTCOMES},
        **_means("scores", samples),
        **rewards_by_agent(samples),
        **_distances(samples),
    }


def _shaping(spec: AlgorithmSpec, groups: Sequence[Group]) -> dict[str, float]:
    """Rewards after shaping, and on whom the penalty falls: on which share of all answers, and of the best of those
    groups that have better and worse ones."""
    if spec.shaping is None:
        return {}
    rewards_pairs = [(group.rewards, shaped_rewards(spec, group)) for group in groups]
    pairs = [pair for rewards, shaped in rewards_pairs for pair in zip(rewards, shaped, strict=True)]
    best = [
        after < before
        for rewards, shaped in rewards_pairs
        for before, after in zip(rewards, shaped, strict=True)
        if before == max(rewards) > min(rewards)
    ]
    return {
        "reward/shaped": float(np.mean([after for _, after in pairs])),
        "shaping/penalised": float(np.mean([after < before for before, after in pairs])),
        **({"shaping/penalised_best": float(np.mean(best))} if best else {}),
    }


def _ages(samples: Sequence[Sample], version: int, oldest: int) -> dict[str, float]:
    """By how many versions learned tokens are older than the weights that learn from them; see `describe`."""
    versions = np.concatenate([np.empty(0, np.int64), *(sample.learned_versions for sample in samples)])
    ages = (version - versions).astype(np.int64)
    metrics = {
        "staleness/mean": float(ages.mean()) if len(ages) else 0.0,
        "staleness/max": float(ages.max(initial=0)),
    }
    if oldest:
        limit = min(oldest, AGES)
        counts = np.bincount(ages.clip(0, limit), minlength=limit + 1) / max(1, len(ages))
        metrics |= {f"staleness/share/{age}": float(share) for age, share in enumerate(counts)}
    return metrics


def rewards_by_agent(samples: Sequence[Sample]) -> dict[str, float]:
    """The mean reward of each agent that has a name, as `agent/NAME/reward`.

    Args:
        samples: those without a reward are left out.
    """
    values_of: dict[str, list[float]] = {}
    for sample in samples:
        if sample.agent and sample.reward is not None:
            values_of.setdefault(sample.agent, []).append(sample.reward)
    return {f"agent/{name}/reward": float(np.mean(rewards)) for name, rewards in sorted(values_of.items())}


def _means(prefix: str, samples: Sequence[Sample]) -> dict[str, float]:
    """The mean of each part of the rewards, over the samples that have it."""
    values_of: dict[str, list[float]] = {}
    for sample in samples:
        for name, value in sample.scores.items():
            values_of.setdefault(name, []).append(value)
    return {f"{prefix}/{name}": float(np.mean(values)) for name, values in sorted(values_of.items())}


def describe_values(groups: Sequence[Group], rows: Sequence[Sequence[Row]]) -> dict[str, float]:
    """Metrics of how good the values were that a batch came with.

    Args:
        groups: the batch.
        rows: of each group, see `value_rows`.

    Returns:
        `values/mean`, `returns/mean`, `critic/explained_variance`, and `reward/mean`, which no trainer tells of while
        the critic learns alone; that one only, where there is no row.
    """
    all_rows = [row for some in rows for row in some]
    reward = {"reward/mean": float(np.mean([reward for group in groups for reward in group.rewards]))}
    if not all_rows:
        return reward
    values, returns = (
        np.concatenate([row.columns[name] for row in all_rows]).astype(np.float64) for name in (VALUES, RETURNS)
    )
    error = returns - values
    moments = [len(returns), returns.sum(), (returns**2).sum(), error.sum(), (error**2).sum()]
    # equal returns differ by the rounding of A + V, which is no variance to be explained
    varied = returns.std() > _ROUNDING * max(np.abs(values).max(), np.abs(returns).max())
    return {
        "critic/explained_variance": Explained(torch.tensor(moments, dtype=torch.float64)).value if varied else 0.0,
        "values/mean": float(values.mean()),
        "returns/mean": float(returns.mean()),
        **reward,
    }


def _distances(samples: Sequence[Sample]) -> dict[str, float]:
    """How far the policy that sampled is from others that looked at its tokens, k1 of `kl.estimate`, nats per token."""
    distances = {}
    names = dict.fromkeys(name for sample in samples for name in sample.per_token if name.startswith(f"{TEACHER}/"))
    of_each = ((name.replace(TEACHER, "teacher/kl"), name) for name in sorted(names))
    for metric, column in (("kl", REFERENCE), ("teacher/kl", TEACHER), *of_each):
        # one of several teachers may have been asked for some prompts only
        those = [sample for sample in samples if column in sample.per_token]
        if (len(those) == len(samples) or "/" in column) and any(sample.learned_tokens for sample in those):
            apart = np.concatenate([sample.column("logprobs") - sample.column(column) for sample in those])
            distances[metric] = float(apart[apart < np.inf].astype(np.float64).mean())
    return distances


def show_samples(
    groups: Sequence[Group],
    advantages: Advantages,
    count: int,
    tokenizer: PreTrainedTokenizerBase | None = None,
    tokens: int = 0,
) -> list[dict[str, Any]]:
    """The first samples by (prompt id, index), as plain values; the advantage of tokens as its mean.

    Args:
        groups: of a batch.
        advantages: of its scored samples, in the same order.
        count: how many at most.
        tokenizer: the model's; with it `prompt` is what the model read, `task` what was asked where that is something
            else, and `read` what of a conversation the model only read, see `read_spans`.
        tokens: of how many samples, the first ones, `tokens` tells each token, see `token_rows`.
    """
    rest = iter(advantages)
    gained = [
        (sample, None if sample.reward is None else next(rest), len(group.samples))
        for group in groups
        for sample in group.samples
    ]
    gained.sort(key=lambda pair: (pair[0].prompt.id, pair[0].index))
    rows = [_shown(sample, advantage) | {"group": size} for sample, advantage, size in gained[:count]]
    if tokenizer is not None:
        for number, (row, (sample, *_)) in enumerate(zip(rows, gained, strict=False)):
            row |= shown_prompt(sample.prompt, tokenizer)
            if spans := read_spans(sample, sample.text, tokenizer):
                row["read"] = spans
            if sample.trace:
                row["turns"] = _turn_rows(sample, tokenizer)
                row["times"] = [[round(turn.start, 3), round(turn.took, 3)] for turn in sample.trace]
            if number < tokens:
                row["tokens"] = token_rows(sample, tokenizer)
    return rows


def _turn_rows(sample: Sample, tokenizer: PreTrainedTokenizerBase) -> list[dict[str, Any]]:
    """Turns of an agent's sample: what was read before each, what was said, its tools and its reward."""
    rewards, end, turns = sample.per_token.get(REWARDS), 0, []
    for turn in sample.trace:
        context, spoken = sample.response_ids[end : turn.begin], sample.response_ids[turn.begin : turn.end]
        end = turn.end
        turns.append(
            {
                "read": str(tokenizer.decode(context, skip_special_tokens=False)) if len(context) else "",
                "said": str(tokenizer.decode(spoken, skip_special_tokens=False)),
                "tokens": [len(context), len(spoken)],
                "finish": turn.finish,
                **({"calls": [dict(call) for call in turn.calls]} if turn.calls else {}),
                **({} if rewards is None else {"reward": float(rewards[turn.begin : turn.end].sum())}),
            }
        )
    return turns


def rescue(groups: Sequence[Group], advantages: Advantages, directory: Path, version: int) -> Path:
    """Keep a batch that could not be learned from, for people to look at.

    Args:
        groups, advantages: see `show_samples`.
        directory: made if need be.
        version: of the weights that the batch met.

    Returns:
        The file with tokens, log-probs, advantages, and what other roles said of tokens, flat, with `lengths` of each
        scored sample's prompt and response (`nan_step_<version>.safetensors`; advantages are of samples, or of the
        tokens that `loss_mask` is true for); beside it one of JSON has texts, rewards and all else.
    """
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / f"nan_step_{version}.safetensors"
    samples = [sample for group in groups for sample in group.scored]
    tensors: dict[str, np.ndarray] = {
        "prompt_ids": np.concatenate([sample.prompt.token_ids for sample in samples]).astype(np.int64),
        "response_ids": np.concatenate([sample.response_ids for sample in samples]).astype(np.int64),
        "logprobs": np.concatenate([sample.logprobs for sample in samples]).astype(np.float32),
        "advantages": np.concatenate([np.atleast_1d(advantage) for advantage in advantages]).astype(np.float32),
        "loss_mask": np.concatenate([_mask(sample) for sample in samples]),
        "lengths": np.array([[len(sample.prompt.token_ids), len(sample.response_ids)] for sample in samples], np.int64),
    }
    for name in samples[0].per_token:
        if all(name in sample.per_token for sample in samples):
            tensors[name] = np.concatenate([sample.per_token[name] for sample in samples])
    save_file(tensors, path)
    everyone = sum(len(group.samples) for group in groups)
    rows = show_samples(groups, advantages, everyone)
    path.with_suffix(".json").write_text(json.dumps({"version": version, "samples": rows}, indent=1) + "\n")
    return path


def _mask(sample: Sample) -> np.ndarray:
    return np.ones(len(sample.response_ids), bool) if sample.loss_mask is None else sample.loss_mask


def _shown(sample: Sample, advantage: float | np.ndarray | None) -> dict[str, Any]:
    if isinstance(advantage, np.ndarray):  # an answer without a learned token has none
        advantage = float(advantage.mean()) if advantage.size else None
    ages = sample.learned_versions
    versions = [int(ages.min()), int(ages.max())] if len(ages) else []
    return {
        "prompt_id": sample.prompt.id,
        "index": sample.index,
        "prompt": sample.prompt.text,
        "response": sample.text,
        "answer": sample.prompt.answer,
        "reward": sample.reward,
        "outcome": _outcome(sample),
        "scores": dict(sample.scores),
        "remark": sample.remark,
        "advantage": advantage,
        "length": sample.learned_tokens,
        "versions": versions,
    }


def _outcome(sample: Sample) -> str:
    """The outcome of judging it; a judge that only fills in rewards leaves it to be told from the sample."""
    return sample.outcome or ("truncated" if sample.truncated else "ok")
