"""Episodes of agents as OpenTelemetry spans, where OTEL_EXPORTER_OTLP_ENDPOINT says to which collector.

In: an episode that is over. Out: a span of it, and below that one for each answer of its agents, named and described by
the semantic conventions for generative AI. Who wakes whom: nobody; the library sends in a thread of its own, drops what
a collector does not take in time, and the episode waits for nothing.
"""

from __future__ import annotations

import functools
import os
import time
from importlib import import_module
from typing import Any

from rlinf.agents.agent import AgentLLM
from rlinf.agents.outcome import Episode
from rlinf.agents.trajectories import Turn
from rlinf.runtime.base.errors import UserError

_ENDPOINTS = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
"""Variables that the library reads; without one of them nothing is sent."""


@functools.cache
def provider() -> Any:
    """The library's provider of tracers; None: no collector is named.

    Raises:
        UserError: the library is not installed.
    """
    if not any(map(os.environ.get, _ENDPOINTS)):
        return None
    try:
        sdk, processors = import_module("opentelemetry.sdk.trace"), import_module("opentelemetry.sdk.trace.export")
        exporter = import_module("opentelemetry.exporter.otlp.proto.http.trace_exporter").OTLPSpanExporter()
        resource = import_module("opentelemetry.sdk.resources").Resource.create({"service.name": "rlinf"})
    except ModuleNotFoundError as error:
        raise UserError(f"{_ENDPOINTS[1]} is set, and spans need {error.name}: pip install 'rlinf[tracing]'") from None
    traces = sdk.TracerProvider(resource=resource)
    traces.add_span_processor(processors.BatchSpanProcessor(exporter))
    return traces


def send(episode: Episode, failure: str | None) -> None:
    """Send the spans of an episode, if a collector is named.

    Args:
        episode: over.
        failure: why it failed; None: it did not.
    """
    if episode.llm is None or (traces := provider()) is None:
        return
    tracer, zero = traces.get_tracer("rlinf"), time.time() - (time.monotonic() - episode.llm.start)
    about = {"gen_ai.operation.name": "invoke_agent", "rlinf.task": episode.task, "rlinf.attempt": episode.index}
    root = tracer.start_span("invoke_agent", attributes=about, start_time=_nanoseconds(zero))
    if failure is not None:
        api = import_module("opentelemetry.trace")
        root.set_status(api.Status(api.StatusCode.ERROR, failure))
    below = import_module("opentelemetry.trace").set_span_in_context(root)
    for agent in episode.llm.agents.values():
        for turn in agent.trajectories.turns:
            start = zero + turn.start
            span = tracer.start_span(
                "chat policy", context=below, attributes=_about(agent, turn), start_time=_nanoseconds(start)
            )
            for call in turn.calls:
                span.add_event("tool_call", {"gen_ai.tool.name": str(call.get("name") or call.get("broken"))})
            span.end(_nanoseconds(start + turn.took))
    root.end()


def _about(agent: AgentLLM, turn: Turn) -> dict[str, Any]:
    written = len(turn.answer.token_ids)
    about: dict[str, Any] = {
        "gen_ai.operation.name": "chat",
        "gen_ai.provider.name": "rlinf",
        "gen_ai.request.model": "policy",
        "gen_ai.request.temperature": turn.temperature,
        "gen_ai.conversation.id": str(turn.conversation),
        "gen_ai.usage.input_tokens": turn.length - written,
        "gen_ai.usage.output_tokens": written,
        "gen_ai.response.finish_reasons": [turn.finish],
    }
    if agent.name:
        about["gen_ai.agent.name"] = agent.name
    return about if turn.reward is None else about | {"rlinf.reward": turn.reward}


def _nanoseconds(seconds: float) -> int:
    return int(seconds * 1e9)
