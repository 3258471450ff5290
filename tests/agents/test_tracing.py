"""Episodes are sent as spans to a collector that the environment names, and nowhere without one."""

import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from types import SimpleNamespace

import pytest

from rlinf.agents import tracing
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
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", f"http://127.0.0.1:{server.server_port}")
    tracing.provider.cache_clear()
    yield bodies
    tracing.provider.cache_clear()
    server.shutdown()
    server.server_close()


def values(span):
    found = {}
    for each in span.attributes:
        kind = each.value.WhichOneof("value")
        value = getattr(each.value, kind)
        found[each.key] = [one.string_value for one in value.values] if kind == "array_value" else value
    return found


async def test_an_episode_is_a_span_with_one_below_it_for_each_answer(collector):
    llm, _ = begun()
    answer = await llm.chat([user("Hi")], temperature=0.5)
    await llm.agent("critic").chat([user("and?")])
    llm.reward(0.25, answer)
    tracing.send(SimpleNamespace(llm=llm, task=7, index=2), "ValueError: no (agent.py:3)")
    tracing.provider().shutdown()
    spans = []
    for path, body in collector:
        assert path == "/v1/traces"
        request = service.ExportTraceServiceRequest.FromString(body)
        spans += [span for one in request.resource_spans for scope in one.scope_spans for span in scope.spans]
    (root,) = [span for span in spans if span.name == "invoke_agent"]
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


async def test_without_a_collector_nothing_is_imported_or_sent(monkeypatch):
    for name in ("OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT"):
        monkeypatch.delenv(name, raising=False)
    tracing.provider.cache_clear()
    llm, _ = begun()
    await llm.chat([user("Hi")])
    tracing.send(SimpleNamespace(llm=llm, task=7, index=2), None)
    assert tracing.provider() is None
    tracing.provider.cache_clear()
