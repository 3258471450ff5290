"""Runs, steps and stages as OpenTelemetry spans, where `tracing` or the environment names a collector.

In: a run that begins and ends, and the `Lap` of each step. Out: a span of the run, below it one of each step, below
those one of each stage (`generation`, `training` and the like), and below the generation those of episodes, which
`rlinf.agents.outcome` makes. Who wakes whom: nobody; the library sends in a thread of its own, drops what a collector
does not take in time, and the run waits for nothing.
"""

from __future__ import annotations

import functools
import os
import time
from contextvars import ContextVar
from importlib import import_module
from typing import Any

from rlinf.metrics.timing import stages
from rlinf.runtime.base.errors import UserError
from rlinf.runtime.observe.spans import Lap

_ENDPOINTS = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
"""Variables that the library reads; without one of them, or a collector of the configuration, nothing is sent."""
_EPISODES = "generation"
"""The stage to which episodes belong."""


@functools.cache
def provider(collector: str | None = None) -> Any:
    """The library's provider of tracers; None: no collector is named.

    Args:
        collector: its address, such as http://collector:4318; None: the environment may name one.

    Raises:
        UserError: the library is not installed.
    """
    if collector is None and not any(map(os.environ.get, _ENDPOINTS)):
        return None
    where = {} if collector is None else {"endpoint": f"{collector.rstrip('/')}/v1/traces"}
    try:
        sdk, processors = import_module("opentelemetry.sdk.trace"), import_module("opentelemetry.sdk.trace.export")
        exporter = import_module("opentelemetry.exporter.otlp.proto.http.trace_exporter").OTLPSpanExporter(**where)
        ids = _Ids(import_module("opentelemetry.sdk.trace.id_generator").RandomIdGenerator())
        resource = import_module("opentelemetry.sdk.resources").Resource.create({"service.name": "rlinf"})
    except ModuleNotFoundError as error:
        raise UserError(f"tracing: spans need {error.name}: pip install 'rlinf[tracing]'") from None
    traces = sdk.TracerProvider(resource=resource, id_generator=ids)
    traces.add_span_processor(processors.BatchSpanProcessor(exporter))
    return traces


class _Ids:
    """Draws ids, as the library does; `next` is that of the span that begins next, or None.

    Args:
        random: the library's own.
    """

    def __init__(self, random: Any) -> None:
        self._random = random
        self.next: int | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._random, name)

    def generate_span_id(self) -> int:
        id, self.next = self.next, None
        return int(self._random.generate_span_id()) if id is None else id


def nanoseconds(seconds: float) -> int:
    """Seconds since 1970, as the library has times."""
    return int(seconds * 1e9)


class RunSpans:
    """The spans of one run.

    Args:
        traces: provides tracers.
        name: of the run.
    """

    def __init__(self, traces: Any, name: str) -> None:
        self._api, self._ids = import_module("opentelemetry.trace"), traces.id_generator
        self.tracer = traces.get_tracer("rlinf")
        self._run = self.tracer.start_span("run", attributes={"rlinf.run": name})
        self._step: Any = None
        self._generation: int | None = None  # id of that stage's span, where spans below it are sent before

    @property
    def episodes(self) -> Any:
        """Context to which the spans of episodes belong that end now: the generation of the step, or the run."""
        if self._step is None:
            return self._below(self._run)
        own = self._step.get_span_context()
        self._generation = self._generation or self._ids.generate_span_id()
        stage = self._api.SpanContext(own.trace_id, self._generation, is_remote=False, trace_flags=own.trace_flags)
        return self._below(self._api.NonRecordingSpan(stage))

    def step_begins(self) -> None:
        """Begin a step's span."""
        self._step = self.tracer.start_span("step", context=self._below(self._run))

    def step_ends(self, step: int, lap: Lap, now: float) -> None:
        """End a step's span, with those of its stages.

        Args:
            step: which, from 1.
            lap: who was busy when.
            now: by the lap's clock.
        """
        span, self._step, zero = self._step, None, time.time() - now
        generation, self._generation = self._generation, None
        whole = {} if generation is None else {_EPISODES: [(lap.start, lap.end)]}  # if nothing is known of it
        for name, times in {**whole, **stages(lap)}.items():
            if not times:
                continue
            self._ids.next = generation if name == _EPISODES else None
            first = nanoseconds(zero + min(start for start, _ in times))
            stage = self.tracer.start_span(name, context=self._below(span), start_time=first)
            stage.set_attribute("rlinf.busy_seconds", sum(end - start for start, end in times))
            stage.end(nanoseconds(zero + max(end for _, end in times)))
        span.set_attribute("rlinf.step", step)
        span.end(nanoseconds(zero + lap.end))

    def end(self, error: BaseException | None) -> None:
        """End the run's span, and that of a step that did not end."""
        for span in (self._step, self._run):
            if span is not None:
                if error is not None:
                    span.set_status(self._api.Status(self._api.StatusCode.ERROR, f"{type(error).__name__}: {error}"))
                span.end()
        self._step = None

    def _below(self, span: Any) -> Any:
        return self._api.set_span_in_context(span)


spans_here: ContextVar[RunSpans | None] = ContextVar("spans", default=None)
"""Those of the run whose code runs; None: nobody wants any."""
