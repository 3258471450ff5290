"""`python -m benchmarks.recipes`: every recipe of docs/recipes.yaml by --dry-run, as the table of docs/recipes.md.

    python -m benchmarks.recipes            prints the table
    python -m benchmarks.recipes --save     writes it into the page

Models are their shapes: a config.json without weights, and a tokenizer of characters; data are a few problems of our
own. Nothing is measured.
"""

from __future__ import annotations

import argparse
import json
import re
import string
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import yaml
from transformers import AutoConfig

from benchmarks.contestants import ROOT
from rlinf.cli.main import describe
from rlinf.config.embodied import EmbodiedConfig
from rlinf.config.text import RunConfig
from rlinf.data.datasets.benchmarks import KNOWN
from rlinf.data.tokenizer import character_tokenizer
from rlinf.placement.seats import CONTROL, place
from rlinf.runs.dry_run.estimate import work_of
from rlinf.runs.rules import load_any

PAGE, RECIPES = ROOT / "docs" / "recipes.md", ROOT / "docs" / "recipes.yaml"
BEGIN, END = "<!-- table: python -m benchmarks.recipes --save -->\n", "<!-- end of the table -->\n"
HEADS = (
    *("recipe", "configuration", "devices", "memory of a device, GB", "seconds of a step", "at the longest"),
    *("at the published rate (predicted / that)", "published", "source", "run by us"),
)
_TEMPLATE = "{% for message in messages %}{{ message['content'] }}{% endfor %}"


@dataclass(frozen=True, slots=True)
class Tried:
    """Result of a recipe's dry run."""

    memory: str
    """GB of a device, by role."""
    seconds: str
    """Seconds of a step, with how far they may be off."""
    longest: str
    """Seconds of a step in which all answers have the longest."""
    published: str
    """Seconds of a step of as many tokens or simulated steps at the published rate, and our prediction over that."""


def recipes() -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Shapes of models, and recipes."""
    read = yaml.safe_load(RECIPES.read_text(encoding="utf-8"))
    return read["shapes"], read["recipes"]


def stand_in(directory: Path, shape: Mapping[str, Any]) -> Path:
    """A model without weights."""
    tokenizer = character_tokenizer(string.printable)
    tokenizer.chat_template = _TEMPLATE
    tokenizer.save_pretrained(directory)
    ids = {"pad_token_id": tokenizer.pad_token_id, "eos_token_id": tokenizer.eos_token_id}
    AutoConfig.for_model(**shape, **ids).save_pretrained(directory)
    return directory


def problems(directory: Path) -> list[str]:
    """Overrides by which data and benchmarks are files of our own, of the sizes that they have when published."""
    train = directory / "train.jsonl"
    rows = [{"problem": f"{n} + {n}?", "answer": str(2 * n)} for n in range(30)]
    train.write_text("".join(json.dumps(row) + "\n" for row in rows))
    options = {"Question": "which?", "Correct Answer": "a"} | {f"Incorrect Answer {n}": f"b{n}" for n in (1, 2, 3)}
    gpqa = directory / "gpqa.jsonl"
    gpqa.write_text("".join(json.dumps(options) + "\n" for _ in range(KNOWN["gpqa-diamond"].problems or 0)))
    return [f"data.train={train}", f"aime={train}", f"gpqa={gpqa}"]


def tried(recipe: Mapping[str, Any], shapes: Mapping[str, Any], directory: Path) -> Tried:
    """Try one by --dry-run.

    Raises:
        ConfigError: it could not run.
    """
    path, hosts = ROOT / "configs" / f"{recipe['config']}.yaml", recipe["devices"]
    overrides = ["placement.devices={gpu: h100}", *recipe.get("overrides", ())]
    if "shape" in recipe:
        model = stand_in(directory / recipe["shape"], shapes[recipe["shape"]])
        train, aime, gpqa = problems(directory)
        overrides += [f"model.path={model}", train]
        named = load_any(path, overrides, hosts).evaluation.named  # type: ignore[union-attr]
        files = {name: (gpqa if name.startswith("gpqa") else aime).partition("=")[2] for name in named}
        overrides += [f"evaluation.named={json.dumps(files)}"]
    with patch.dict("os.environ", {"LOCAL_WORLD_SIZE": "8"}):
        config = load_any(path, overrides, hosts)
        said = describe(config, hosts)
    memory = re.search(r"Memory of a device, GB, (at \w+(?: \w+)?): (.*?) \(", said)
    assert memory is not None, said
    told = memory[2] + ("" if memory[1] == "at the peak" else f" {memory[1]}")
    took = re.search(r"measured: (at least )?(\S+) s a step as placed, .*?, from (\S+) to (\S+) s", said)
    assert took is not None, said
    seconds = float(took[2].replace(",", ""))
    longest = re.search(r"; if all answers had the longest, [\d,]+: (\S+) s$", said, re.MULTILINE)
    work = work_of(config).tokens if isinstance(config, RunConfig) else decisions(config, hosts)
    published = "-"
    if (rate := recipe.get("rate")) is not None:
        published = f"{work / rate:,.0f} ({seconds * rate / work:.2f})"
    said_so = f"{took[1] or ''}{seconds:,.0f} ({took[3]} to {took[4]})"
    return Tried(told, said_so, "-" if longest is None else longest[1], published)


def decisions(config: EmbodiedConfig, hosts: int) -> int:
    """Decisions of a step, in all environments: RLinf's rates count a chunk of actions as one step."""
    env = place(config.placement, CONTROL, hosts).seats["env"]
    return len(env.hosts) * config.env.num_envs * config.policy.horizon


def row(recipe: Mapping[str, Any], found: Tried) -> str:
    """A line of the table."""
    config, devices, ours = recipe["config"], recipe["devices"], "yes" if recipe["ours"] else "no"
    return (
        f"| {recipe['name']} | [{config}](../configs/{config}.yaml) | {devices} H100 | {found.memory} "
        f"| {found.seconds} | {found.longest} | {found.published} | {recipe['expected']} | {recipe['source']} "
        f"| {ours} |"
    )


def table() -> Iterator[str]:
    """The lines of the table."""
    yield f"| {' | '.join(HEADS)} |"
    yield f"|{'---|' * len(HEADS)}"
    shapes, all_of_them = recipes()
    with tempfile.TemporaryDirectory() as directory:
        for recipe in all_of_them:
            yield row(recipe, tried(recipe, shapes, Path(directory)))


def main() -> None:
    """Print the table, or write it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--save", action="store_true", help="write the table into docs/recipes.md")
    save = parser.parse_args().save
    lines = "".join(f"{line}\n" for line in table())
    if save:
        before, _, rest = PAGE.read_text(encoding="utf-8").partition(BEGIN)
        PAGE.write_text(before + BEGIN + lines + END + rest.partition(END)[2], encoding="utf-8")
    print(lines, end="")


if __name__ == "__main__":
    main()
