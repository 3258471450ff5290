"""The official cookbook's recipes, unmodified, against `rlinf serve` with a tiny or a given model: what each learns.

    make bench-cookbook                              # all of them, in a few minutes
    make bench-cookbook BENCH_ARGS="sl_loop rl_loop"
    make bench-cookbook BENCH_ARGS="math_rl max_steps=6 --model DIRECTORY"

A recipe asks a hub for a tokenizer and a data set by name, and takes a directory of that name for it. So its working
directory has a tokenizer under the name that the service gives its base model, which tells recipes how conversations
are written, too; and sums of two digits in the forms of the data sets that recipes read. `sl_loop` comes before those
that go on from its checkpoints, as most do. Recipes run in an environment of their own, `.venv-cookbook`.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path

from benchmarks.contestants import ROOT

PYTHON = ROOT / ".venv-cookbook" / "bin" / "python"
MODEL = "Qwen/Qwen3-4B-Instruct-2507"
"""Recipes look conversations' form up by this name: `<|im_start|>role … <|im_end|>`."""
_ANY = ("name=cookbook", f"serve.model_name={MODEL}", "serve.port=0")
SERVE = (
    *_ANY,
    "model.config.max_position_embeddings=2048",
    "model.config.initializer_range=0.25",  # large weights alone make one token of 400 likely without learning it
)
_SUMS = [*product(range(1, 5), repeat=2)]
_SUFFIXES = (
    " Provide a numerical answer without units, written inside \\boxed{}.",
    " Write your answer in \\boxed{} format.",
)
"""Endings that recipes put behind a question."""
_SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]


@dataclass(frozen=True, slots=True)
class Recipe:
    """A recipe with its command line.

    A word {sl} stands for the last checkpoint of `sl_loop`, {early} for one of a third of its way, {answers} for the
    last one's sampler.
    """

    module: str
    words: str
    metric: str
    """Name in its log that tells how well it learns."""
    resumes: bool = False
    """It goes on from {sl} by its own log, as after a break."""

    @property
    def goes_on(self) -> bool:
        """True if it takes a checkpoint of `sl_loop`."""
        return self.resumes or "{" in self.words


def _sizes(builder: str, words: str, prefix: str = "dataset_builder.") -> str:
    """Another data set builder in place of a recipe's own, whose batches are of hundreds."""
    named = f"model_name_for_tokenizer={MODEL} renderer_name=qwen3_instruct {words}"
    return f"dataset_builder=tinker_cookbook.recipes.{builder} " + " ".join(prefix + word for word in named.split())


_CHATS = _sizes(
    "chat_sl.chat_datasets:NoRobotsBuilder", "batch_size=32 max_length=512", "dataset_builder.common_config."
)
_MATHS = _sizes("math_rl.math_env:Gsm8kDatasetBuilder", "batch_size=8 group_size=8")
RECIPES: Mapping[str, Recipe] = {
    "sl_loop": Recipe("sl_loop", "batch_size=32 max_steps=60 learning_rate=1e-2 lora_rank=32", "train_mean_nll"),
    "rl_loop": Recipe(
        "rl_loop",
        "batch_size=8 group_size=8 max_steps=15 max_tokens=8 learning_rate=3e-3 loss_fn=importance_sampling",
        "reward/total",
        resumes=True,
    ),
    "rl_basic": Recipe(
        "rl_basic",
        f"{_MATHS} max_steps=10 max_tokens=8 learning_rate=3e-3 load_checkpoint_path={{sl}}",
        "env/all/reward/total",
    ),
    "sl_basic": Recipe("sl_basic", f"{_CHATS} max_steps=16 learning_rate=1e-2", "train_mean_nll"),
    "math_rl": Recipe(
        "math_rl.train",
        "group_size=16 groups_per_batch=8 max_steps=20 max_tokens=5 learning_rate=1e-2 eval_every=0 "
        "loss_fn=importance_sampling",
        "env/all/reward/total",
    ),
    "guess_number": Recipe(
        "multiplayer_rl.guess_number.train",
        "renderer_name=qwen3_instruct group_size=4 batch_size=4 max_steps=2 max_tokens=8 eval_every=0 "
        "learning_rate=3e-3",
        "env/all/reward/total",
    ),
    "dpo": Recipe(
        "preference.dpo.train",
        "batch_size=16 max_steps=10 learning_rate=1e-3 load_checkpoint_path={sl}",
        "dpo_loss",
    ),
    "distillation": Recipe(
        "distillation.on_policy_distillation",
        f"teacher_model={MODEL} teacher_checkpoint={{answers}} load_checkpoint_path={{early}} group_size=4 "
        "groups_per_batch=8 max_steps=10 max_tokens=8 lora_rank=32 learning_rate=1e-3",
        "teacher_kl",
    ),
}


def question(a: int, b: int) -> str:
    return f"What is {a} + {b}?"


def answer(value: int) -> str:
    return f"\\boxed{{{value}}}"


def strawberry(suffix: str) -> list[dict[str, str]]:
    """The example that recipes on mathematics begin every conversation with."""
    return [
        {"role": "user", "content": "How many r's are in strawberry?" + suffix},
        {
            "role": "assistant",
            "content": "Let's spell the word out and number all the letters: 1) s 2) t 3) r 4) a 5) w 6) b 7) e 8) r "
            "9) r 10) y. We have r's at positions 3, 8, and 9. \\boxed{3}",
        },
    ]


def datasets() -> dict[str, list[dict]]:
    """Rows by the names that recipes ask for: sums, some with a wrong answer to learn from or to be worse."""
    chats = [
        [
            *before,
            {"role": "user", "content": question(a, b) + suffix},
            {"role": "assistant", "content": answer(value)},
        ]
        for a, b in _SUMS
        for value in (a + b, 1 + (3 * a + b) % 9)
        for suffix in _SUFFIXES
        for before in (strawberry(suffix), [])
    ]
    return {
        "openai/gsm8k": [{"question": question(a, b), "answer": f"It is {a + b}.\n#### {a + b}"} for a, b in _SUMS],
        "HuggingFaceH4/no_robots": [{"messages": chat} for chat in chats],
        "Anthropic/hh-rlhf": [
            {
                side: f"\n\nHuman: {question(a, b)}\n\nAssistant: {answer(value)}"
                for side, value in (("chosen", a + b), ("rejected", a + b + 1))
            }
            for a, b in _SUMS
        ],
        "zwhe99/DeepMath-103K": [{"question": question(a, b) + _SUFFIXES[0]} for a, b in _SUMS],
    }


def write(directory: Path, times: int = 32) -> None:
    """Make the working directory, its tokenizer included.

    Args:
        directory: made if need be.
        times: every row is there so often.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    texts = []
    for name, rows in datasets().items():
        folder = directory / name
        folder.mkdir(parents=True)
        lines = [json.dumps(row) + "\n" for row in rows]
        (folder / "train.jsonl").write_text("".join(lines * times))
        (folder / "test.jsonl").write_text("".join(lines[:8]))
        (folder / "README.md").write_text(
            "---\nconfigs:\n- config_name: main\n  data_files:\n"
            "  - {split: train, path: train.jsonl}\n  - {split: test, path: test.jsonl}\n---\n"
        )
        texts += [json.dumps(row) for row in rows]
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    roles = ["system\n", "user\n", "assistant\n", "Guess: 1", "\\boxed{"] * 8
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=512, special_tokens=_SPECIAL, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator([*texts, *roles], trainer)
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=_SPECIAL[2], pad_token=_SPECIAL[0])
    fast.save_pretrained(directory / MODEL)


async def run(recipe: Recipe, words: Sequence[str], where: Path, log: Path, url: str, key: str) -> list[dict]:
    """Run a recipe in its own process; the rows of its log.

    Args:
        recipe: which.
        words: of its command line.
        where: working directory that `write` made.
        log: directory of its log.
        url, key: of the service.

    Raises:
        RuntimeError: it failed; the text has its last lines.
    """
    own = {
        "TINKER_BASE_URL": url,
        "TINKER_API_KEY": key,
        "HF_HUB_OFFLINE": "1",
        "HF_HOME": str(where / ".hub"),
        "OMP_NUM_THREADS": "1",
        "TOKENIZERS_PARALLELISM": "false",
    }
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | own
    module, more = f"tinker_cookbook.recipes.{recipe.module}", (f"model_name={MODEL}", f"log_path={log}", *words)
    process = await asyncio.create_subprocess_exec(
        *(str(PYTHON), "-m", module, *more),
        cwd=where,
        env=env,
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    try:
        said, _ = await process.communicate()
    finally:
        if process.returncode is None:
            process.kill()
    if process.returncode:
        raise RuntimeError(f"{recipe.module} ended with {process.returncode}:\n{said.decode()[-3000:]}")
    return [json.loads(line) for line in (log / "metrics.jsonl").read_text().splitlines()]


def checkpoints(log: Path) -> dict[str, str]:
    """Places in a command line where paths of `sl_loop`'s checkpoints stand, and those paths."""
    rows = [json.loads(line) for line in (log / "checkpoints.jsonl").read_text().splitlines()]
    return {"sl": rows[-1]["state_path"], "early": rows[0]["state_path"], "answers": rows[-1]["sampler_path"]}


async def measure(names: Sequence[str], words: Sequence[str], model: Path | None) -> None:
    """Run recipes one after the other, and print their curves.

    Args:
        names: of recipes.
        words: further ones of the command line of each.
        model: directory of the one that is served; None: a new, tiny one.
    """
    from transformers import AutoTokenizer

    from rlinf.runs.rules import load_config
    from rlinf.service.serve import serving

    with tempfile.TemporaryDirectory() as folder:
        where = Path(folder) / "work"
        write(where)
        own = [*SERVE, f"model.tokenizer={where / MODEL}"]
        if model is not None:
            AutoTokenizer.from_pretrained(model).save_pretrained(where / MODEL)
            own = [*_ANY, f"model.path={model}", "model.tokenizer=null", "trainer.dtype=bfloat16"]
            own.append("rollout.dtype=bfloat16")
        own.append(f"output_dir={folder}/out")
        config = load_config(str(ROOT / "configs/serve/tiny.yaml"), own, 1)
        async with serving(config, lambda line: None) as (url, key, _):
            paths: dict[str, str] = {}
            first = ["sl_loop"] * any(RECIPES[name].goes_on for name in names)
            for name in dict.fromkeys([*first, *names]):
                recipe, log = RECIPES[name], Path(folder) / "log" / name
                if recipe.resumes:
                    log.mkdir(parents=True)
                    row = {"name": "000000", "batch": 0, "state_path": paths["sl"]}
                    (log / "checkpoints.jsonl").write_text(json.dumps(row) + "\n")
                given = {word.partition("=")[0]: word for word in [*recipe.words.format(**paths).split(), *words]}
                rows = await run(recipe, [*given.values()], where, log, url, key)
                paths |= checkpoints(log) if name == "sl_loop" else {}
                curve = [row[recipe.metric] for row in rows if recipe.metric in row]
                print(f"{name}: {recipe.metric}: {' '.join(f'{value:.3g}' for value in curve)}", flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "words", nargs="*", metavar="recipe|key=value", help=f"of {', '.join(RECIPES)}; for each recipe"
    )
    parser.add_argument("--model", type=Path, help="directory of a model whose chats are <|im_start|>…<|im_end|>")
    options = parser.parse_intermixed_args()
    keys = [word for word in options.words if "=" in word]
    chosen = [word for word in options.words if word not in keys] or [*RECIPES]
    if unknown := sorted({*chosen} - RECIPES.keys()):
        sys.exit(f"error: there is no recipe {unknown[0]}; there are {', '.join(RECIPES)}")
    if not PYTHON.exists():
        sys.exit(f"error: there is no {PYTHON}; make bench-cookbook makes it")
    asyncio.run(measure(chosen, keys, options.model))
