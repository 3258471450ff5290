"""Answers kept to JSON schemas while they are decoded: are all complete ones valid, and what does it cost?

    python -m benchmarks.schemas --valid 1000    # random schemas, SmolLM2's vocabulary, a tiny model of random weights
    python -m benchmarks.schemas --cost 3        # pairs of turns with and without schemas, 32 rows of SmolLM2

A model of random weights is the hardest test: it says whatever the grammar lets it say. Costs are processor times of
decode steps in one process, in turns; no answer can end within a turn, so that both ways make the same steps.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import time
from collections import Counter
from pathlib import Path
from statistics import median
from typing import Any

import jsonschema
import numpy as np
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from rlinf.engines.base import Request, Sampling
from rlinf.engines.grammars import Form
from rlinf.engines.transformers.engine import TransformersEngine

MODEL = Path("~/.cache/rlinf/SmolLM2-135M-Instruct").expanduser()
_PATTERNS = (
    "^[A-Z][a-z]{1,6}$",
    "^[0-9]{2}-[0-9]{4}$",
    "^(red|green|blue)(-dark)?$",
    "^[a-f0-9]{8}$",
    "^x+y?$",
    "[aeiou]{2}",
)
_FORMATS = ("date", "uuid", "ipv4", "email")  # jsonschema reads times by Python, which takes fewer than there are
_NAMES = ("name", "age", "tags", "kind", "at", "x", "y", "größe", "a b", 'quo"te')


def schema(rng: random.Random, depth: int = 3) -> dict[str, Any]:
    """A random schema of the kinds that tools and forms have."""
    leaves = (
        _text,
        _pattern,
        _format,
        _enum,
        _const,
        _integer,
        _number,
        lambda rng: {"type": rng.choice(["boolean", "null"])},
    )
    if depth == 0 or rng.random() < 0.3:
        return rng.choice(leaves)(rng)
    return rng.choice((_object, _object, _array, _tuple, _union, _reference))(rng, depth - 1)


def _text(rng: random.Random) -> dict[str, Any]:
    least = rng.randint(0, 4)
    return {"type": "string", "minLength": least, "maxLength": least + rng.randint(0, 8)}


def _pattern(rng: random.Random) -> dict[str, Any]:
    return {"type": "string", "pattern": rng.choice(_PATTERNS), **({"maxLength": 12} if rng.random() < 0.5 else {})}


def _format(rng: random.Random) -> dict[str, Any]:
    return {"type": "string", "format": rng.choice(_FORMATS)}


def _enum(rng: random.Random) -> dict[str, Any]:
    return {"enum": rng.sample(["a", "b", 1, 2.5, None, True, {"k": [1]}, "é\n", ""], rng.randint(1, 4))}


def _const(rng: random.Random) -> dict[str, Any]:
    return {"const": rng.choice(["yes", 7, None, [1, "two"], {"k": {"l": False}}])}


def _integer(rng: random.Random) -> dict[str, Any]:
    low = rng.randint(-500, 500)
    bounds = {
        rng.choice(["minimum", "exclusiveMinimum"]): low,
        rng.choice(["maximum", "exclusiveMaximum"]): low + rng.randint(3, 900),
    }
    return {"type": "integer", **bounds, **({"multipleOf": 3} if rng.random() < 0.1 and low > 0 else {})}


def _number(rng: random.Random) -> dict[str, Any]:
    low = rng.randint(-50, 50) / 4
    return {"type": "number", "minimum": low, rng.choice(["maximum", "exclusiveMaximum"]): low + rng.randint(1, 40) / 8}


def _object(rng: random.Random, depth: int) -> dict[str, Any]:
    names = rng.sample(_NAMES, rng.randint(1, 4))
    properties = {name: schema(rng, depth) for name in names}
    more: Any = rng.choice([False, False, {"type": "integer", "minimum": 0, "maximum": 9}])
    required = [name for name in names if rng.random() < 0.7]
    return {"type": "object", "properties": properties, "required": required, "additionalProperties": more}


def _array(rng: random.Random, depth: int) -> dict[str, Any]:
    least = rng.randint(0, 2)
    return {"type": "array", "items": schema(rng, depth), "minItems": least, "maxItems": least + rng.randint(0, 2)}


def _tuple(rng: random.Random, depth: int) -> dict[str, Any]:
    items = [schema(rng, depth) for _ in range(rng.randint(1, 3))]
    return {"type": "array", "prefixItems": items, "items": False, "minItems": len(items)}


def _union(rng: random.Random, depth: int) -> dict[str, Any]:
    return {"anyOf": [schema(rng, depth) for _ in range(rng.randint(2, 3))]}


def _reference(rng: random.Random, depth: int) -> dict[str, Any]:
    return {"allOf": [schema(rng, depth)], "description": "one of its own"}


def schemas(count: int, seed: int = 0) -> list[dict[str, Any]]:
    """Random schemas."""
    rng = random.Random(seed)
    return [schema(rng) for _ in range(count)]


def answered(engine: TransformersEngine, requests: list[Request]) -> dict[int, Any]:
    """Answers to requests, by their ids."""

    async def every() -> dict[int, Any]:
        return {one.id: one async for one in engine.generate(requests)}

    return asyncio.run(every())


def verdict(text: str, schema: dict[str, Any]) -> str:
    """`valid`, or why a text is not JSON of a schema."""
    try:
        jsonschema.validate(json.loads(text), schema, format_checker=jsonschema.FormatChecker())
    except (ValueError, jsonschema.ValidationError) as error:
        return f"not valid: {str(error).splitlines()[0]}"
    return "valid"


def valid(engine: TransformersEngine, tokenizer: Any, count: int, most: int = 600) -> Counter[str]:
    """Answer random schemas; counts of what became of the answers."""
    tally: Counter[str] = Counter()
    wanted, requests = schemas(count), []
    for number, one in enumerate(wanted):
        form, prompt = Form(json.dumps(one)).text, np.array(tokenizer.encode(f"Number {number}:"), np.int64)
        if (problem := engine.form_problem(form)) is not None:
            tally[f"refused: {problem[:70]}"] += 1
            continue
        sampling = Sampling(most, stop_ids=(tokenizer.eos_token_id,), form=form)
        requests.append(Request(number, prompt, sampling, seed=number))
    for number, done in answered(engine, requests).items():
        if done.finish != "stop":
            tally[f"not complete: {done.finish}"] += 1
            continue
        result = verdict(tokenizer.decode(done.response_ids[:-1]), wanted[number])
        if result != "valid":
            print(number, result, json.dumps(wanted[number]), tokenizer.decode(done.response_ids), sep="\n   ")
        tally[result.partition(":")[0]] += 1
    return tally


def of_random_weights(tokenizer: Any, vocabulary: int, rows: int = 32) -> TransformersEngine:
    """An engine around a tiny model."""
    torch.manual_seed(0)
    config = AutoConfig.for_model(
        "qwen2", vocab_size=vocabulary, hidden_size=16, intermediate_size=16, num_hidden_layers=1,
        num_attention_heads=2, num_key_value_heads=1,
    )  # fmt: skip
    return TransformersEngine(AutoModelForCausalLM.from_config(config), tokenizer=tokenizer, max_rows=rows)


def cost(engine: TransformersEngine, tokenizer: Any, pairs: int, rows: int = 32, tokens: int = 24) -> list[list[float]]:
    """Processor seconds per step without schemas and with, in turns."""
    rng, turns = random.Random(1), []
    forms = [
        "",
        *(Form(json.dumps({"type": "array", "items": _object(rng, 1), "minItems": 200})).text for _ in range(rows)),
    ]
    for form in forms[1:]:
        assert engine.form_problem(form) is None
    for _ in range(pairs):
        turn = []
        for constrained in (False, True):
            requests = []
            for row in range(rows):
                prompt = np.array(tokenizer.encode("Give me a list of things as JSON."), np.int64)
                sampling = Sampling(
                    tokens,
                    stop_ids=(tokenizer.eos_token_id,) if constrained else (),
                    form=forms[(row + 1) * constrained],
                )
                requests.append(Request(row, prompt, sampling, seed=row))
            before, start = engine.stats.steps, time.process_time()
            answered(engine, requests)
            turn.append((time.process_time() - start) / (engine.stats.steps - before))
        turns.append(turn)
    return turns


def main() -> None:
    """Read the command line, and measure."""
    parser = argparse.ArgumentParser(description="Answers kept to JSON schemas")
    parser.add_argument("--valid", type=int, default=0, help="so many random schemas")
    parser.add_argument("--cost", type=int, default=0, help="so many pairs of turns with 32 rows")
    parser.add_argument("--model", type=Path, default=MODEL, help="its vocabulary, and for --cost its weights")
    options = parser.parse_args()
    tokenizer = AutoTokenizer.from_pretrained(options.model)
    if options.valid:
        start = time.process_time()
        engine = of_random_weights(tokenizer, 49_152)
        for result, count in valid(engine, tokenizer, options.valid).most_common():
            print(f"{count:5} {result}")
        print(f"{time.process_time() - start:.0f} s of processor time, {engine.stats.steps:.0f} steps")
    if options.cost:
        model = AutoModelForCausalLM.from_pretrained(options.model, dtype=torch.float32)
        turns = cost(TransformersEngine(model, tokenizer=tokenizer, max_rows=32), tokenizer, options.cost)
        for plain, constrained in turns:
            print(f"{plain * 1e3:.1f} ms a step without, {constrained * 1e3:.1f} ms with: {constrained / plain:.3f}")
        print(f"median ratio {median(constrained / plain for plain, constrained in turns):.3f}")


if __name__ == "__main__":
    main()
