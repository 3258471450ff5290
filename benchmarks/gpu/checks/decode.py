"""Does a decode step take as long as the one before it, and does the engine answer what transformers answers?"""

from __future__ import annotations

import asyncio
import math
import statistics
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from benchmarks.gpu.checks.device import CLOCK, NAMES, cudnn_attention, emptied, kernels
from benchmarks.gpu.checks.judging import Bound, judge
from benchmarks.gpu.checks.parts import Made, engine, prompts, requests
from benchmarks.gpu.scale import REHEARSED, Outcome, Scale
from rlinf.engines.base import Completion, Request

GRAPHS = "CUDA graphs"
RECORDED = "recorded steps (CUDA graphs)"
"""Text that the engine says of its decode path where all is as it should be on a GPU."""
SLOW = 1.5
"""Times the median: a step that takes longer is slow."""
STEPS = (
    *(Bound(f"{kind}_p99_over_median", most=SLOW, needs=CLOCK) for kind in ("uniform", "ragged")),
    *(Bound(f"{kind}_slow_at_first_share", most=0.05, needs=CLOCK) for kind in ("uniform", "ragged")),
    Bound("steps_timed", least=16),
    Bound("decoding", equals=RECORDED, needs=GRAPHS),
    Bound("cudnn_attention", equals="off", needs="cuDNN"),
    Bound("cudnn_attention_kernels", most=0, needs=NAMES),
    Bound("kernels_seen", least=1, needs=NAMES),
)
"""A kernel library that plans anew for each shape shows as slow first steps, the window being another in each; a second
time it knows them all, and only what repeats is slow. Some few first steps may be: more rows or pages are recorded."""
ALIKE = (
    Bound("answers", least=16),
    Bound("equal_answers_share", least=0.95),
    Bound("largest_logprob_difference_nats", most=1e-3),
    Bound("decoding", equals=RECORDED, needs=GRAPHS),
    Bound("beside", equals="step by step on cuda", needs=GRAPHS),
)
"""In float32. Of 152,000 tokens each has 1/150,000 of the random numbers, and log-probs that differ by 1e-5 move where
one ends by some millionths of that: now and then a token differs, and with it the rest of its answer."""
TIE = 0.1
"""Logits that are no further apart than this are equal for bfloat16: it rounds numbers from 4 to 8, which the largest
of 152,000 logits of a random model are, to 1/32, and 28 layers add errors of the same order."""
GENERATE = (
    Bound("residues_of_8", equals=8),
    Bound("likeliest_or_tied_share", least=0.99),
    Bound("likeliest_share_behind_generate", most=0.03),
)


def steps(scale: Scale) -> Outcome:
    """128 decode steps with a window that grows, all rows alike and ragged; the second time every shape is known."""
    return judge(scale, asyncio.run(_steps(scale)), STEPS)


async def _steps(scale: Scale) -> dict[str, float | str]:
    count, lasting = scale.of(128, 24), scale.of(64, 6)
    longest, leaving = scale.of(512, 24), scale.of(32, 4)
    uniform = requests(prompts(scale, [longest] * lasting), count)
    lengths = [longest // 4 + (5 * number) % (longest // 2) for number in range(lasting + leaving)]
    ends = [count] * lasting + [(number + 1) * count // leaving for number in range(leaving)]
    ragged = requests(prompts(scale, lengths, seed=1), ends)
    figures: dict[str, float | str] = {}
    async with engine(scale, max_rows=lasting + leaving) as made:
        for rows in (lasting, lasting + leaving):  # captures, compiles and tunes
            await made.answers(requests(prompts(scale, [7] * rows), 8))
        timed = 0.0
        for name, asked in (("uniform", uniform), ("ragged", ragged)):
            first, again = await _timed(made, asked), await _timed(made, asked)
            median = statistics.median(again)
            figures[f"{name}_p99_over_median"] = float(np.percentile(again, 99)) / median
            figures[f"{name}_slow_at_first_share"] = float(np.mean([taken > SLOW * median for taken in first]))
            figures[f"{name}_median_ms"], figures[f"{name}_slowest_ms"] = 1e3 * median, 1e3 * max(first)
            timed += len(first)
        with kernels(scale.device) as found:
            await made.answers(requests(prompts(scale, [9] * lasting), 4))
        cudnn = "on" if torch.backends.cuda.cudnn_sdp_enabled() else "off"
        decoding = made.engine.decoding  # type: ignore[attr-defined]  # of the transformers engine alone
    kinds = {"cudnn_attention_kernels": cudnn_attention(found), "kernels_seen": sum(found.values())}
    return {**figures, **kinds, "steps_timed": timed, "decoding": decoding, "cudnn_attention": cudnn}


async def _timed(made: Made, asked: Sequence[Request]) -> list[float]:
    """Seconds of each step. Steps that the thread took without a look at what they gave have their mean."""
    made.stretches.clear()
    await made.answers(asked)
    return [seconds / steps for steps, seconds in made.stretches for _ in range(round(steps))]


def recorded(scale: Scale) -> Outcome:
    """Recorded steps beside plain ones, in float32: the same seeds give the same answers, while rows join and leave."""
    count, new = scale.of(96, 24), scale.of(48, 10)
    lengths = [7 + (5 * number) % scale.of(200, 40) for number in range(count)]
    ends = [1 + (7 * number) % new for number in range(count)]
    asked = requests(prompts(scale, lengths), ends)
    asked[::2] = requests(prompts(scale, lengths), ends, temperature=0.0)[::2]

    async def by(graphs: str) -> tuple[list[Completion], str]:
        async with engine(scale, max_rows=scale.of(40, 9), dtype=torch.float32, args={"graphs": graphs}) as made:
            return await made.answers(asked), made.engine.decoding  # type: ignore[attr-defined]

    plain, beside = asyncio.run(by("off"))
    emptied(scale.device)
    found, decoding = asyncio.run(by(REHEARSED if scale.rehearse else "auto"))
    equal = [np.array_equal(a.response_ids, b.response_ids) for a, b in zip(found, plain, strict=True)]
    apart = [
        float(np.abs(a.logprobs - b.logprobs).max()) for a, b, same in zip(found, plain, equal, strict=True) if same
    ]
    figures = {
        "answers": count,
        "equal_answers_share": float(np.mean(equal)),
        "largest_logprob_difference_nats": max(apart, default=math.inf),
        "decoding": decoding,
        "beside": beside,
    }
    return judge(scale, figures, ALIKE)


def beside_generate(scale: Scale) -> Outcome:
    """Greedy answers to 64 ragged prompts, judged by the logits of the same weights in float32, one prompt at a time;
    and those of `generate`, judged alike, since of near ties either may be taken."""
    count, new = scale.of(64, 16), scale.of(32, 6)
    asked = prompts(scale, [9 + 5 * number for number in range(count)])
    found = asyncio.run(_greedy(scale, asked, new))
    ours = [completion.response_ids for completion in found]
    theirs = _generated(scale, asked, new)
    reference = _reference(scale)
    likeliest, gaps = _judged(reference, asked, ours)
    generated, _ = _judged(reference, asked, theirs)
    figures = {
        "likeliest_share": likeliest,
        "likeliest_or_tied_share": float(np.mean([gap <= TIE for gap in gaps])),
        "largest_gap_nats": float(max(gaps)),
        "generate_likeliest_share": generated,
        "likeliest_share_behind_generate": generated - likeliest,
        "equal_to_generate_share": float(np.mean([a == b for a, b in zip(_flat(ours), _flat(theirs), strict=True)])),
        "residues_of_8": len({len(prompt) % 8 for prompt in asked}),
    }
    return judge(scale, figures, GENERATE)


async def _greedy(scale: Scale, asked: Sequence[np.ndarray], new: int) -> list[Completion]:
    async with engine(scale, max_rows=len(asked)) as made:
        return await made.answers(requests(asked, new, temperature=0.0))


def _generated(scale: Scale, asked: Sequence[np.ndarray], new: int) -> list[np.ndarray]:
    """By `generate`, all prompts padded on the left."""
    from transformers import AutoModelForCausalLM

    model: Any = AutoModelForCausalLM.from_pretrained(scale.model_dir("1.5B"), dtype=scale.dtype).to(scale.device)
    longest = max(map(len, asked))
    ids = torch.zeros((len(asked), longest), dtype=torch.int64)
    mask = torch.zeros_like(ids)
    for row, prompt in enumerate(asked):
        ids[row, longest - len(prompt) :] = torch.from_numpy(prompt)
        mask[row, longest - len(prompt) :] = 1
    with torch.inference_mode():
        given = model.eval().generate(
            ids.to(scale.device), attention_mask=mask.to(scale.device), do_sample=False, max_new_tokens=new,
            eos_token_id=None, pad_token_id=0,
        )  # fmt: skip
    answers = [row[longest:].cpu().numpy() for row in given]
    del model, given
    emptied(scale.device)
    return answers


def _reference(scale: Scale) -> Any:
    from transformers import AutoModelForCausalLM

    model: Any = AutoModelForCausalLM.from_pretrained(scale.model_dir("1.5B"), dtype=torch.float32)
    return model.to(scale.device).eval()


@torch.inference_mode()
def _judged(model: Any, asked: Sequence[np.ndarray], answers: Sequence[np.ndarray]) -> tuple[float, list[float]]:
    """Share of tokens that are the model's likeliest after all that stands before them, and how far each is behind."""
    likeliest: list[bool] = []
    gaps: list[float] = []
    device = next(model.parameters()).device
    for prompt, answer in zip(asked, answers, strict=True):
        ids = torch.from_numpy(np.concatenate([prompt, answer])).to(device)
        logits: Tensor = model(ids[None, :-1], use_cache=False).logits[0, len(prompt) - 1 :].float()
        taken = logits.gather(1, ids[len(prompt) :, None])[:, 0]
        behind = logits.amax(1) - taken
        likeliest += (logits.argmax(1) == ids[len(prompt) :]).tolist()
        gaps += behind.tolist()
    return float(np.mean(likeliest)), gaps


def _flat(answers: Sequence[np.ndarray]) -> list[int]:
    return [int(token) for answer in answers for token in answer]
