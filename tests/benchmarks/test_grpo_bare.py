"""The bare loop of `benchmarks.grpo` is a fair reference only if it does the same and learns."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from benchmarks.grpo_contestants import CONFIG
from benchmarks.grpo_start import job_of, warm_model
from benchmarks.peers import bare_grpo
from benchmarks.peers.bare_grpo import learn, sample, train
from benchmarks.peers.grpo_job import Job
from rlinf.data.tokenizer import character_tokenizer
from rlinf.models.language.build import build_model
from rlinf.runs.rules import load_config

QWEN = {
    "model_type": "qwen2",
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 192,
    "tie_word_embeddings": True,
}


@pytest.fixture
def tokenizer() -> PreTrainedTokenizerBase:
    return character_tokenizer("0123456789>")


@pytest.fixture
def model(tokenizer: PreTrainedTokenizerBase) -> PreTrainedModel:
    return build_model(QWEN, tokenizer, seed=3)


@pytest.fixture(autouse=True)
def _own_randomness() -> Iterator[None]:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        yield


def job(steps: int, **changes: object) -> Job:
    digits = [str((step * 7 + row) % 10) for step in range(steps) for row in range(64)]
    problems = [[(f"{digit}>", digit) for digit in digits[step * 64 : step * 64 + 64]] for step in range(steps)]
    settings = {"group_size": 8, "epochs": 2, "max_new_tokens": 2, "temperature": 1.0, "lr": 1e-3, "warmup_steps": 5}
    settings |= {"betas": (0.9, 0.99), "weight_decay": 0.0, "grad_clip": 0.3, "clip_low": 0.2, "clip_high": 0.28}
    return Job(model="", problems=problems, seed=0, advantage_scale="std", **(settings | changes))  # type: ignore[arg-type]


def test_the_gradient_is_that_of_the_mean_log_prob_weighted_by_advantage_while_the_policy_is_the_one_that_sampled(
    model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers = sample(model, torch.randint(3, 14, (6, 4)), n=4, limit=6, end=1, pad=0, temperature=1.0)
    gains = torch.randn(24)
    monkeypatch.setattr(bare_grpo, "ROWS", 7)  # pieces of uneven size
    learn(model, answers, gains, job(1))
    ours = torch.cat([parameter.grad.flatten() for parameter in model.parameters() if parameter.grad is not None])
    model.zero_grad()
    logprobs = torch.log_softmax(model(input_ids=answers.ids).logits[:, 3:-1], -1)
    chosen = logprobs.gather(2, answers.ids[:, 4:, None])[..., 0]
    (-(chosen * gains[:, None])[answers.mask].mean()).backward()
    plain = torch.cat([parameter.grad.flatten() for parameter in model.parameters() if parameter.grad is not None])
    torch.testing.assert_close(ours, plain, atol=1e-6, rtol=1e-4)


@pytest.mark.repeated
def test_it_learns_to_copy_a_digit_from_nothing(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> None:
    result = train(model, tokenizer, job(60))
    assert result.rewards[0] < 0.1
    assert sum(result.rewards[-5:]) / 5 > 0.9
    assert len(result.seconds) == len(result.cpu) == 59  # nothing follows the last one


def test_the_start_is_the_quickstarts_model_and_problems(tmp_path: Path) -> None:
    config = load_config(CONFIG, ["sft.steps=2"])
    warm_model(config, tmp_path)
    first, again, other = (job_of(config, tmp_path, seed, 3) for seed in (0, 0, 1))
    assert (first.lr, first.epochs, first.grad_clip) == (5e-4, 2, 0.3)
    assert [len(step) for step in first.problems] == [64] * 3
    assert first == again
    assert first.problems != other.problems
    assert all(answer == "".join(sorted(text[:-1])) for step in first.problems for text, answer in step)
    assert (tmp_path / "model.safetensors").exists()
