"""What an endpoint counts, in Prometheus' text form.

In: requests as they end. Out: `/metrics`. Nobody waits here.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter, defaultdict
from dataclasses import dataclass, field

_BOUNDS = (0.005, 0.02, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)
"""Seconds; from what a tiny model needs to the longest answers."""


@dataclass(slots=True)
class Metrics:
    """Counts since the endpoint began."""

    requests: Counter[tuple[str, int]] = field(default_factory=Counter)
    """By route and status; 499: the client left."""
    in_flight: int = 0
    """Requests that are answered just now."""
    read: int = 0
    """Tokens that the model had before its answers."""
    cached: int = 0
    """Of those, how many earlier answers of the same conversation had."""
    generated: int = 0
    """Tokens of answers."""
    malformed: int = 0
    """Answers that were not the JSON that was asked for."""
    asked_again: int = 0
    """Answers that did not call tools as the client wished, so that the model was asked once more."""
    opened: int = 0
    """Sessions."""
    branches: int = 0
    """Histories that were rewritten or forked, in sessions that are over."""
    _seconds: dict[str, list[int]] = field(default_factory=lambda: defaultdict(lambda: [0] * (len(_BOUNDS) + 1)))
    _total: dict[str, float] = field(default_factory=lambda: defaultdict(float))

    def ended(self, route: str, status: int, seconds: float) -> None:
        """A request is over."""
        self.requests[route, status] += 1
        self._seconds[route][bisect_left(_BOUNDS, seconds)] += 1
        self._total[route] += seconds

    def text(self, sessions: int, branches: int) -> str:
        """All of it.

        Args:
            sessions: that are open.
            branches: in those.
        """
        lines: list[str] = []

        def tell(name: str, kind: str, *rows: tuple[str, float]) -> None:
            lines.append(f"# TYPE rlinf_endpoint_{name} {kind}")
            lines.extend(f"rlinf_endpoint_{name}{labels} {value:g}" for labels, value in rows)

        tell(
            "requests_total", "counter",
            *((f'{{route="{route}",code="{code}"}}', n) for (route, code), n in sorted(self.requests.items())),
        )  # fmt: skip
        tell("requests_in_flight", "gauge", ("", self.in_flight))
        tell(
            "tokens_total", "counter",
            ('{kind="read"}', self.read), ('{kind="cached"}', self.cached), ('{kind="generated"}', self.generated),
        )  # fmt: skip
        tell("malformed_json_total", "counter", ("", self.malformed))
        tell("asked_again_total", "counter", ("", self.asked_again))
        tell("sessions", "gauge", ("", sessions))
        tell("sessions_total", "counter", ("", self.opened))
        tell("branches_total", "counter", ("", self.branches + branches))
        lines.append("# TYPE rlinf_endpoint_request_seconds histogram")
        for route, counts in sorted(self._seconds.items()):
            below = 0
            for bound, count in zip((*map(str, _BOUNDS), "+Inf"), counts, strict=True):
                below += count
                lines.append(f'rlinf_endpoint_request_seconds_bucket{{route="{route}",le="{bound}"}} {below}')
            lines.append(f'rlinf_endpoint_request_seconds_sum{{route="{route}"}} {self._total[route]:g}')
            lines.append(f'rlinf_endpoint_request_seconds_count{{route="{route}"}} {below}')
        return "\n".join(lines) + "\n"
