"""Runs, steps, stages and episodes are spans at the collector that is named, and nowhere without one."""

import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from types import SimpleNamespace

import pytest

from rlinf import load_config
from rlinf.agents.outcome import send_spans
from rlinf.config.load import InputError
from rlinf.metrics.tracing import RunSpans, provider
from rlinf.runtime.observe.spans import Busy, Lap
from tests.agents.test_trajectories import begun, user

service = pytest.importorskip("opentelemetry.proto.collector.trace.v1.trace_service_pb2")


@pytest.fixture
def collector(monkeypatch):
    """A small OTLP receiver: the bodies that came."""
    bodies = []

    class Receiver(BaseHTTPRequestHandler):
        def do_POST(self):
            bodies.append((self.path, self.rfile.read(int(self.headers["Content-Length"]))))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_):
            pass

    server = HTTPServer(("127.0.0.1", 0), Receiver)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    provider.cache_clear()
    yield f"http://127.0.0.1:{server.server_port}", bodies
    provider.cache_clear()
    server.shutdown()
    server.server_close()


def named_so(spans, name):
    return [span for span in spans if span.name == name]


def values(span):
    found = {}
    for each in span.attributes:
        kind = each.value.WhichOneof("value")
        value = getattr(each.value, kind)
        found[each.key] = [one.string_value for one in value.values] if kind == "array_value" else value
    return found


LAP = Lap(
    10.0,
    14.0,
    (
        Busy("rollout[0]", "generate", ((10.5, 11.0), (12.0, 12.5))),
        Busy("trainer[0]", "train", ((12.5, 14.0),)),
    ),
)


@pytest.mark.parametrize("named", ["by the configuration", "by the environment"])
async def test_a_run_has_steps_with_stages_and_episodes_with_a_span_for_each_answer(collector, named, monkeypatch):
    address, bodies = collector
    if named == "by the environment":
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", address)
    traces = provider(address if named == "by the configuration" else None)
    run = RunSpans(traces, "mine")
    run.step_begins()
    llm, _ = begun()
    answer = await llm.chat([user("Hi")], temperature=0.5)
    await llm.agent("critic").chat([user("and?")])
    llm.reward(0.25, answer)
    send_spans(SimpleNamespace(llm=llm, task=7, index=2), "ValueError: no (agent.py:3)", run)
    run.step_ends(1, LAP, 14.0)
    send_spans(SimpleNamespace(llm=llm, task=8, index=0), None, run)  # of an evaluation between steps
    run.step_begins()
    run.end(RuntimeError("out of luck"))
    traces.shutdown()
    spans = []
    for path, body in bodies:
        assert path == "/v1/traces"
        request = service.ExportTraceServiceRequest.FromString(body)
        spans += [span for one in request.resource_spans for scope in one.scope_spans for span in scope.spans]
    (whole,), (generation,), (training,) = (named_so(spans, name) for name in ("run", "generation", "training"))
    step, unfinished = sorted(named_so(spans, "step"), key=lambda span: not span.attributes)
    assert values(whole) == {"rlinf.run": "mine"}
    assert values(step) == {"rlinf.step": 1}
    assert (whole.status.message, unfinished.status.message) == ("RuntimeError: out of luck",) * 2
    assert {span.parent_span_id for span in (step, unfinished)} == {whole.span_id}
    assert {span.parent_span_id for span in (generation, training)} == {step.span_id}
    assert values(generation)["rlinf.busy_seconds"] == 1.0
    assert generation.end_time_unix_nano - generation.start_time_unix_nano == pytest.approx(2e9, abs=2e3)
    root, between = sorted(named_so(spans, "invoke_agent"), key=lambda span: values(span)["rlinf.task"])
    assert (root.parent_span_id, between.parent_span_id) == (generation.span_id, whole.span_id)
    spans = [span for span in spans if span.parent_span_id != between.span_id]
    assert values(root)["rlinf.task"] == 7
    assert values(root)["rlinf.attempt"] == 2
    assert root.status.message == "ValueError: no (agent.py:3)"
    turns = sorted((span for span in spans if span.name == "chat policy"), key=lambda span: span.start_time_unix_nano)
    assert len(turns) == 2
    assert all(turn.parent_span_id == root.span_id and turn.trace_id == root.trace_id for turn in turns)
    assert all(
        root.start_time_unix_nano <= turn.start_time_unix_nano <= turn.end_time_unix_nano <= root.end_time_unix_nano
        for turn in turns
    )
    first, second = map(values, turns)
    assert first["gen_ai.usage.output_tokens"] == len(answer.ids)
    assert first["gen_ai.request.temperature"] == 0.5
    assert first["gen_ai.response.finish_reasons"] == [answer.finish]
    assert first["rlinf.reward"] == 0.25
    assert second["gen_ai.agent.name"] == "critic"
    assert "rlinf.reward" not in second


def test_without_a_collector_nothing_is_imported_or_sent(monkeypatch):
    for name in ("OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT"):
        monkeypatch.delenv(name, raising=False)
    provider.cache_clear()
    assert provider() is None
    provider.cache_clear()


def test_a_collector_that_is_no_address_is_told_by_its_key():
    with pytest.raises(InputError, match="tracing"):
        load_config("configs/quickstart.yaml", ["tracing=collector:4318"])
