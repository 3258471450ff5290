"""The front doors look for losses and stalls unless told not to, and tell of them in one message."""

from __future__ import annotations

import os

import pytest

import rlinf
from rlinf.config.common import SystemConfig
from rlinf.config.load import InputError, RunFailure
from rlinf.config.text import RunConfig
from rlinf.runs.start import run_to_end, train
from rlinf.runtime.base.errors import TraceError, UserError


async def wait_for_ever(system):
    await (await system.channel("mail")).get()


def test_a_run_that_is_stuck_fails_with_the_report():
    with pytest.raises(RunFailure, match=r"(?s)^stall: flow waits on mail: nothing has moved for .*nobody fills mail"):
        run_to_end(wait_for_ever, SystemConfig(stall_after=0.2))


@pytest.mark.parametrize(("kind", "seen"), [("cpu", ""), ("auto", "0,1")])
def test_a_run_from_python_that_leaves_gpus_alone_sees_none_and_gives_them_back(monkeypatch, kind, seen):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    told = []
    look = lambda *_, **__: told.append(os.environ["CUDA_VISIBLE_DEVICES"])  # noqa: E731
    monkeypatch.setattr("rlinf.runtime.system.torchrun.run", look)
    config = RunConfig()
    config.placement.device_kind = kind
    train(config, rank=1)
    rlinf_train = {"placement": {"device_kind": kind}}
    monkeypatch.setenv("RANK", "1")
    rlinf.train(None, **rlinf_train)
    assert told == [seen, seen]
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "0,1"


def test_by_default_both_are_looked_for(monkeypatch):
    given = {}
    monkeypatch.setattr("rlinf.runtime.system.torchrun.run", lambda main, **options: given.update(options))
    run_to_end(wait_for_ever, RunConfig().system)
    assert 0 < given["host_timeout"] <= 60
    assert 600 <= given["stall_after"] <= 1800


@pytest.mark.parametrize(("raised", "told"), [(UserError, InputError), (TraceError, RunFailure)])
def test_what_is_not_the_code_s_fault_is_told_without_a_traceback(raised, told):
    async def fail(system):
        raise raised("the reason")

    with pytest.raises(told, match=r"^the reason$"):
        run_to_end(fail, SystemConfig())


def test_a_bug_keeps_its_traceback():
    async def fail(system):
        raise ZeroDivisionError("a bug")

    with pytest.raises(ZeroDivisionError):
        run_to_end(fail, SystemConfig())
