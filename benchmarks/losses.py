"""`python -m benchmarks.losses`: every loss with its backward pass, beside the cheapest pass that could be its core.

The yardstick is `logprobs.exp().sum().backward()` on the same [64, 4096] float32 tensor, one thread. Contestants take
turns, the yardstick between any two; a ratio is taken to the yardsticks before and after it. Time is the thread's own
(`time.thread_time`), so that other programs on the machine take none of it; their traces in the caches remain. Shown
are medians over the rounds with quartiles. The bar is 3; a row that misses it says LOST.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from rlinf.algos import losses
from rlinf.algos.sums import LossSum

SHAPE = (64, 4096)
BAR = 3.0
CLIP = {"clip_low": 0.2, "clip_high": 0.28}


def contestants(new: Tensor, old: Tensor, mask: Tensor) -> dict[str, Callable[[], LossSum]]:
    """Every loss as it is called in training, with one advantage per row."""
    gains = torch.randn(SHAPE[0])
    noisy = old + 0.05 * torch.randn(SHAPE)
    answer = {"how": "seq-mean-token-mean"}
    return {
        "policy": lambda: losses.policy(new, old, gains, mask, **CLIP),
        "policy, dual clip, entropy watched": lambda: losses.policy(
            new, old, gains, mask, **CLIP, dual_clip=3.0, entropy=-old
        ),
        "policy, seq-mean-token-mean": lambda: losses.policy(new, old, gains, mask, **CLIP, **answer),
        "policy, ratio per sequence (GSPO)": lambda: losses.policy(
            new, old, gains, mask, **CLIP, **answer, ratio="sequence"
        ),
        "policy, truncated importance sampling": lambda: losses.policy(
            new, old, gains, mask, **CLIP, behavior_logprobs=noisy, is_cap=2.0
        ),
        "decoupled": lambda: losses.decoupled(new, old, noisy, gains, mask, **CLIP),
        "cispo": lambda: losses.cispo(new, old, gains, mask),
        "aipo": lambda: losses.aipo(new, old, gains, mask, cap=4.0),
        "sapo": lambda: losses.sapo(new, old, gains, mask),
        "distill": lambda: losses.distill(new, old, noisy, mask, **CLIP),
        "value": lambda: losses.value(new, old, noisy, mask),
        "kl (k3)": lambda: losses.kl(new, old, mask),
        "supervised": lambda: losses.supervised(new, mask),
    }


def seconds(leaf: Tensor, total: Callable[[], Tensor]) -> float:
    """Thread time of one forward and backward pass."""
    leaf.grad = None
    start = time.thread_time()
    total().backward()  # type: ignore[no-untyped-call]
    return time.thread_time() - start


def measure(mask: Tensor, rounds: int) -> dict[str, tuple[list[float], list[float]]]:
    """Seconds and ratios of each contestant, by round."""
    new = (-3 * torch.rand(SHAPE)).requires_grad_()
    entered = contestants(new, new.detach() + 0.1 * torch.randn(SHAPE), mask)
    found: dict[str, tuple[list[float], list[float]]] = {name: ([], []) for name in entered}
    for _ in range(rounds):
        before = seconds(new, lambda: new.exp().sum())
        for name, loss in entered.items():
            taken = seconds(new, lambda loss=loss: loss().total)  # type: ignore[misc]
            after = seconds(new, lambda: new.exp().sum())
            found[name][0].append(taken)
            found[name][1].append(2 * taken / (before + after))
            before = after
    return found


def ragged() -> Tensor:
    """Rows of any length up to the whole."""
    return torch.arange(SHAPE[1]) < torch.randint(1, SHAPE[1] + 1, (SHAPE[0], 1))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=60)
    rounds = parser.parse_args().rounds
    torch.set_num_threads(1)
    torch.manual_seed(0)
    for title, mask in (("every token counts", torch.ones(SHAPE, dtype=torch.bool)), ("ragged rows", ragged())):
        table = Table(title=f"{list(SHAPE)} float32, {title}, torch {torch.__version__}")
        for column in ("loss with backward", "ms", "x yardstick", "quartiles", "best", f"bar {BAR:g}"):
            table.add_column(column, justify="left" if column.startswith("loss") else "right")
        for name, (times, ratios) in measure(mask, rounds).items():
            low, middle, high = statistics.quantiles(ratios, n=4, method="inclusive")
            verdict = "met" if middle <= BAR else "LOST"
            table.add_row(
                name,
                f"{statistics.median(times) * 1e3:.2f}",
                f"{middle:.1f}",
                f"{low:.1f}-{high:.1f}",
                f"{min(ratios):.1f}",
                verdict,
            )
        Console().print(table)


if __name__ == "__main__":
    main()
