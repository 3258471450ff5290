"""`python -m benchmarks.families`: which kinds of causal language model can be trained here, and how each is run.

Of every kind a tiny random instance goes through three steps of GRPO, with the roles of a real run: a rollout answers
prompts of several lengths, answers are scored by their tokens, a trainer learns from them and publishes its weights.
Then, with the weights that were learned, it is told

    engine against trainer   how far their log-probs of the same answers are apart, at most, nats, float32
    generate                 whether greedy answers are those of transformers' `generate` with the saved model
    hf/                      whether `from_pretrained` of the checkpoint has the trainer's weights, bit for bit

`--write` puts the table into docs/models.md.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import tempfile
import time
import warnings
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers import logging as transformers_logging
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from benchmarks.families_shapes import TOKENIZER, UNTRIED, tiny
from rlinf import ActorSystem, Rollout, Trainer, endpoint
from rlinf.data.packing import Row, pack
from rlinf.data.sample import Group, Prompt, Sample

PAGE = Path(__file__).parents[1] / "docs" / "models.md"
KINDS = [kind for kind in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES if kind not in UNTRIED]
FAR = 1e-5
"""Nats by which log-probs of engine and trainer may differ."""


_ANSWER = 12
_BEGIN, _END = "<!-- made by benchmarks.families -->", "<!-- end -->"
_PROMPTS = (3, 9, 5, 14)


@dataclass(frozen=True, slots=True)
class Outcome:
    """Findings on one kind of model."""

    kind: str
    """`model_type`"""
    architecture: str = ""
    """Name of the class."""
    windows: bool = False
    """It has windows or chunks."""
    experts: bool = False
    """It has experts."""
    states: bool = False
    """It has layers with states of fixed size."""
    engine: str = ""
    """How it decodes: `lean`, or by its `own` forward."""
    trainer: str = ""
    """How it is trained: sequences `packed` without padding, or `padded`."""
    distance: float = float("nan")
    """Distance of log-probs, nats."""
    greedy: bool = False
    """Greedy answers are those of `generate`."""
    saved: bool = False
    """`hf/` has the trainer's weights."""
    problem: str = ""
    """Text of what went wrong, or who refused it and why."""

    @property
    def works(self) -> bool:
        """Everything was right."""
        return not self.problem and self.distance <= FAR and self.greedy and self.saved


class Shown(Trainer):
    """A trainer that tells the log-probs that it computes, and how."""

    @endpoint(device=True)
    async def logprobs(self, groups: list[Group]) -> np.ndarray:
        """Log-probs of all answer tokens, float32 [tokens]."""
        batch = pack([Row.of(sample) for group in groups for sample in group.samples])
        return np.asarray((await self.computed(self._back.outputs, batch))[0].numpy())

    @endpoint
    async def how(self) -> str:
        """How sequences are laid out."""
        module: Any = self._back.module
        return "packed" if module.packs else "padded"


class ShownRollout(Rollout):
    """A rollout that tells how its engine decodes."""

    @endpoint
    async def how(self) -> tuple[str, bool]:
        """Whose forward it is, and whether texts of different lengths are read together."""
        forward: Any = self._engine._forward  # type: ignore[attr-defined]
        return ("lean" if type(forward).__name__ == "LeanForward" else "own"), forward.pads


def scored(groups: Iterable[Group]) -> list[Group]:
    """Give the groups a reward for even tokens."""
    return [
        replace(group, samples=tuple(replace(one, reward=_reward(one), outcome="ok") for one in group.samples))
        for group in groups
    ]


def _reward(sample: Sample) -> float:
    return float((sample.response_ids % 2 == 0).mean())


def prompts(step: int) -> list[Prompt]:
    """Prompts of several lengths."""
    rng = np.random.default_rng(step)
    return [Prompt(len(_PROMPTS) * step + i, rng.integers(3, 32, length)) for i, length in enumerate(_PROMPTS)]


async def exercise(system: ActorSystem, kind: str, model: PreTrainedModel, directory: Path) -> Outcome:
    """Train a model for three steps and find out what is told of it.

    Args:
        system: where the roles live.
        kind: `model_type`, for the names of the roles.
        model: with its first weights.
        directory: empty, for the model and its checkpoint.
    """
    config = model.config.get_text_config()
    kinds = set(getattr(config, "layer_types", None) or ())
    found = Outcome(
        kind,
        type(model).__name__,
        windows=bool(kinds & {"sliding_attention", "chunked_attention", "hybrid_sliding"})
        or (not kinds and getattr(config, "sliding_window", None) is not None),
        experts=any("experts" in name for name, _ in model.named_modules()),
    )
    model.save_pretrained(directory / "first")
    given = {"model": str(directory / "first"), "tokenizer": TOKENIZER}
    rollout = await system.spawn(ShownRollout, name=f"{kind}-rollout", max_new_tokens=_ANSWER, **given)
    trainer = await system.spawn(Shown, name=f"{kind}-trainer", algorithm="grpo", lr=1e-3, **given)
    for step in range(3):
        groups = scored(await rollout.generate(prompts(step), n=4).collect())
        await trainer.train(groups)
        await rollout.load(trainer.weights())
    groups = await rollout.generate(prompts(3), n=2).collect()
    told = np.concatenate([one.logprobs for group in groups for one in group.samples])
    distance = float(np.abs(told - (await trainer.logprobs(groups))[0]).max())
    ((engine, pads),) = await rollout.how()
    await trainer.save(directory / "last")
    saved = AutoModelForCausalLM.from_pretrained(directory / "last" / "hf", dtype=torch.float32).eval()
    weights = dict((await trainer.weights()).named())
    theirs = dict(saved.named_parameters())
    equal = weights.keys() == theirs.keys() and all(torch.equal(theirs[name], weights[name]) for name in weights)
    greedy = await rollout.generate(prompts(4), n=1, temperature=0.0).collect()
    return replace(
        found,
        engine=engine,
        states=not pads,
        trainer=(await trainer.how())[0],
        distance=distance,
        saved=equal,
        greedy=all(_same(saved, group.samples[0]) for group in greedy),
    )


@torch.no_grad()
def _same(model: PreTrainedModel, sample: Sample) -> bool:
    """Tell whether `generate` gives this greedy answer."""
    ids = torch.from_numpy(sample.prompt.token_ids[None])
    mask, most = torch.ones_like(ids), _ANSWER
    found = model.generate(
        ids, attention_mask=mask, do_sample=False, max_new_tokens=most, eos_token_id=1, pad_token_id=0
    )
    return bool(found[0, ids.shape[1] :].tolist() == sample.response_ids.tolist())


async def outcomes(kinds: Sequence[str], limit: float = 120) -> list[Outcome]:
    """Try these kinds, one after the other."""
    found = []
    for kind in kinds:
        start = time.perf_counter()
        try:
            model = tiny(kind)
            async with ActorSystem.local() as system:
                with tempfile.TemporaryDirectory() as directory:
                    one = await asyncio.wait_for(exercise(system, kind, model, Path(directory)), limit)
        except Exception as error:
            one = Outcome(kind, problem=f"{type(error).__name__}: {error}".splitlines()[0])
        found.append(one)
        print(f"{kind:24s} {'works' if one.works else 'FAILS'} {time.perf_counter() - start:5.1f} s {one}", flush=True)
    return found


def page(found: Sequence[Outcome], text: str) -> str:
    """The page with the tables of these outcomes in place of those it has."""
    good = [one for one in found if one.works]
    rows = ["| `model_type` | class | has | engine | trainer |", "|---|---|---|---|---|"]
    rows += [f"| {' | '.join(row(one))} |" for one in good]
    told = ["| `model_type` | what is told |", "|---|---|"]
    told += [f"| `{one.kind}` | {_told(one)} |" for one in found if not one.works]
    made = "\n".join([f"{len(good)} kinds work.", "", *rows, "", "These do not:", "", *told])
    before, _, rest = text.partition(_BEGIN)
    _, _, after = rest.partition(_END)
    return f"{before}{_BEGIN}\n{made}\n{_END}{after}"


def row(one: Outcome) -> list[str]:
    """The page's row of a kind that works."""
    has = {"windows": one.windows, "experts": one.experts, "states": one.states}
    features = ", ".join(name for name, there in has.items() if there)
    return [f"`{one.kind}`", f"`{one.architecture}`", features, one.engine, one.trainer]


def _told(one: Outcome) -> str:
    if one.problem:
        return one.problem.partition(": ")[2][:200].replace("|", "\\|")
    wrong = [
        f"log-probs differ by {one.distance:.0e}" if one.distance > FAR else "",
        "" if one.greedy else "greedy answers are not those of `generate`",
        "" if one.saved else "`hf/` does not load as it was saved",
    ]
    return "; ".join(each for each in wrong if each)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("kinds", nargs="*", help="model types; default: all")
    parser.add_argument("--json", type=Path, help="write what was found here")
    parser.add_argument("--write", action="store_true", help="put the tables into docs/models.md")
    options = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    found = asyncio.run(outcomes(options.kinds or KINDS))
    print(f"{sum(one.works for one in found)} of {len(found)} work")
    if options.json:
        options.json.write_text(json.dumps([asdict(one) for one in found], indent=1))
    if options.write:
        PAGE.write_text(page(found, PAGE.read_text()))


if __name__ == "__main__":
    main()
