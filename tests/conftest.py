"""What every test can rely on: the same examples and random numbers in every clone; real processes where needed."""

import functools
import gc
import math
import random
import re
import sys
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, register_random, settings

from tests import launching
from tests.runtime.programs.jobs import Ranks


class _TorchRandom:
    """Torch's global generator in the shape that hypothesis restarts for every example."""

    seed = staticmethod(torch.manual_seed)
    getstate = staticmethod(torch.get_rng_state)
    setstate = staticmethod(torch.set_rng_state)


_TORCH_RANDOM = _TorchRandom()  # hypothesis holds it weakly
register_random(_TORCH_RANDOM)

_SHARED = {
    "database": None,  # what one clone has found before must not decide what it runs
    "deadline": None,  # the machine may be busy
    "suppress_health_check": [HealthCheck.too_slow],
}
FEWER = 4
"""The suite tries a quarter of the examples that `make fuzz` tries in each of its rounds."""
settings.register_profile("suite", derandomize=True, max_examples=100 // FEWER, **_SHARED)
settings.register_profile("fuzz", derandomize=False, print_blob=True, **_SHARED)
settings.load_profile("suite")  # `--hypothesis-profile` replaces it


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[Any]:
    """Collect without collecting garbage: what is imported stays, and looking through it took a quarter of the time.
    Tests that collect garbage look at their own alone."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out repetitions and real models, but where `-m` names them."""
    unasked = [marker for marker in ("repeated", "real") if marker not in config.option.markexpr]
    left_out = {item for item in items if any(map(item.get_closest_marker, unasked))}
    config.hook.pytest_deselected(items=[item for item in items if item in left_out])
    items[:] = [item for item in items if item not in left_out]
    if settings.default.derandomize:
        for test in {item.obj for item in items if item.get_closest_marker("hypothesis")}:
            _try_fewer(test)


def _try_fewer(test: Any) -> None:
    """Scale down a number of examples that a property test names for itself."""
    own = getattr(test, "_hypothesis_internal_use_settings", None)
    if own is not None and own.max_examples > settings.default.max_examples:
        fewer = max(settings.default.max_examples, own.max_examples // FEWER)
        test._hypothesis_internal_use_settings = settings(own, max_examples=fewer)


@pytest.hookimpl(optionalhook=True)  # of pytest-xdist
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """One worker runs what starts many processes or watches the clock, file after file; the rest is shared out by file,
    slow ones first, so that none is left over at the end. (Groups by `xdist_group` say the same, and pytest-xdist 3.8
    overlooks them with pytest 9.)"""
    from xdist.scheduler import LoadScopeScheduling

    class ByFile(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            file = nodeid.partition("::")[0]
            return ALONE if _alone(config.rootpath / file) else file

        def _assign_work_unit(self, node: Any) -> None:
            self.workqueue.move_to_end(max(self.workqueue, key=self._weight), last=False)
            super()._assign_work_unit(node)

        def _weight(self, scope: str) -> float:
            """Which of two begins first; tests marked slow take as long as a hundred others."""
            return math.inf if scope == ALONE else 100 * _slow(config.rootpath / scope) + len(self.workqueue[scope])

    return ByFile(config, log)


ALONE = "alone"
"""Stands for all files that must not run beside each other."""


@functools.cache
def _alone(file: Path) -> bool:
    """Whether nothing else of the kind is to run beside a file's tests."""
    marked = re.search(r"^pytestmark = .*\btorchrun\b", file.read_text(encoding="utf-8"), re.MULTILINE)
    return bool(marked) or file.parent.name == "runtime" or file.name == "test_launch.py"


@functools.cache
def _slow(file: Path) -> int:
    """How often a file's tests are marked slow."""
    return file.read_text(encoding="utf-8").count("mark.slow")


_BROKE: list[str] = []


@pytest.hookimpl(tryfirst=True)
def pytest_internalerror(excrepr: Any) -> None:
    """Keep what broke pytest itself: the first such error tends to be followed by others that hide it."""
    _BROKE.append(str(excrepr))


@pytest.hookimpl(trylast=True)
def pytest_unconfigure(config: pytest.Config) -> None:
    """Tell the first of them once more, last of all."""
    if _BROKE and not hasattr(config, "workerinput"):
        first = "\n".join(_BROKE[0].splitlines()[-15:])
        print(f"the first of {len(_BROKE)} errors of pytest itself ended with:\n{first}", file=sys.stderr)


@pytest.fixture(autouse=True)
def seeded(request: pytest.FixtureRequest) -> None:
    """Global generators start from the test's own name, whichever tests ran before it and wherever its file is."""
    seed = zlib.crc32(request.node.name.encode())
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


@pytest.fixture(scope="session")
def zygotes():
    """One fork server for the whole session, whose processes have imported what runs import."""
    return launching.server()


@pytest.fixture
def zygote(zygotes, monkeypatch):
    """The fork server; what a test leaves running is killed."""
    started: list[Ranks] = []
    run = type(zygotes).run

    def remembered(*arguments, **more):
        started.append(run(zygotes, *arguments, **more))
        return started[-1]

    monkeypatch.setattr(zygotes, "run", remembered)
    yield zygotes
    for ranks in started:
        ranks.end()
