"""Cost of recording a span: `python -m benchmarks.span_cost`. The bar is 2 µs."""

from __future__ import annotations

import time

from rlinf.runtime.observe.spans import Tracer


def span_cost(spans: int = 200_000, *, enabled: bool = True) -> float:
    """Microseconds per span, best of five runs."""
    tracer = Tracer(enabled=enabled)
    best = float("inf")
    for _ in range(5):
        start = time.perf_counter()
        for _ in range(spans):
            tracer.span("call", "judge[0]", "score", "flow", 1.0, 2.0)
        best = min(best, time.perf_counter() - start)
    return best / spans * 1e6


if __name__ == "__main__":
    print(f"a span costs {span_cost():.2f} µs; with tracing off {span_cost(enabled=False):.2f} µs")
