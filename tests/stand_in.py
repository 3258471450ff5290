"""A model of a few thousand weights with a chat template, and a few problems, in place of the real ones."""

from __future__ import annotations

import json
import string
from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from rlinf.data.tokenizer import character_tokenizer

TEMPLATE = (
    "{% for message in messages %}[{{ message['role'] }}]{{ message['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)


def save_model(directory: Path, *, template: str | None = TEMPLATE) -> Path:
    """A tiny Qwen2 with one token per printable character, as save_pretrained writes it."""
    tokenizer = character_tokenizer(string.printable)
    tokenizer.chat_template = template
    config = AutoConfig.for_model(
        model_type="qwen2", vocab_size=len(tokenizer), hidden_size=16, intermediate_size=16, num_hidden_layers=2,
        num_attention_heads=2, num_key_value_heads=1, pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id, bos_token_id=None,
    )  # fmt: skip
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    return directory


def save_problems(path: Path, count: int = 12, **columns: str) -> Path:
    """Additions as JSON lines, in the columns that are named: `prompt="question"` writes prompts as `question`."""
    names = {"prompt": "prompt", "answer": "answer", **columns}
    rows = [{names["prompt"]: f"What is {n} + {n + 1}?", names["answer"]: str(2 * n + 1)} for n in range(count)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path
