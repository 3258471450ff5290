"""GRPO as one plain program: the physical reference of `benchmarks.grpo`, and how short it can be without a system.

Torch, a transformers model, nothing else: no roles, no queues, no checkpoints. Answers are decoded by hand over a
preallocated key-value cache; training is the model's own forward. It relies on what the quickstart happens to have:
one process, a Qwen2, prompts of one length. `python -m benchmarks.peers.bare_grpo JOB.json` runs it.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass

import torch
import torch.nn.functional as F
import transformers
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from benchmarks.peers.grpo_job import Job, Result, Stopwatch

ROWS = 256
"""Rows of a training micro-batch. Of 64, 128, 256 and 512 the fastest for the quickstart: fewer pay more often for
Python, more leave the processor's caches."""


@dataclass(frozen=True, slots=True, eq=False)
class Answers:
    """Sampled answers, `group_size` for each prompt in turn."""

    ids: Tensor
    """Prompt and answer, int64 [rows, prompt + answer]; padded after the end token."""
    mask: Tensor
    """Which tokens of the answer are real, the end token included, bool [rows, answer]."""
    logprobs: Tensor
    """Log-probs of the answer's tokens under softmax(logits / temperature), float32 [rows, answer]."""


class Decoder:
    """Qwen2's forward over a preallocated cache, with joined projections; made anew when the weights have changed."""

    def __init__(self, model: PreTrainedModel, rows: int, length: int):
        trunk = model.model
        self.embedding, self.norm, self.head = trunk.embed_tokens.weight, trunk.norm, model.lm_head.weight
        attention = trunk.layers[0].self_attn
        self.size = attention.head_dim
        self.queries, self.keys = attention.q_proj.out_features // self.size, attention.k_proj.out_features // self.size
        cos, sin = trunk.rotary_emb(self.embedding, torch.arange(length)[None])
        self.cos, self.sin = cos[0, :, None], sin[0, :, None]  # [length, 1, size]
        self.layers = []
        for layer in trunk.layers:
            of, mlp = layer.self_attn, layer.mlp
            three = (of.q_proj, of.k_proj, of.v_proj)
            joined = torch.cat([each.weight for each in three]), torch.cat([each.bias for each in three])
            gate_up = torch.cat([mlp.gate_proj.weight, mlp.up_proj.weight])
            cache = torch.empty(2, rows, self.keys, length, self.size)
            self.layers.append((layer, joined, gate_up, cache))

    def __call__(self, ids: Tensor, start: int) -> Tensor:
        """Read tokens [rows, tokens] that stand at `start`; logits after the last, [rows, vocabulary]."""
        rows, tokens = ids.shape
        end = start + tokens
        cos, sin = self.cos[start:end], self.sin[start:end]
        hidden = F.embedding(ids, self.embedding)
        for layer, joined, gate_up, cache in self.layers:
            heads = F.linear(_norm(hidden, layer.input_layernorm), *joined).view(rows, tokens, -1, self.size)
            turning = heads[:, :, : self.queries + self.keys]
            low, high = turning.chunk(2, dim=-1)
            turned = turning * cos + torch.cat([-high, low], dim=-1) * sin
            cache[0, :rows, :, start:end] = turned[:, :, self.queries :].transpose(1, 2)
            cache[1, :rows, :, start:end] = heads[:, :, self.queries + self.keys :].transpose(1, 2)
            key, value = cache[0, :rows, :, :end], cache[1, :rows, :, :end]
            query = turned[:, :, : self.queries]
            if tokens == 1:  # queries that share a key stand together as its rows: no key is repeated
                seen = F.scaled_dot_product_attention(query.reshape(rows, self.keys, -1, self.size), key, value)
            else:
                seen = F.scaled_dot_product_attention(
                    query.transpose(1, 2), key, value, is_causal=True, enable_gqa=True
                ).transpose(1, 2)
            hidden = hidden + F.linear(seen.reshape(rows, tokens, -1), layer.self_attn.o_proj.weight)
            gate, up = F.linear(_norm(hidden, layer.post_attention_layernorm), gate_up).chunk(2, dim=-1)
            hidden = hidden + F.linear(F.silu(gate) * up, layer.mlp.down_proj.weight)
        return F.linear(_norm(hidden[:, -1], self.norm), self.head)

    def repeat(self, count: int, filled: int) -> None:
        """Copy what the first rows hold, so that each stands `count` times in a row."""
        for _, _, _, cache in self.layers:
            rows = cache.shape[1] // count
            cache[:, :, :, :filled] = cache[:, :rows, :, :filled].repeat_interleave(count, dim=1)


@torch.no_grad()
def sample(
    model: PreTrainedModel, prompts: Tensor, n: int, limit: int, end: int, pad: int, temperature: float
) -> Answers:
    """Answer each prompt, int64 [prompts, tokens], `n` times."""
    length = prompts.shape[1]
    decoder = Decoder(model, len(prompts) * n, length + limit)
    logits = decoder(prompts, 0).repeat_interleave(n, dim=0)
    decoder.repeat(n, length)
    alive = torch.ones(len(logits), dtype=torch.bool)
    ids, masks, logprobs = [prompts.repeat_interleave(n, dim=0)], [], []
    for column in range(limit):
        all_logprobs = torch.log_softmax(logits / temperature, dim=-1)
        cumulative = all_logprobs.exp().cumsum(dim=-1)
        drawn = torch.searchsorted(cumulative, torch.rand(len(cumulative), 1) * cumulative[:, -1:], right=True)
        drawn = drawn.clamp_(max=all_logprobs.shape[1] - 1)
        logprobs.append(all_logprobs.gather(1, drawn)[:, 0])
        masks.append(alive)
        ids.append(torch.where(alive[:, None], drawn, pad))
        alive = alive & (drawn[:, 0] != end)
        if column + 1 == limit or not alive.any():
            break
        logits = decoder(ids[-1], length + column)
    return Answers(torch.cat(ids, dim=1), torch.stack(masks, dim=1), torch.stack(logprobs, dim=1))


def score(answers: Answers, wanted: list[str], characters: list[str], n: int, end: int) -> Tensor:
    """1 for each answer that is its prompt's, character for character, else 0; float32 [rows]."""
    width = answers.mask.shape[1]
    rewards = []
    for row, (ids, real) in enumerate(zip(answers.ids[:, -width:].tolist(), answers.mask.tolist(), strict=True)):
        text = "".join(characters[token] for token, is_real in zip(ids, real, strict=True) if is_real and token != end)
        rewards.append(1.0 if text == wanted[row // n] else 0.0)
    return torch.tensor(rewards)


def advantages(rewards: Tensor, n: int, scale: str) -> Tensor:
    """Reward relative to the group's: (R - mean) / (std + 1e-6), arXiv:2402.03300 section 4.1.2; float32 [rows]."""
    groups = rewards.view(-1, n)
    centred = groups - groups.mean(dim=1, keepdim=True)
    return (centred / (groups.std(dim=1, keepdim=True) + 1e-6) if scale == "std" else centred).flatten()


def learn(model: PreTrainedModel, answers: Answers, gains: Tensor, job: Job) -> None:
    """Add the gradient of the clipped surrogate, token-level mean over the batch (arXiv:2503.14476, eq. 10 and 12)."""
    width, tokens = answers.mask.shape[1], answers.mask.sum()
    for ids, mask, old, gain in zip(
        *(each.split(ROWS) for each in (answers.ids, answers.mask, answers.logprobs, gains)), strict=True
    ):
        # The last token predicts nothing, so it is not read.
        logits = model(input_ids=ids[:, :-1], use_cache=False, logits_to_keep=width).logits / job.temperature
        new = -F.cross_entropy(logits.transpose(1, 2), ids[:, -width:], reduction="none")
        ratio = (new - old).exp()
        clipped = ratio.clamp(1 - job.clip_low, 1 + job.clip_high)
        loss = -torch.minimum(ratio * gain[:, None], clipped * gain[:, None])
        (torch.where(mask, loss, 0.0).sum() / tokens).backward()


def train(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, job: Job) -> Result:
    """Run a job; the model is trained in place."""
    torch.manual_seed(job.seed)
    result = Result(version=f"torch {torch.__version__}, transformers {transformers.__version__}")
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=job.lr, betas=job.betas, weight_decay=job.weight_decay, fused=True
    )
    warmup = max(1, job.warmup_steps)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda done: min(1.0, (done + 1) / warmup))
    end, pad, n = tokenizer.eos_token_id, tokenizer.pad_token_id, job.group_size
    characters = tokenizer.convert_ids_to_tokens(range(len(tokenizer)))
    watch = Stopwatch(result)
    model.train()
    for problems in job.problems:
        watch.next_step()
        prompts = torch.tensor(tokenizer([text for text, _ in problems], add_special_tokens=False)["input_ids"])
        answers = sample(model, prompts, n, job.max_new_tokens, end, pad, job.temperature)
        rewards = score(answers, [answer for _, answer in problems], characters, n, end)
        result.rewards.append(float(rewards.mean()))
        gains = advantages(rewards, n, job.advantage_scale)
        for _ in range(job.epochs):
            learn(model, answers, gains, job)
            torch.nn.utils.clip_grad_norm_(model.parameters(), job.grad_clip)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
    return result


def _norm(hidden: Tensor, norm: torch.nn.Module) -> Tensor:
    return F.rms_norm(hidden, norm.weight.shape, norm.weight, norm.variance_epsilon)


if __name__ == "__main__":
    todo = Job.read(sys.argv[1])
    policy = AutoModelForCausalLM.from_pretrained(todo.model, dtype=torch.float32)
    train(policy, AutoTokenizer.from_pretrained(todo.model), todo).tell()
