"""`python -m benchmarks.environments_learning`: a tiny model learns in environments that others wrote.

In: environments and seeds. Out: a line per run: the mean reward of each five steps, and the greedy result on held-out
tasks before and after. The model begins with random weights and writes two characters, so it learns what it can
without reading well: which answers are usual, and where they stand. `verifiers` wants `make environments` and the
taskset of the tests on its path: `PYTHONPATH=tests/agents/environments`.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from typing import Any

import rlinf

MODEL = {
    "model_type": "qwen2",
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "intermediate_size": 128,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 4096,
}
CHARACTERS = "".join(map(chr, range(32, 127))) + "\n"
TEMPLATE = "{% for m in messages %}{{ m.content }}{{ '\n' if m.role == 'user' else eos_token }}{% endfor %}"
ONE_DIGIT = {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}
ONE_ANIMAL = {"min_animals": 1, "max_animals": 1, "min_instances": 1, "max_instances": 1}
LETTERS = {"letter_counting": {"max_words": 5}}
RULE = {"up": 0.2, "down": 0.05, "tasks": 48}
ENVIRONMENTS: dict[str, tuple[str, dict[str, Any], int]] = {
    "letter_counting": ("reasoning_gym", {"generators": LETTERS, "instructions": None}, 40),
    "levels": ("reasoning_gym", {"generators": "letter_counting", "instructions": None, "curriculum": RULE}, 40),
    "leg_counting": ("reasoning_gym", {"generators": {"leg_counting": ONE_ANIMAL}, "instructions": None}, 40),
    "chain_sum": ("reasoning_gym", {"generators": {"chain_sum": ONE_DIGIT}, "instructions": None}, 40),
    "GuessTheNumber": ("textarena", {"games": "GuessTheNumber-v0"}, 25),
    "counting_taskset": ("verifiers", {"environment": "counting_taskset"}, 15),
}
"""`agent.function`, `agent.args` and steps."""


def learned(name: str, seed: int) -> rlinf.Result:
    """Train from one seed."""
    function, arguments, steps = ENVIRONMENTS[name]
    with tempfile.TemporaryDirectory() as directory:
        result = rlinf.train(
            MODEL,
            agent={"function": function, "args": arguments},
            tokenizer={"characters": CHARACTERS},
            data={"chat": True, "chat_template": TEMPLATE},
            seed=seed,
            steps=steps,
            lr=2e-3,
            max_new_tokens=2,
            prompts_per_step=16,
            group_size=8,
            evaluation={"problems": 64},
            checkpoint={"every": 0},
            run_dir=f"{directory}/{name}",
        )
    assert result is not None
    return result


def main() -> None:
    """Run the environments that are asked for, from each seed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--environments", default=",".join(ENVIRONMENTS), help="names, by commas")
    parser.add_argument("--seeds", default="0,1,2")
    arguments = parser.parse_args()
    for name in arguments.environments.split(","):
        for seed in map(int, arguments.seeds.split(",")):
            start = time.process_time()
            result = learned(name, seed)
            rewards = [row["reward/mean"] for row in result.metrics]
            curve = [round(statistics.mean(rewards[at : at + 5]), 3) for at in range(0, len(rewards), 5)]
            seconds = time.process_time() - start
            held_out = f"held out {result.before.accuracy:.3f} -> {result.after.accuracy:.3f}"
            levels = {key: [row[key] for row in result.metrics] for key in result.metrics[-1] if key.endswith("/level")}
            reached = "".join(f", {key} {own[0]:g} -> {own[-1]:g}" for key, own in levels.items())
            print(f"{name} seed {seed}: {curve}, {held_out}{reached}, {seconds:.0f} processor seconds", flush=True)


if __name__ == "__main__":
    main()
