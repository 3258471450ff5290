"""Small models and samples for tests of learning, and a plain loop to hold against it."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from rlinf.algos import recipes
from rlinf.algos.algorithms import AlgorithmSpec, advantages_of, loss_of
from rlinf.algos.loss_sum import Answers, LossSum, MicroBatch
from rlinf.data.sample import Group, Prompt, Sample
from rlinf.data.tokenizer import load_tokenizer

ALPHABET = {"characters": "0123456789>"}
VOCABULARY = len(load_tokenizer(ALPHABET))
SPEC = recipes.get("grpo", {"loss": {"clip_low": 0.2, "clip_high": 0.28}})
CLIP = {"spec": SPEC}


def configuration(kind: str = "qwen2", **more: object) -> dict[str, object]:
    """The configuration of a tiny model."""
    return {
        "model_type": kind,
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "intermediate_size": 48,
        "tie_word_embeddings": kind == "qwen2",
        **({"head_dim": 16} if kind == "qwen3" else {}),
        **more,
    }


def model(kind: str = "qwen2", seed: int = 0, **more: object) -> PreTrainedModel:
    """A tiny model with random weights."""
    torch.manual_seed(seed)
    settings = configuration(kind, vocab_size=VOCABULARY, pad_token_id=0, bos_token_id=1, eos_token_id=1, **more)
    made: PreTrainedModel = AutoModelForCausalLM.from_config(AutoConfig.for_model(**settings))
    return made


def group(number: int, rng: np.random.Generator, *, size: int = 4, longest: int = 7, temperature: float = 0.8) -> Group:
    """A judged group with answers of random length, one of which may have no reward."""
    prompt = Prompt(number, rng.integers(2, VOCABULARY, rng.integers(1, 6)), text=f"{number}>", answer="7")
    samples = []
    for index in range(size):
        length = int(rng.integers(1, longest))
        lost = index > 1 and rng.random() < 0.1
        samples.append(
            Sample(
                prompt=prompt,
                index=index,
                response_ids=rng.integers(0, VOCABULARY, length),
                logprobs=(-2.5 + 0.3 * rng.normal(size=length)).astype(np.float32),
                versions=np.zeros(length, dtype=np.int32),
                text="7",
                truncated=False,
                temperature=temperature,
                reward=None if lost else float(rng.random()),
                outcome="timeout" if lost else "ok",
            )
        )
    return Group(prompt, tuple(samples))


def groups(count: int = 6, seed: int = 0, **more: object) -> list[Group]:
    """Several, with prompt ids from 0."""
    rng = np.random.default_rng(seed)
    return [group(number, rng, **more) for number in range(count)]


def advantages(judged: Group) -> list[float]:
    """Of the scored samples, by hand."""
    rewards = np.array(judged.rewards)
    if len(set(judged.rewards)) == 1:
        return [0.0] * len(rewards)
    return ((rewards - rewards.mean()) / (rewards.std(ddof=1) + 1e-6)).tolist()


def by_a_plain_loop(net: PreTrainedModel, batch: list[Group]) -> torch.Tensor:
    """One sample after the other, one token after the other, no padding; the mean loss."""
    total, count = torch.zeros(()), 0
    for judged in batch:
        for sample, gain in zip(judged.scored, advantages(judged), strict=True):
            ids = torch.tensor([[*sample.prompt.token_ids, *sample.response_ids]])
            logprobs = torch.log_softmax(net(ids).logits[0] / sample.temperature, dim=-1)
            for i, token in enumerate(sample.response_ids):
                ratio = (logprobs[len(sample.prompt.token_ids) - 1 + i, token] - sample.logprobs[i]).exp()
                total = total + torch.maximum(-gain * ratio, -gain * ratio.clamp(0.8, 1.28))
                count += 1
    return total / count


def told(batch: list[Group], seed: int = 5) -> list[Group]:
    """The same, some cut by the length limit, with tokens of several versions, a reference and a teacher."""
    rng = np.random.default_rng(seed)
    made = []
    for judged in batch:
        samples = [
            replace(
                sample,
                truncated=bool(rng.random() < 0.3),
                versions=rng.integers(-2, 1, len(sample.versions)).astype(np.int32),
            )
            for sample in judged.samples
        ]
        found = Group(judged.prompt, tuple(samples))
        for name in ("ref_logprobs", "teacher_logprobs"):
            found = found.with_column(name, [-2.6 + 0.3 * rng.normal(size=len(s.response_ids)) for s in samples])
        made.append(found)
    return made


def routed(batch: list[Group], layers: int = 2, experts: int = 6, top: int = 2) -> list[Group]:
    """The same as an engine tells it that sent tokens to any experts, those of a prompt once for all its answers."""
    rng = np.random.default_rng(9)

    def drawn(tokens: int) -> np.ndarray:
        return rng.random((tokens, layers, experts)).argsort(-1)[..., :top].astype(np.uint8)

    made = []
    for judged in batch:
        read = drawn(len(judged.prompt.token_ids))
        made.append(
            Group(
                judged.prompt,
                tuple(
                    replace(sample, routes=np.concatenate([read, drawn(len(sample.response_ids) - 1)]))
                    for sample in judged.samples
                ),
            )
        )
    return made


def conversations(batch: list[Group], seed: int = 8) -> list[Group]:
    """The same with tokens that nobody learns somewhere in most answers, of which nothing is known: log-probs and all
    else are NaN there, versions from another age. One answer in eight learns nothing at all."""
    rng = np.random.default_rng(seed)

    def spread(sample: Sample) -> Sample:
        if rng.random() < 0.2:
            return sample
        spoken = len(sample.response_ids)
        mask = rng.permutation([True] * spoken + [False] * int(rng.integers(1, 9)))
        ids = rng.integers(0, VOCABULARY, len(mask))
        ids[mask] = sample.response_ids
        if rng.random() < 0.15:
            mask = np.zeros(len(mask), bool)
        learned = mask.sum()

        def among(array: np.ndarray, other: float) -> np.ndarray:
            whole = np.full(len(mask), other, array.dtype)
            whole[mask] = array[:learned]
            return whole

        return replace(
            sample,
            response_ids=ids,
            loss_mask=mask,
            logprobs=among(sample.logprobs, np.nan),
            versions=among(sample.versions, -(10**6)),
            per_token={name: among(array, np.nan) for name, array in sample.per_token.items()},
        )

    return [Group(judged.prompt, tuple(map(spread, judged.samples))) for judged in batch]


def without_the_rest(batch: list[Group]) -> list[Group]:
    """Conversations cut down to the tokens that are learned, as if the others had never been."""

    def bare(sample: Sample) -> Sample:
        if sample.loss_mask is None:
            return sample
        where = np.flatnonzero(sample.loss_mask)
        return replace(
            sample,
            response_ids=sample.response_ids[where],
            loss_mask=None,
            logprobs=sample.logprobs[where],
            versions=sample.versions[where],
            per_token={name: array[where] for name, array in sample.per_token.items()},
        )

    return [Group(judged.prompt, tuple(map(bare, judged.samples))) for judged in batch]


ALGORITHMS: dict[str, AlgorithmSpec] = {
    **{name: recipes.get(name) for name in recipes.NAMES if recipes.get(name).critic is None},
    # where the recipe's own numbers are for long answers, those that make a difference to short ones
    "dr_grpo": recipes.get("dr_grpo", {"aggregation": {"norm_length": 7.0}}),
    "dapo": recipes.get("dapo", {"shaping": {"longest": 6, "cache": 4}}),
    "gspo": recipes.get("gspo", {"loss": {"clip_low": 0.3, "clip_high": 0.4}}),
    "kl in the reward": recipes.get("grpo", {"kl": {"place": "reward", "kind": "k1", "beta": 0.2}}),
    "corrected kl": recipes.get("grpo", {"kl": {"place": "loss", "beta": 0.3, "corrected": True}}),
    "entropy": recipes.get("rloo", {"entropy_bonus": 0.4, "aggregation": {"how": "seq-mean-token-sum"}}),
    "masked": recipes.get("grpo", {"truncated": "mask", "aggregation": {"how": "seq-mean-token-mean"}}),
    "drift": recipes.get("grpo", {"max_drift": 0.1, "correction": {"cap": 1.5, "level": "sequence"}}),
    "rejection": recipes.get("grpo", {"rejection": {"floor": 0.8, "cap": 1.3}, "correction": {"level": "geometric"}}),
}
"""Every recipe without a critic, and parts that none of them has."""


def sample_by_sample(
    net: PreTrainedModel, algorithm: AlgorithmSpec, batch: list[Group], before: PreTrainedModel | None = None
) -> Tensor:
    """The mean loss of an algorithm, one sample after the other; `before` is the net as the batch met it. The net reads
    whole conversations, and the algorithm sees their learned tokens alone."""
    bare = without_the_rest(batch)
    gains, counts = _gains(algorithm, bare)
    total = LossSum(torch.zeros(()), torch.zeros((), dtype=torch.float64))
    said = [s for g in batch for s in g.scored]
    for whole, sample, gain, counted in zip(said, [s for g in bare for s in g.scored], gains, counts, strict=True):
        if not counted:
            continue
        ids = torch.tensor([[*whole.prompt.token_ids, *whole.response_ids]])
        places = torch.arange(len(whole.prompt.token_ids) - 1, ids.shape[1] - 1)
        places = places if whole.loss_mask is None else places[torch.tensor(whole.loss_mask)]
        spread = torch.log_softmax(net(ids).logits[0, places] / sample.temperature, dim=-1)
        logprobs = spread.gather(1, torch.tensor(sample.response_ids)[:, None]).T
        now, engine = logprobs.detach(), torch.tensor(sample.logprobs)[None]
        if before is not None:
            (found,) = logprobs_of(before, Group(whole.prompt, (whole,)))
            now = torch.tensor(found if whole.loss_mask is None else found[whole.loss_mask])[None]
        micro_batch = MicroBatch(
            logprobs,
            torch.ones_like(logprobs, dtype=torch.bool),
            old_logprobs=now if algorithm.correction is not None else engine,
            advantages=gain[None] if gain.ndim else gain.expand(1),
            entropy=-(spread.exp() * spread).sum(-1)[None],
            ref_logprobs=torch.tensor(sample.per_token["ref_logprobs"])[None],
            behavior_logprobs=engine,
            proximal_logprobs=now,
            versions=torch.tensor(sample.versions)[None],
            version=0,
        )
        loss = loss_of(algorithm, micro_batch)
        total = LossSum(total.total + loss.total, total.weight + loss.weight)
    return total.mean()


@torch.no_grad()
def logprobs_of(net: PreTrainedModel, judged: Group) -> list[np.ndarray]:
    """Of each sample's tokens, by the model's own forward."""
    found = []
    for sample in judged.samples:
        ids = torch.tensor([[*sample.prompt.token_ids, *sample.response_ids]])
        spread = torch.log_softmax(net(ids).logits[0, len(sample.prompt.token_ids) - 1 : -1] / sample.temperature, -1)
        found.append(spread.gather(1, torch.tensor(sample.response_ids)[:, None])[:, 0].numpy())
    return found


def _gains(algorithm: AlgorithmSpec, batch: list[Group]) -> tuple[list[Tensor], list[bool]]:
    """Advantage of each scored sample, [] or [response], and whether it counts."""
    samples = [sample for judged in batch for sample in judged.scored]
    longest = max(len(sample.response_ids) for sample in samples)

    def table(name: str) -> Tensor:
        rows = [sample.logprobs if name == "logprobs" else sample.per_token[name] for sample in samples]
        return torch.tensor([[*row, *[np.nan] * (longest - len(row))] for row in rows])

    found = advantages_of(
        algorithm,
        Answers(
            rewards=torch.tensor([sample.reward for sample in samples]),
            groups=torch.tensor([sample.prompt.id for sample in samples]),
            mask=~table("logprobs").isnan(),
            truncated=torch.tensor([sample.truncated for sample in samples]),
            logprobs=table("logprobs"),
            ref_logprobs=table("ref_logprobs"),
            teacher_logprobs=table("teacher_logprobs"),
            values=table("values") if algorithm.critic is not None else None,
        ),
    )
    gains = [
        gain if gain.ndim == 0 else gain[: len(s.response_ids)] for gain, s in zip(found.values, samples, strict=True)
    ]
    return gains, found.mask.any(1).tolist()


def gradients(of: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Of every parameter by name."""
    return {name: parameter.grad.clone() for name, parameter in of.named_parameters() if parameter.grad is not None}


def furthest(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> float:
    """The largest difference, relative to the norm of what is expected, over all tensors."""
    assert found.keys() == expected.keys()
    return max(
        float((found[name] - tensor).detach().norm() / (tensor.detach().norm() + 1e-12))
        for name, tensor in expected.items()
    )
