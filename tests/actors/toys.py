"""Small models and samples for tests of learning, and a plain loop to hold against it."""

from __future__ import annotations

import numpy as np
import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from rlinf.data.sample import Group, Prompt, Sample
from rlinf.data.tokenizer import load_tokenizer

ALPHABET = {"characters": "0123456789>"}
VOCABULARY = len(load_tokenizer(ALPHABET))
CLIP = {"clip_low": 0.2, "clip_high": 0.28}


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
