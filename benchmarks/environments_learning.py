"""`python -m benchmarks.environments_learning`: a tiny model learns in environments that others wrote.

In: environments and seeds. Out: runs in `--output`; of each a line: mean rewards by five steps, greedily on held-out
tasks before and after. The model begins with random weights and writes a few characters, so it learns what it can
without reading well: which answers are usual, and where they stand. Three want more than the package:

    counting_taskset    make environments, and PYTHONPATH=tests/agents/environments
    echo                make environments; .venv-environments/bin/openenv init echo, and max_concurrent_envs=64 in
                        echo/server/app.py
    marble              make environments

In `marble`, random weights write no answer that could be paid, so a run on worked answers goes first
(`algorithm: sft`), and the run in the environment begins with the model that it saved.
"""

from __future__ import annotations

import argparse
import functools
import json
import statistics
import subprocess
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import rlinf
from rlinf.agents.environments.verifiers import INSTALLED

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
SHORT = TEMPLATE.replace("m.content", "m.content[-40:]")
"""Shows the end of each message, since most of the time would go into rules that such a model cannot read."""
GUESSES = "[]0123456789\n"
"""Alphabet of a game whose moves are numbers in brackets: few of the answers that 96 characters make would be one."""
MOVES = "0123SFHG<>/red\n"
LAKE = {"desc": ["SF", "HG"], "is_slippery": False}
SERVER = ".venv-environments/bin/python -m uvicorn server.app:app --app-dir echo --host {host} --port {port}"

RING = "{{ m.content.split('centred at (')[1].split(')')[0] + ' ' + m.content.split('- 1 x ')[1].split('\n')[0] }}"
"""What differs between marble's tasks of one piece: the place of the ring, and the piece."""
MARBLE = TEMPLATE.replace(
    "{{ m.content }}", f"{{% if m.role == 'user' %}}{RING}{{% else %}}{{{{ m.content }}}}{{% endif %}}"
)
WORKED = """
import itertools, json, sys
from verifiers.v1.utils.loaders import load_taskset, taskset_config_type
taskset = load_taskset(taskset_config_type("marble_v1")(id="marble_v1", seed=100_000))
for task in itertools.islice(taskset.load(), int(sys.argv[1])):
    layout = [{**piece, "x": int(piece["x"]), "y": int(piece["y"])} for piece in task.data.solution]
    answer = {"role": "assistant", "content": json.dumps(layout, separators=(",", ":"))}
    print(json.dumps({"messages": [{"role": "user", "content": task.data.prompt_text}, answer]}))
"""
"""Prints conversations with layouts that its generator knows to score, of another seed than the run's tasks."""


@dataclass(frozen=True, slots=True)
class Case:
    """An environment, and how a model learns in it."""

    function: str
    """`agent.function`."""
    arguments: Mapping[str, Any]
    """`agent.args`."""
    steps: int
    characters: str = CHARACTERS
    """The alphabet of the model; all other characters are one token to it."""
    tokens: int = 2
    """Longest answer."""
    template: str = TEMPLATE
    more: Mapping[str, Any] = field(default_factory=dict)
    """Further keys of `agent`."""
    lr: float = 2e-3
    worked: str = ""
    """A program that prints conversations, which the model learns from before; without one it begins at random."""


def _questions(generators: Any, **more: Any) -> Case:
    return Case("reasoning_gym", {"generators": generators, "instructions": None, **more}, 40)


CASES = {
    "letter_counting": _questions(LETTERS),
    "levels": _questions("letter_counting", curriculum=RULE),
    "leg_counting": _questions({"leg_counting": ONE_ANIMAL}),
    "chain_sum": _questions({"chain_sum": ONE_DIGIT}),
    "GuessTheNumber": Case("textarena", {"games": "GuessTheNumber-v0"}, 25, GUESSES, 6, SHORT),
    "FrozenLake": Case("gymnasium_text", {"env": "FrozenLake-v1", "settings": LAKE, "turns": 4}, 20, MOVES),
    "echo": Case("openenv", {"server": SERVER.split(), "turns": 2}, 15, tokens=8, more={"at_once": 64}),
    "counting_taskset": Case("verifiers", {"environment": "counting_taskset"}, 15),
    "marble": Case(
        "verifiers", {"environment": "marble_v1", "size": 168}, 25, CHARACTERS, 56, MARBLE, lr=2e-4, worked=WORKED
    ),
}


def learned(case: Case, seed: int, run_dir: Path) -> rlinf.Result:
    """Train from one seed."""
    result = rlinf.train(
        _warm_started(case, seed, f"{run_dir}-worked") if case.worked else MODEL,
        agent={"function": case.function, "args": case.arguments, **case.more},
        tokenizer={"characters": case.characters},
        data={"chat": True, "chat_template": case.template},
        seed=seed,
        steps=case.steps,
        lr=case.lr,
        max_new_tokens=case.tokens,
        prompts_per_step=16,
        group_size=8,
        evaluation={"problems": 64},
        checkpoint={"every": 0},
        run_dir=run_dir,
    )
    assert result is not None
    return result


@functools.cache
def _printed(program: str) -> list[dict[str, Any]]:
    """The 256 conversations that a program prints where the environment is installed."""
    lines = subprocess.run([INSTALLED, "-c", program, "256"], check=True, stdout=subprocess.PIPE).stdout.splitlines()
    return [json.loads(line) for line in lines]


def _warm_started(case: Case, seed: int, run_dir: str) -> str:
    """A directory with a model that has learned from worked answers, until most of what it samples has their form."""
    result = rlinf.train(
        MODEL,
        data={"train": _printed(case.worked), "chat_template": case.template},
        algorithm="sft",
        tokenizer={"characters": case.characters},
        seed=seed,
        steps=80,
        lr=3e-3,
        supervised={"batch_size": 64},
        checkpoint={"every": 0},
        run_dir=run_dir,
    )
    assert result is not None
    return str(result.model_dir)


def main() -> None:
    """Run the environments that are asked for, from each seed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--environments", default=",".join(CASES), help="names, by commas")
    parser.add_argument("--seeds", default="0,1,2")
    parser.add_argument(
        "--output", type=Path, default=Path("outputs/environments-learning"), help="default: %(default)s"
    )
    arguments = parser.parse_args()
    for name in arguments.environments.split(","):
        for seed in map(int, arguments.seeds.split(",")):
            start = time.process_time()
            result = learned(CASES[name], seed, arguments.output / f"{name}-{seed}")
            rewards = [row["reward/mean"] for row in result.metrics]
            curve = [round(statistics.mean(rewards[at : at + 5]), 3) for at in range(0, len(rewards), 5)]
            seconds = time.process_time() - start
            held_out = f"held out {result.before.accuracy:.3f} -> {result.after.accuracy:.3f}"
            levels = {key: [row[key] for row in result.metrics] for key in result.metrics[-1] if key.endswith("/level")}
            reached = "".join(f", {key} {own[0]:g} -> {own[-1]:g}" for key, own in levels.items())
            print(f"{name} seed {seed}: {curve}, {held_out}{reached}, {seconds:.0f} processor seconds", flush=True)


if __name__ == "__main__":
    main()
