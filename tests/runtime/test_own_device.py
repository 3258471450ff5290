"""A process has one device, and all its threads that compute work on that one, from their first line on."""

from __future__ import annotations

import asyncio
import threading
from collections import defaultdict

import pytest
import torch
from torch import nn

from rlinf.engines.served.sglang import device_here
from rlinf.engines.served.vllm import VllmServer
from rlinf.envs.toy import Reach
from rlinf.runs.rules import load_config, load_embodied
from rlinf.runs.start import train
from rlinf.runtime.actor.actor import Actor, endpoint
from rlinf.runtime.base.tasks import ComputeThread, InThreads, in_thread
from rlinf.runtime.base.tensors import choose_device, device_id, device_of_threads, enter_device, own_device
from rlinf.runtime.system.system import ActorSystem
from rlinf.runtime.transport import copies
from tests.cards import pretend
from tests.launching import QUICKSTART, ROOT, TINY

TEXT = (
    *TINY, "placement.device_kind=auto", "steps=1", "sft.steps=1", "trace=false", "algorithm=ppo",
    "evaluation.problems=1", "algorithm.kl={place: reward, kind: k1, beta: 0.1}",
)  # fmt: skip
EMBODIED = (
    "steps=1", "log_every=1", "trials.episodes=2", "policy.horizon=5", "env.max_steps=7", "trace=false",
    "env.num_envs=4",
)  # fmt: skip


class Looker(Actor):
    """Says on which GPU its thread works."""

    @endpoint
    async def look(self):
        return await self.compute(torch.cuda.current_device)


def test_a_process_of_torchrun_has_the_gpu_of_its_local_rank_counted_round(monkeypatch):
    settings = pretend(monkeypatch, rank=3)
    assert own_device() == torch.device("cuda", 3)
    assert torch.cuda.current_device() == 0, "to ask is not to enter"
    assert enter_device() == own_device()
    assert (torch.cuda.current_device(), device_id()) == (3, "uuid-3")
    assert settings["cudnn_sdp"] is False
    pretend(monkeypatch, rank=3, cards=2)
    assert own_device() == torch.device("cuda", 1)


def test_a_program_of_ones_own_keeps_the_gpu_that_it_chose(monkeypatch):
    pretend(monkeypatch)
    assert own_device() == torch.device("cuda", 0)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    torch.cuda.set_device(5)
    enter_device()
    assert own_device() == torch.device("cuda", 5)
    torch.cuda.set_device(0)
    assert own_device() == torch.device("cuda", 5), "chosen once"


def test_a_child_is_told_and_touches_no_gpu_until_something_enters_it(monkeypatch):
    pretend(monkeypatch, rank=0)
    choose_device(6)
    assert (own_device(), torch.cuda.current_device()) == (torch.device("cuda", 6), 0)
    assert enter_device().index == torch.cuda.current_device() == 6


@pytest.mark.parametrize(
    ("visible", "rank", "count", "seen"),
    [(None, 3, 1, "3"), ("4,5,6,7", 1, 2, "5,6"), ("GPU-a,GPU-b", 1, 1, "GPU-b")],
)
def test_a_server_sees_the_gpu_of_its_process_first(monkeypatch, visible, rank, count, seen):
    if visible is None:
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    else:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert VllmServer("python", {}, 1.0).environment().get("CUDA_VISIBLE_DEVICES") is None, "there is no GPU"
    pretend(monkeypatch, rank=rank)
    server = VllmServer("python", {"tensor_parallel_size": count}, 1.0)
    assert server.environment()["CUDA_VISIBLE_DEVICES"] == seen
    assert device_here() == ("cuda", rank)


def test_without_a_gpu_the_device_is_the_cpu_and_no_thread_is_set_up(monkeypatch):
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: pytest.fail("there is none"))
    assert enter_device() == own_device() == torch.device("cpu")
    assert (device_id(), device_of_threads()) == ("cpu", None)


async def test_threads_work_on_it_though_cuda_was_not_in_use_when_they_began(monkeypatch):
    pretend(monkeypatch, rank=3)
    monkeypatch.setattr(copies, "_threads", copies._threads.__wrapped__)  # those of other tests are on no GPU
    async with ActorSystem.local() as system:
        assert not torch.cuda.is_initialized()
        compute = ComputeThread("actor", asyncio.get_running_loop())
        looker = await system.spawn(Looker)
        found = {
            "loop": torch.cuda.current_device(),
            "compute": await compute.run(torch.cuda.current_device),
            "actor": (await looker.look())[0],
            "in_thread": await in_thread(torch.cuda.current_device),
            "engine": await InThreads()(torch.cuda.current_device),
            "copies": await asyncio.wrap_future(copies._threads().submit(torch.cuda.current_device)),
        }
        compute.close()
    assert set(found.values()) == {3}, found


async def test_actors_that_only_pretend_leave_the_gpu_alone(monkeypatch):
    pretend(monkeypatch, rank=3)
    async with ActorSystem.local(computes=False):
        assert device_of_threads() is None
    assert torch.cuda.current_device() == 0


@pytest.fixture
def seen(monkeypatch):
    """By thread, the GPUs on which modules, environments and actors' functions ran; tensors stay on the CPU."""
    found = defaultdict(set)

    def note():
        if threading.current_thread() is not threading.main_thread():  # which looks at the model before all begins
            found[threading.current_thread().name].add(torch.cuda.current_device())

    def noting(function):
        def noted(*args, **kwargs):
            note()
            return function(*args, **kwargs)

        return noted

    pretend(monkeypatch, rank=3)
    for user in ("rlinf.actors.base", "rlinf.actors.base", "rlinf.actors.rollout"):
        monkeypatch.setattr(f"{user}.own_device", lambda: torch.device("cpu"))
    monkeypatch.setattr(nn.Module, "__call__", noting(nn.Module.__call__))
    monkeypatch.setattr(Reach, "step", noting(Reach.step))
    run = ComputeThread.run
    monkeypatch.setattr(ComputeThread, "run", lambda thread, fn, *args, **more: run(thread, noting(fn), *args, **more))
    return found


@pytest.mark.timeout(240)
def test_every_thread_that_computes_in_a_run_on_text_is_on_the_gpu_of_its_process(seen, tmp_path):
    train(load_config(QUICKSTART, [*TEXT, f"output_dir={tmp_path}"]))
    assert {"rollout[0]", "trainer[0]", "critic[0]", "reference[0]"} <= seen.keys()
    assert {thread: where for thread, where in seen.items() if where != {3}} == {}
    assert torch.cuda.current_device() == 3, "and so is the event loop's"


@pytest.mark.timeout(240)
def test_every_thread_that_computes_in_a_run_that_acts_is_on_the_gpu_of_its_process(seen, tmp_path):
    train(load_embodied(ROOT / "configs/embodied/toy.yaml", [*EMBODIED, f"output_dir={tmp_path}"]))
    assert {"policy[0]", "trainer[0]"} <= seen.keys()
    assert any("simulator" in thread for thread in seen), seen.keys()
    assert {thread: where for thread, where in seen.items() if where != {3}} == {}
    assert torch.cuda.current_device() == 3, "and so is the event loop's"
