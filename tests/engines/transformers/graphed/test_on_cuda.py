"""What decoding asks of a GPU, seen without one: on fake tensors, on doubles of CUDA's calls, by Triton's tools."""

import importlib.util
import os
import re
import subprocess
import sys
import threading
from collections import Counter
from contextlib import contextmanager
from types import SimpleNamespace
from unittest import mock

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import AutoConfig, AutoModelForCausalLM

from rlinf.engines.base import Request, Sampling
from rlinf.engines.transformers import graphs
from rlinf.engines.transformers.batch import PrefillJob, Slots
from rlinf.engines.transformers.graphs import CudaRecorder, GraphedRows, ReadBack, upload
from rlinf.engines.transformers.model import LeanForward
from tests.engines.transformers.rehearsed import REHEARSED
from tests.engines.transformers.test_engine import tiny
from tests.fake_cuda import fake_cuda


class Asked(TorchDispatchMode):
    """Counts kernels, and copies from the device to the host."""

    def __init__(self):
        super().__init__()
        self.kernels, self.to_host, self.to_device = Counter(), 0, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        found = func(*args, **(kwargs or {}))
        before = {leaf.device.type for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)}
        after = {leaf.device.type for leaf in tree_leaves(found) if isinstance(leaf, torch.Tensor)}
        name = func._schema.name.removeprefix("aten::")
        if name == "_local_scalar_dense" or ("cuda" in before and "cpu" in after):
            self.to_host += 1
        elif name == "copy_" and before == {"cpu", "cuda"}:
            self.to_host += args[0].device.type == "cpu"
            self.to_device += args[0].device.type == "cuda"
        elif "cuda" in after and not func.is_view:
            tensors = [leaf for leaf in tree_leaves(args) if isinstance(leaf, torch.Tensor)]
            assert all(leaf.ndim == 0 or leaf.device.type == "cuda" for leaf in tensors), f"{name} mixes devices"
            self.kernels[name] += 1
        return found


class Straight:
    """A recorder that does the work each time."""

    def record(self, name, work):
        recording = SimpleNamespace(output=None)

        def replay():
            recording.output = work()

        recording.replay = replay
        return recording

    def clear(self):
        pass


class Event:
    def record(self, stream=None):
        pass

    def synchronize(self):
        pass


@pytest.fixture
def no_events(monkeypatch):
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device=None: None)
    monkeypatch.setattr(ReadBack, "wait", lambda self: np.zeros(self._host.shape, np.int32))


@torch.inference_mode()
def asked_for(layers):
    """What reading three prompts and the second step ask for, of a model with so many layers."""
    config = AutoConfig.for_model(
        "qwen2", vocab_size=256, hidden_size=64, num_hidden_layers=layers, num_attention_heads=4,
        num_key_value_heads=2, intermediate_size=64,
    )  # fmt: skip
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    with fake_cuda() as device:
        rows = GraphedRows(LeanForward(model.to_empty(device=device).eval(), 0), Straight(), 8)
        records = Slots(8, None)
        texts = [np.arange(1, length) for length in (9, 70, 3)]
        slots = records.open([Request(number, text, Sampling(50)) for number, text in enumerate(texts)])
        with Asked() as reading:
            readers = [PrefillJob(text, text, [slot], None) for slot, text in zip(slots.tolist(), texts, strict=True)]
            ((_, logits, tokens),) = rows.read(readers, records)
        assert (tuple(logits.shape), tokens) == ((3, 256), 79)
        records.lengths[slots] = 1
        rows.step(records)
        with Asked() as stepping:
            rows.step(records)
    return reading, stepping


def test_a_step_mixes_no_devices_reads_back_once_and_keeps_to_its_kernels(no_events, monkeypatch):
    monkeypatch.setattr(LeanForward, "addresses", lambda self: ())  # which fake tensors have not
    reading, small = asked_for(2)
    _, large = asked_for(4)
    assert reading.to_host == 0
    assert (large.to_host, large.to_device) == (1, 0)
    layer = Counter({name: count // 2 for name, count in (large.kernels - small.kernels).items()})
    assert (layer["rlinf::paged_attention"], layer["linear"] or layer["addmm"] + layer["mm"]) == (1, 4)
    assert layer.total() <= 12, layer
    assert small.kernels.total() - 2 * layer.total() <= 60, small.kernels - layer - layer


class Device:
    """Doubles of what `torch.cuda` has for recording; `current` is the stream of the thread."""

    def __init__(self, monkeypatch, fails=False):
        self.captures, self.streams = [], []
        self.current = self.default = mock.MagicMock(name="default")
        self._fails = fails
        for name, double in {
            "Stream": self.made, "CUDAGraph": mock.MagicMock, "graph": self.graph, "graph_pool_handle": mock.Mock(
                side_effect=["first pool", "second pool"]
            ), "current_stream": lambda device: self.current, "stream": self.stream, "device": mock.MagicMock(),
        }.items():  # fmt: skip
            monkeypatch.setattr(torch.cuda, name, double)

    def made(self, device):
        self.streams.append(mock.MagicMock(name="stream"))
        return self.streams[-1]

    @contextmanager
    def stream(self, stream):
        before, self.current = self.current, stream
        try:
            yield
        finally:
            self.current = before

    @contextmanager
    def graph(self, graph, pool=None, stream=None, capture_error_mode="global"):
        self.captures.append((pool, stream, capture_error_mode))
        before, self.current = self.current, stream
        yield
        if self._fails:  # as torch's own, which leaves the stream where it is
            raise RuntimeError("operation not permitted when stream is capturing")
        self.current = before


def test_every_graph_is_warmed_up_and_all_are_recorded_on_one_stream(monkeypatch):
    device = Device(monkeypatch)
    recorder = CudaRecorder(torch.device("cuda", 0))
    on = []
    for name in ("eight", "sixteen"):
        recording = recorder.record(name, lambda: on.append(device.current) or "output")
    recorder.clear()
    recorder.record("eight", lambda: on.append(device.current))  # by another thread, say, or with a wider table
    (stream,) = device.streams
    assert on == 6 * [stream]
    assert device.captures == [(pool, stream, "thread_local") for pool in 2 * ["first pool"] + ["second pool"]]
    assert stream.wait_stream.call_args_list == 3 * [mock.call(device.default)]  # what was asked before is done
    assert device.default.wait_stream.call_args_list == 3 * [mock.call(stream)]
    assert recording.output == "output"


def test_the_thread_is_on_its_own_stream_again_when_recording_fails(monkeypatch):
    device = Device(monkeypatch, fails=True)
    with pytest.raises(RuntimeError, match="not permitted"):
        CudaRecorder(torch.device("cuda", 0)).record("eight", lambda: None)
    assert device.current is device.default


def test_a_graph_is_recorded_when_no_other_thread_records_one(monkeypatch):
    device = Device(monkeypatch)
    begun, other = [], CudaRecorder(torch.device("cuda", 0))
    thread = threading.Thread(target=lambda: other.record("other", lambda: begun.append(len(device.captures))))

    def work():
        if device.captures:  # while it is recorded
            thread.start()
            thread.join(0.1)
            assert begun == []

    CudaRecorder(torch.device("cuda", 0)).record("one", work)
    thread.join(10)
    assert begun == [1, 2]


def test_torch_has_the_calls_that_graphs_need():
    import inspect

    inspect.signature(torch.cuda.graph.__init__).bind(
        None, None, pool=None, stream=None, capture_error_mode="thread_local"
    )


def test_arrays_are_uploaded_through_page_locked_memory(no_events):
    with fake_cuda() as device, Asked() as asked:
        upload(torch.zeros(4, dtype=torch.int64, device=device), np.arange(4))
    assert (asked.to_device, asked.to_host) == (1, 0)


def test_the_way_is_chosen_by_device_and_model(monkeypatch):
    own = LeanForward(tiny(), 0)
    assert graphs.rows_for(own, 4)[1].endswith("on cpu")
    with pytest.raises(ValueError, match=r"graphs='on'.*auto"):
        graphs.rows_for(own, 4, "on")
    monkeypatch.setattr(own, "device", torch.device("cuda", 0))
    for off in ("off", False):  # as which YAML reads it
        assert graphs.rows_for(own, 4, off)[1].endswith("on cuda")
    with pytest.raises(ValueError, match="on the CPU"):
        graphs.rows_for(own, 4, REHEARSED)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert "Triton" in graphs.rows_for(own, 4)[1]


def test_steps_that_compute_something_else_are_not_taken(monkeypatch):
    attention = graphs.paged_attention
    monkeypatch.setattr(graphs, "paged_attention", lambda *args: attention(*args[:-1], 2 * args[-1]))
    rows, name = graphs.rows_for(LeanForward(tiny(), 0), 4, REHEARSED)
    assert type(rows).__name__ == "BandedRows"
    assert re.search(r"off by .* nats, where transformers is by 0", name)


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton comes with a torch for CUDA alone")
@pytest.mark.parametrize("what", ["compiles", "computes"])
def test_kernels(what):
    environment = {**os.environ, **({"TRITON_INTERPRET": "1"} if what == "computes" else {})}
    done = subprocess.run(
        [sys.executable, "-m", "tests.engines.transformers.graphed.run_kernels", what],
        env=environment, capture_output=True, text=True, timeout=110, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
