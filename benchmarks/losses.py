"""`python -m benchmarks.losses`: every loss with its backward pass, beside the cheapest pass that could be its core.

The yardstick is `logprobs.exp().sum().backward()` on the same [64, 4096] float32 tensor, one thread. Contestants take
turns, the yardstick between any two; a ratio is taken to the yardsticks before and after it. Time is the thread's own
(`time.thread_time`), so that other programs on the machine take none of it; their traces in the caches remain, and
weigh more on what uses more memory. The allocator keeps what it has mapped, as in a run that has gone on for long: page
faults, which come by chance of what lies at the end of the heap, were measured to triple the yardstick. Shown are
medians over the rounds with quartiles, and `quiet`: the fastest tenth of the turns over the fastest tenth of the
yardsticks.
"""

from __future__ import annotations

import argparse
import ctypes
import statistics
import time
from collections.abc import Callable

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from rlinf.algos import losses
from rlinf.algos.loss_sum import LossSum
from rlinf.algos.losses import weights

SHAPE = (64, 4096)
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
            new, old, gains, mask, **CLIP, weights=weights(old, noisy, mask)[0]
        ),
        "decoupled": lambda: losses.decoupled(new, old, noisy, gains, mask, **CLIP),
        "cispo": lambda: losses.cispo(new, old, gains, mask),
        "aipo": lambda: losses.aipo(new, old, gains, mask, cap=4.0),
        "sapo": lambda: losses.sapo(new, old, gains, mask),
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


def measure(mask: Tensor, rounds: int) -> tuple[dict[str, tuple[list[float], list[float]]], list[float]]:
    """Seconds and ratios of each contestant, by round; and seconds of the yardsticks."""
    new = (-3 * torch.rand(SHAPE)).requires_grad_()
    entered = contestants(new, new.detach() + 0.1 * torch.randn(SHAPE), mask)
    found: dict[str, tuple[list[float], list[float]]] = {name: ([], []) for name in entered}
    yardsticks = []
    for _ in range(rounds):
        before = seconds(new, lambda: new.exp().sum())
        for name, loss in entered.items():
            taken = seconds(new, lambda loss=loss: loss().total)  # type: ignore[misc]
            after = seconds(new, lambda: new.exp().sum())
            found[name][0].append(taken)
            found[name][1].append(2 * taken / (before + after))
            yardsticks.append(after)
            before = after
    return found, yardsticks


def fast(times: list[float]) -> float:
    """Least tenth: the time that a tenth of them is below."""
    return statistics.quantiles(times, n=10, method="inclusive")[0]


def keep_memory() -> None:
    """Have glibc neither map large blocks apart nor give memory back; elsewhere do nothing."""
    libc = ctypes.CDLL(None)
    if hasattr(libc, "mallopt"):
        libc.mallopt(-3, 32 << 20)  # M_MMAP_THRESHOLD, its highest value
        libc.mallopt(-1, 1 << 30)  # M_TRIM_THRESHOLD


def ragged() -> Tensor:
    """Rows of any length up to the whole."""
    return torch.arange(SHAPE[1]) < torch.randint(1, SHAPE[1] + 1, (SHAPE[0], 1))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=60, help="2 or more, of which quartiles are shown")
    if (rounds := parser.parse_args().rounds) < 2:
        parser.error("--rounds is 2 or more: quartiles are shown")
    keep_memory()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    for title, mask in (("every token counts", torch.ones(SHAPE, dtype=torch.bool)), ("ragged rows", ragged())):
        table = Table(title=f"{list(SHAPE)} float32, {title}, torch {torch.__version__}")
        for column in ("loss with backward", "ms", "x yardstick", "quartiles", "quiet"):
            table.add_column(column, justify="left" if column.startswith("loss") else "right")
        found, yardsticks = measure(mask, rounds)
        for name, (times, ratios) in found.items():
            low, middle, high = statistics.quantiles(ratios, n=4, method="inclusive")
            table.add_row(
                name,
                f"{statistics.median(times) * 1e3:.2f}",
                f"{middle:.1f}",
                f"{low:.1f}-{high:.1f}",
                f"{fast(times) / fast(yardsticks):.1f}",
            )
        Console().print(table)


if __name__ == "__main__":
    main()
