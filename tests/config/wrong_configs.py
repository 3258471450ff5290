"""A thousand wrong configurations and some odd right ones, drawn from the schema, with what `load` says of each.

    python -m tests.config.wrong_configs            draws them anew, asks, and writes wrong_configs.json

A case is a file, overrides, or values of Python; its answer the key, the place and the nearest key of every mistake.
"""

from __future__ import annotations

import json
import random
import re
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import yaml

from rlinf.config.embodied import EmbodiedConfig
from rlinf.config.load import _OURS, ConfigError
from rlinf.config.schema import Leaf, leaves, sections
from rlinf.config.text import RunConfig
from rlinf.runs.rules import config_of, load_config, load_embodied

CORPUS = Path(__file__).with_suffix(".json")
WRONG, RIGHT = 1_000, 200
_NEAREST = re.compile(r"^unknown (?:key|section); did you mean (\S+)\?$")


@dataclass(frozen=True, slots=True)
class Case:
    """One configuration."""

    embodied: bool = False
    """Of a run in which a policy acts."""
    file: str | None = None
    """Text of the file."""
    overrides: tuple[str, ...] = ()
    """Given on the command line."""
    given: dict[str, Any] = field(default_factory=dict)
    """Given in Python, by dotted key."""


def answer(case: Case, directory: Path) -> tuple[Any, list[list[str | None]]]:
    """The configuration, or None, and the (key, place, nearest key) of every mistake in it."""
    path = directory / "f.yaml"
    path.write_text(case.file or "", encoding="utf-8")
    file = None if case.file is None else path
    try:
        if case.given:
            return config_of(case.given, "Python"), []
        return (load_embodied if case.embodied else load_config)(file, case.overrides), []
    except ConfigError as error:
        found = {(each.key, each.place.replace(str(path), "f.yaml"), _nearest(each.advice)) for each in error.problems}
        return None, sorted(([*each] for each in found), key=str)


def _nearest(advice: str) -> str | None:
    near = _NEAREST.match(advice)
    return near[1] if near else None


def cases(seed: int) -> Iterator[Case]:
    """Configurations without end, most of them wrong."""
    draw = random.Random(seed)
    while True:
        embodied = draw.random() < 0.3
        schema = EmbodiedConfig if embodied else RunConfig
        keys = list(leaves(schema))
        count = draw.choices((1, 2, 3, 4), (8, 2, 1, 1))[0]
        settings = {}
        for _ in range(count):
            settings |= _mistaken(schema, keys, draw)
        way = draw.choices(("file", "command line", "Python", "both"), (4, 4, 2, 1))[0]
        if way == "Python" and not embodied:
            try:
                given = {key: yaml.safe_load(text) for key, text in settings.items()}
                json.dumps(given)
            except (yaml.YAMLError, TypeError, ValueError):
                continue
            yield Case(given=given)
        elif way == "file":
            yield Case(embodied, _file(settings, draw))
        else:
            half = dict(list(settings.items())[: count // 2] if way == "both" else ())
            rest = tuple(f"{key}={value}" for key, value in settings.items() if key not in half)
            yield Case(embodied, _file(half, draw) if half else None, rest)


def _file(settings: dict[str, str], draw: random.Random) -> str:
    """A file with these settings, each section written once."""
    tree: dict[str, Any] = {}
    for key, text in settings.items():
        *above, name = key.split(".")
        node = tree
        for part in above:
            node = node.setdefault(part, {})
            if not isinstance(node, dict):
                return f"{key}: {text}\n"  # a dotted key, which no file of ours has
        node[name] = text
    return "# A run.\n" * draw.randint(0, 3) + "".join(_lines(tree, ""))


def _lines(tree: dict[str, Any], indent: str) -> Iterator[str]:
    for key, value in tree.items():
        if isinstance(value, dict):
            yield f"{indent}{key}:\n"
            yield from _lines(value, f"{indent}  ")
        else:
            yield f"{indent}{key}: {value}\n"


def _mistaken(schema: type, keys: list[Leaf], draw: random.Random) -> dict[str, str]:
    """A setting, or several that belong together, most likely wrong."""
    leaf, kind = draw.choice(keys), draw.random()
    if kind < 0.35:
        return {leaf.key: draw.choice(WRONG_VALUES[_kind_of(leaf)])}
    if kind < 0.5:
        limited = [each for each in keys if each.limits]
        leaf = draw.choice(limited)
        return {leaf.key: _beyond(leaf, draw)}
    if kind < 0.62:
        return {_misspelt(leaf.key, draw): draw.choice(("1", "x", "{a: 1}"))}
    if kind < 0.68:
        theirs = draw.choice([name for names in _OURS.values() for name in names.split()])
        return {draw.choice(("", leaf.key.rpartition(".")[0] + ".")).lstrip(".") + theirs: "1"}
    if kind < 0.74:
        inner = draw.choice([key for key, _ in sections(schema)])
        return {
            draw.choice(
                (f"{inner}.{leaf.key}", f"{leaf.key}.x", f"{leaf.key}[0]", f"{leaf.key}.", f"a.b.{leaf.key}")
            ): "1"
        }
    if kind < 0.8:
        return {
            draw.choice([key for key, _ in sections(schema)]): draw.choice(("3", "[a, b]", "x", "{zz: 1, steps: }"))
        }
    if kind < 0.87:
        return {
            leaf.key: draw.choice(
                ("${nowhere.x}", "${oc.env:HOME}", "${name}", f"${{{leaf.key}}}", "${", "${optimizer}")
            )
        }
    return draw.choice(AGAINST_RULES[schema])


def _kind_of(leaf: Leaf) -> str:
    written = str(leaf.type)
    kinds = ("list[str]", "list[int]", "list", "tuple", "dict", "Literal", "bool", "int", "float", "str", "Any")
    return next(kind for kind in kinds if kind in written)


WRONG_VALUES = {
    "int": ("ten", "1.5", "[1, 2]", "{a: 1}", "true", "null", "''", "2024-01-01", "1e300", "1e400", "1e3", "'3'",
            "0x10"),
    "float": ("fast", "[1.0]", "{a: 1}", "true", "null", ".nan", ".inf", "1e400", "1e-6", "'0.5'", "1:30"),
    "bool": ("maybe", "[true]", "{a: 1}", "null", "1.5", "yes", "'off'", "ture"),
    "str": ("[a, b]", "{a: b}", "null", "no", "1e3", "12:30:45", "[]", "~", "''"),
    "Literal": ("nosuch", "[auto]", "null", "{a: 1}", "Auto", "autoo", "1", "true"),
    "list[str]": ("{a: b}", "[[a]]", "[null]", "null", "one", "[no, 1e3]", "3"),
    "list[int]": ("a", "[a]", "[1.5]", "{a: 1}", "null", "3", "[true]", "[-1]", "[1e0]"),
    "list": ("a", "{a: 1}", "null", "3", "[3]", "[{weight: -1}]"),
    "tuple": ("[0.9]", "[a, b]", "0.9", "[0.9, 0.9, 0.9]", "null", "{a: 1}", "[0.5, true]"),
    "dict": ("tiny", "[1]", "3", "null", "{1: 2}", "true", "\\${a}", "{a: 1e-6}"),
    "Any": ("[1", "{a", "${nowhere}", "sapo", "{name: }", "null"),
}  # fmt: skip
"""Values by type of key, wrong for most keys of the type."""


def _beyond(leaf: Leaf, draw: random.Random) -> str:
    """A number just outside of the limits of a key."""
    words, _, limit = draw.choice(leaf.limits).rpartition(" ")
    value = float(limit) + {"at least": -1, "at most": 1}.get(words, 0)
    written = f"{value:g}" if "float" in str(leaf.type) else f"{int(value)}"
    if "list" in str(leaf.type):
        return f"[{written}]"
    return f"[{written}, 0.5]" if "tuple" in str(leaf.type) else written


def _misspelt(key: str, draw: random.Random) -> str:
    section, dot, name = key.rpartition(".")
    place = draw.randrange(len(name))
    name = draw.choice(
        (
            name[:place] + name[place + 1 :] or "q",
            name + "s",
            name[:place] + name[place] + name[place:],
            "zzqx",
            name[::-1],
        )
    )
    if dot and draw.random() < 0.2:
        section = draw.choice((section[:-1], section + "s", "wrongly"))
    return f"{section}{dot}{name}"


def against(*written: str) -> list[dict[str, str]]:
    """Settings, each written `key=value key=value`."""
    return [dict(each.split("=", 1) for each in one.split(" ; ")) for one in written]


AGAINST_RULES: dict[type, list[dict[str, str]]] = {
    RunConfig: against(
        "name=a/b", "name=.hidden", "name=''", "optimizer.lr=11", "critic.lr=20", "rollout.temperature=1e-5",
        "checkpoint.grace=1e9", "system.stall_after=1e9", "reward.timeout=1e10", "steps=1" + "0" * 30,
        "checkpoint.best=accuracy", "checkpoint.best=evaluation/accuracy", "evaluation.patience=3",
        "flow=rlinf.nowhere.at_all", "flow=a b", "callbacks=[no.such.module]", "callbacks=[no.such, nor.this]",
        "reward.parts={a: 3}", "reward.parts={a: no.such.path}", "reward.function=no.such.path",
        "reward.parts={a: rlinf.rewards.exact.exact} ; reward.args={x: 1}", "reward.function=null",
        "reward_model.template=x", "reward_model.label=0", "reward_model.tokenizer=gpt2",
        "reward_model.path=gpt2 ; reward_model.kind=generative",
        "reward_model.path=gpt2 ; reward_model.kind=generative ; reward_model.template='{response}' ; "
        "reward_model.label=1",
        "reward_model.path=gpt2 ; reward_model.kind=generative ; reward_model.template=x ; reward_model.pattern=(",
        "reward_model.path=gpt2 ; reward_model.kind=generative ; reward_model.template=x ; reward_model.pattern=x",
        "reward_model.path=gpt2 ; reward_model.choices={a: 1}", "reward_model.path=gpt2 ; reward_model.template=x",
        "rollout.engine=nosuch.Engine", "algorithm.name=grppo", "algorithm=dapoo", "algorithm=sac",
        "trainer.router_replay=true ; rollout.engine=vllm ; model.config={model_type: q, num_experts: 3}",
        "trainer.router_replay=true", "algorithm.router_aux_loss=0.1", "reference.kind=precomputed",
        "reference.kind=adapters_off", "reference.adapter=x", "teacher.adapter=x ; teacher.model=gpt2",
        "reference.kind=ema ; reference.model=gpt2", "reference.kind=ema ; reference.adapter=x ; model.lora.r=4",
        "model.path=./nowhere", "critic.model=/none/x", "teacher.model=~/nowhere/x", "model.config={hidden_size: 3}",
        "trainer.backend=deepspeed", "rollout.stop=['', x]", "data.train=gpt ; model.config={model_type: qwen2}",
        "data.train=./none.jsonl", "evaluation.data=none.csv", "evaluation.samples=4", "evaluation.k=[3]",
        "evaluation.named={aime25: 3}", "evaluation.named={nosuch: {}}", "data.train=a/b ; evaluation.every=3",
        "roles={1a: {class: x.Y}}", "roles={judge: {class: x.Y}}", "roles={mine: 3}", "roles={mine: {class: 3}}",
        "roles={mine: {class: rlinf.actors.judge.Judge, hosts: 0, devices: 0}}",
        "roles={mine: {class: rlinf.actors.judge.Judge, settings: 3}}",
        "roles={mine: {class: rlinf.actors.judge.Judge, memory_gb: -1}}",
        "roles={mine: {class: rlinf.actors.judge.Judge, nosuch: 1}}", "teachers={a: 3}", "teachers={a: {}}",
        "teachers={1a: {model: gpt2}}", "teachers={a: {model: gpt2, weight: 0}}", "teachers={a: {model: gpt2, w: 0}}",
        "teachers={a: {model: gpt2, dtype: int8}}", "teachers={a: {model: ./none}}", "teachers.a.weight=1",
        "teachers={a: {model: gpt2}} ; teacher.model=gpt2", "teacher.route=kind", "placement.trainer=[0, 1]",
        "placement.trainer=a", "placement.rollout=1,1", "placement.node_groups={big: 3}", "placement.mode=colocated",
        "placement={'rollout,nosuch': 0}", "placement={'rollout,judge': a}", "optimizer.betas.x=1", "model.config=tiny",
        "algorithm.loss=sapo ; algorithm.loss.tau.x=1", "data.system=x ; data.system.y=1",
    ),
    EmbodiedConfig: against(
        "env.simulator=no.such.Thing", "env.simulator=rlinf.envs.toy.Reech", "env.num_envs=15",
        "policy.path=none/there",
        "trials.videos=400", "trials.suites={far: 3}", "trials.suites={a b: {}}", "trials.suites={far: {episodes: 0}}",
        "trials.suites={far: {episodes: true}}", "trials.suites={far: {options: 3}}", "trials.suites={far: {x: 3}}",
        "trials.suites={far: {max_steps: 1.5}}", "env.tasks=[3]", "env.tasks=[{weight: 0, options: {}}]",
        "env.tasks=[{option: {}}]", "env.tasks=[{options: 3}]", "env.tasks=[{name: a}, {name: a}]",
        "env.tasks=[{weight: true}, {}]", "env.curriculum.floor=0.5", "env.curriculum.low=0.95",
        "env.reward_args={a: 1}", "env.reward=no.such", "env.success=no.such", "algorithm=pppo",
        "algorithm=grpo ; off_policy.tau=0.1",
        "algorithm=sac ; off_policy.expectile=0.8", "algorithm=sac ; optimizer.schedule=linear", "off_policy.batch=3",
        "algorithm=sac ; policy.lora.r=3", "algorithm=sac ; algorithm.epochs=3", "algorithm=iql ; policy.type=mlp",
        "algorithm=sac ; policy.settings.batch_norm=true", "algorithm=crossq ; policy.settings.batch_norm=false",
        "algorithm=sac ; off_policy.offline_steps=3", "algorithm=sac ; off_policy.shift=3",
        "algorithm=sac ; off_policy.solved_only=true ; env.fresh=false", "algorithm=sac ; policy.type=steered",
        "algorithm=sac ; policy.type=steered ; imitation.path=x", "dagger.updates=3", "algorithm=dagger",
        "algorithm=dagger ; dagger.expert=no.such", "algorithm=dagger ; policy.settings.memory=3",
        "algorithm=dagger ; off_policy.failed_demonstrations=true", "imitation.path=none/there",
        "imitation.mixture={a: 3}", "imitation.mixture={a: {path: none/there}} ; imitation.path=x",
        "imitation.statistics=a", "imitation.statistics=../a ; imitation.path=.",
        "algorithm=imitation ; policy.type=soft",
        "off_policy.demonstrations=none/x", "algorithm=sac ; off_policy.demonstrations=none/x",
        "checkpoint.best=x", "checkpoint.best=evaluation/return", "trials.patience=2", "name=a/b",
        "optimizer.critic_lr=11", "placement.env=a", "placement.policy=[0]", "placement={'env,policy': x}",
        "flow=rlinf.none",
    ),
}  # fmt: skip
"""Settings that types and limits allow, and rules do not."""


def drawn(seed: int = 30) -> dict[str, list[Any]]:
    """The corpus: cases with their answers, as JSON has them."""
    wrong: list[Any] = []
    right: list[Any] = []
    seen = set[str]()
    rules = iter([Case(schema is EmbodiedConfig, _file(one, random.Random(0)))
                  for schema, every in AGAINST_RULES.items() for one in every])  # fmt: skip
    drawing = cases(seed)
    usual = {False: asdict(RunConfig()), True: asdict(EmbodiedConfig())}
    with tempfile.TemporaryDirectory() as directory:
        while len(wrong) < WRONG or len(right) < RIGHT:
            case = next(rules, None) or next(drawing)
            written = {key: value for key, value in asdict(case).items() if value not in (None, (), {}, False)}
            try:
                config, mistakes = answer(case, Path(directory))
            except Exception as error:
                print(type(error), written)
                continue
            if (line := json.dumps(written)) in seen:
                continue
            seen.add(line)
            if mistakes and len(wrong) < WRONG:
                wrong.append([written, mistakes])
            elif not mistakes and len(right) < RIGHT:
                right.append([written, changed(config, usual[case.embodied])])
    return {"wrong": wrong, "right": right}


def changed(config: Any, usual: dict[str, Any], prefix: str = "") -> dict[str, str]:
    """The values of a configuration that are not the usual ones, by dotted key, as Python prints them."""
    values = config if isinstance(config, dict) else asdict(config)
    found: dict[str, str] = {}
    for key, value in values.items():
        if isinstance(value, dict) and usual.get(key) and key != "config":
            found |= changed(value, usual[key], f"{prefix}{key}.")
        elif value != usual.get(key) or type(value) is not type(usual.get(key)):
            found[f"{prefix}{key}"] = repr(value)
    return found


def main() -> None:
    """Write the corpus."""
    corpus = drawn()
    rows = ",\n".join(
        f'"{name}": [\n' + ",\n".join(json.dumps(each, separators=(",", ":")) for each in corpus[name]) + "\n]"
        for name in ("wrong", "right")
    )
    CORPUS.write_text(f"{{{rows}}}\n", encoding="utf-8")


if __name__ == "__main__":
    main()
