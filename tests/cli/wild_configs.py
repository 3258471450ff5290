"""Random configurations, most of them wrong: every key, wrong types, extremes, foreign scripts, nested junk, attacks.

    python -m tests.cli.wild_configs [COUNT] [SEED]        tries COUNT (20,000) through --dry-run: `make fuzz-configs`

Each is a file and overrides, drawn from (seed, number) alone, so that any of them can be tried again by its number.
"""

from __future__ import annotations

import io
import os
import random
import re
import sys
import time
import traceback
from collections.abc import Iterator
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from rlinf.cli.main import main
from rlinf.config.embodied import EmbodiedConfig
from rlinf.config.schema import Leaf, leaves
from rlinf.config.text import RunConfig

ROOT = Path(__file__).parents[2]
LONGEST = 20.0
"""Seconds that one may take, on a machine that does much else."""
TEXT = """\
name: wild
task: {digits: 2}
model:
  config: {model_type: qwen2, hidden_size: 16, num_hidden_layers: 1, num_attention_heads: 4, num_key_value_heads: 2}
evaluation:
  problems: 10
"""
EMBODIED = """\
name: wild
env:
  simulator: rlinf.envs.toy.Reach
  workers: 0
algorithm: {name: ppo}
"""
_KEYS: dict[str, list[Leaf]] = {TEXT: [*leaves(RunConfig)], EMBODIED: [*leaves(EmbodiedConfig)]}
_SECRETS = (
    "rlinf.flows.grpo", "rlinf.flows", "os.system", "sys.exit", "numpy", "tests.own_parts.nothing", "a..b", "rlinf",
)  # fmt: skip
_NUMBERS = (
    "0", "1", "2", "-1", "3", "7", "-0.5", "0.5", "1e3", "1e-300", "1e300", "1e400", ".inf", "-.inf", ".nan",
    "1e11", "63",
    "1" + "0" * 18, "1" + "0" * 400, "9" * 5000, "0x10", "0o7", "1_000", "+1", "-0", "1e", "1:30", "0.1.2",
)  # fmt: skip
_WORDS = (
    "", "~", "null", "true", "false", "yes", "''", '""', "text", "ünïcode", "日本語", "\U0001f600", "a b", "a,b",
    "../..", "/",
    "/dev/null", "~nobody/x", "-", "--help", "%s%d{}", "{}", "[]", "[[]]", "[null]", "[1, a, {b: c}]",
    "{a: {b: [1, 2]}}",
    "{1: 2}", "{null: 1}", "${name}", "${nowhere}", "${oc.env:HOME}", "${", "$", "\\${a}", "*a", "&a 1", "&a [*a]",
    "!!python/x",
    "!!binary aGk=", "2001-01-01", "2001-13-45", "? a", "- a", ": ", "#", "'", '"', "{", "[", "}", "|", ">", "@",
    "`", "\t",
    "[" * 2000, "{" * 3000, "a" * 10_000, "\x7f", "\u202e", "\ufeff", "{x", "{{x}}", "{0}", "{a.b[0]}", "a\nb: c",
    "\\ud800",
    "0-3", "all", "0-3:0-7", "{node_group: x, placement: 0}", "0,0", "5-2", "collocated", "auto", "[0, 1]", "-3",
)  # fmt: skip
_MODEL = (
    "hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "intermediate_size", "head_dim",
    "hidden_act", "vocab_size", "max_position_embeddings", "rms_norm_eps", "rope_parameters", "layer_types",
    "model_type",
    "tie_word_embeddings", "sliding_window", "use_sliding_window", "pad_token_id", "eos_token_id", "attention_dropout",
    "dtype", "torch_dtype", "use_cache", "n_layer", "nonsense", "architectures", "_name_or_path", "attn_implementation",
)  # fmt: skip
_TYPES = (
    "qwen2", "llama", "gpt2", "opt", "mixtral", "phi3", "gemma2", "mamba", "bert", "t5", "clip", "qwen2_vl", "whisper",
)  # fmt: skip
_NAMED = {
    "env.simulator": (
        "rlinf.envs.toy.Reach", "rlinf.envs.gymnasium.Gymnasium", "rlinf.envs.gymnasium.GymnasiumVector",
        "rlinf.envs.maniskill.ManiSkill", "rlinf.envs.adapters.libero.Libero", "rlinf.envs.base.Simulator",
        "os.path.join",
    ),
    "policy.type": ("mlp", "cnn", "vla", "soft", "nosuch", "rlinf.models.policy.base.Policy", "os.path.join"),
}  # fmt: skip
_OPTIONS = ("dims", "pixels", "wind", "max_steps", "id", "make", "wrappers", "suite", "observe", "num_envs", "nonsense")
_INNER = {
    "env.options": _OPTIONS,
    "trials.options": _OPTIONS,
    "policy.settings": (
        "hidden", "chunk", "action_size", "state_size", "image", "channels", "activation", "log_std", "critics",
        "level", "bins", "patch_size", "text_length", "vision", "decoder", "decoder.num_hidden_layers",
        "vision.hidden_size", "decoder.head_dim", "picture_features", "seed", "type", "value_level", "nonsense",
        "temperature", "normalise",
    ),
}  # fmt: skip
"""Keys inside sections of a policy's run."""
_RECIPES = ("grpo", "ppo", "opd", "dapo", "sac", "deepseek_grpo", "reinforce_pp", "gspo", "grppo")
_BOMB = "a: &a [1, 1, 1, 1, 1, 1, 1, 1, 1]\n" + "".join(
    f"{chr(98 + n)}: &{chr(98 + n)} [{', '.join(['*' + chr(97 + n)] * 9)}]\n" for n in range(9)
)
_FILES = (
    "{" * 5000, "[" * 2000, "a: &a [1]\nb: *a\n", "&a {b: *a}", "a: b: c", "- 1\n- 2", "42", "", "\t", "a: |\n x\n\ty",
    _BOMB,
    "steps: 1\nsteps: 2", "---\na: 1\n---\nb: 2", "%YAML 9.9\n---\na: 1", "!!python/object/apply:os.system [ls]",
    "a: \x00",
    "env: 3", "env: {simulator: 3}", "env: null", "<<: {steps: 3}", "? {a: b}\n: c", "model: *x", "steps: !!int x",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Wild:
    """One configuration."""

    file: str
    """Text of the file."""
    overrides: tuple[str, ...]
    """Given on the command line."""
    hosts: int
    """Processes of the job."""


def wild(seed: int, number: int) -> Wild:
    """The configuration of that number."""
    draw = random.Random(f"{seed}/{number}")
    base = draw.choices((TEXT, EMBODIED), (3, 1))[0]
    kind = draw.random()
    if kind < 0.04:
        return Wild(draw.choice(_FILES), (), 1)
    if kind < 0.10:
        return Wild(_broken(base, draw), (), 1)
    overrides = tuple(_override(base, draw) for _ in range(draw.choice((1, 1, 1, 2, 3))))
    return Wild(base, overrides, draw.choice((1, 1, 1, 2, 5)))


def _broken(text: str, draw: random.Random) -> str:
    """A file with a few characters changed."""
    letters = list(text)
    for _ in range(draw.randint(1, 4)):
        letters[draw.randrange(len(letters))] = draw.choice(":{}[]&*!|>'\"%@`#,\n\t -0aé\x00\ud7ff")
    return "".join(letters)


def _override(base: str, draw: random.Random) -> str:
    kind = draw.random()
    if kind < 0.25 and base == TEXT:
        key = f"model.config.{draw.choice(_MODEL)}"
        return f"{key}={draw.choice(_TYPES) if key.endswith('model_type') else _value(draw)}"
    if kind < 0.25:
        key = draw.choice(("env.simulator", "env.options", "trials.options", "policy.type", "policy.settings"))
        if key in _NAMED:
            return f"{key}={draw.choice((*_NAMED[key], *_SECRETS))}"
        return f"{key}.{draw.choice(_INNER[key])}={_value(draw)}"
    if kind < 0.32:
        return f"algorithm={draw.choice(_RECIPES)}"
    leaf = draw.choice(_KEYS[base])
    key = leaf.key
    if kind < 0.40:  # a key that there is not, or a part of one
        key = draw.choice(
            (key + "x", key[:-1], key.rpartition(".")[0], f"{key}.{draw.choice(_MODEL)}", key + "[0]", key + ".")
        )
    return f"{key}={_value(draw, leaf)}"


def _value(draw: random.Random, leaf: Leaf | None = None) -> str:
    kind = draw.random()
    if leaf is not None and kind < 0.15:
        return str(leaf.default)
    if kind < 0.5:
        return draw.choice(_NUMBERS)
    if kind < 0.6:
        return draw.choice(_SECRETS)
    if kind < 0.7:
        return f"{{{draw.choice(_MODEL)}: {draw.choice(_NUMBERS)}, name: {draw.choice(_WORDS)}}}"
    return draw.choice(_WORDS)


@dataclass(frozen=True, slots=True)
class Answer:
    """What `--dry-run` made of one."""

    code: int | str
    """Exit code; or the traceback of what came out."""
    told: str
    """On stderr."""
    seconds: float
    """How long it took."""

    @property
    def wrong(self) -> str | None:
        """What should not have been; None if nothing."""
        if self.code not in (0, 2):
            return f"exit code {self.code}"
        if "Traceback" in self.told:
            return "a traceback is shown"
        if self.seconds > LONGEST:
            return f"it took {self.seconds:.1f} s"
        if self.code == 2 and not _NAMES.search(self.told):
            return "the message names neither key nor line"
        return None


_NAMES = re.compile(
    r"\.yaml:\d+: |(command line|configuration|default): \S.*( = |: )|"
    r"the config file |(data|reward|evaluation|tokenizer|flow|output_dir)\b.*: |unknown option"
)


def tried(one: Wild, directory: Path) -> Answer:
    """Ask for a dry run of a configuration, in this process."""
    path = directory / "wild.yaml"
    path.write_bytes(one.file.encode("utf-8", "surrogatepass"))
    out, err = io.StringIO(), io.StringIO()
    os.environ.update(RANK="0", WORLD_SIZE=str(one.hosts), LOCAL_WORLD_SIZE=str(one.hosts))
    begun = time.monotonic()
    code: int | str
    with redirect_stdout(out), redirect_stderr(err):
        try:
            code = main(["--config", str(path), "--dry-run", f"output_dir={directory}/outputs", "--", *one.overrides])
            out.getvalue().encode()  # as a terminal would
        except BaseException:  # SystemExit too: the program has one way to end
            code = traceback.format_exc(limit=-12)
    return Answer(code, err.getvalue(), time.monotonic() - begun)


def failures(numbers: range, seed: int) -> Iterator[tuple[int, Wild, Answer]]:
    """Those that were not answered as they should be."""
    with TemporaryDirectory(prefix="rlinf-wild-") as directory:
        for number in numbers:
            one = wild(seed, number)
            answer = tried(one, Path(directory))
            if answer.wrong is not None:
                yield number, one, answer


def _main(count: int = 20_000, seed: int = 0) -> int:
    begun, found = time.monotonic(), 0
    for number, one, answer in failures(range(count), seed):
        found += 1
        given = [each[:200] for each in one.overrides]
        print(f"--- {number} (seed {seed}): {answer.wrong}\n{given}\n{answer.told[:600]}", flush=True)
    print(
        f"{count:,} configurations in {time.monotonic() - begun:.0f} s, {found} of them answered wrongly (seed {seed})"
    )
    return 1 if found else 0


if __name__ == "__main__":
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    os.chdir(ROOT)
    sys.exit(_main(*map(int, sys.argv[1:])))
