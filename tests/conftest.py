"""What every test can rely on: the same examples and random numbers in every clone; real processes where needed."""

import random
import zlib
from pathlib import Path

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


RUNTIME = Path(__file__).parent / "runtime"
_TORCH_RANDOM = _TorchRandom()  # hypothesis holds it weakly
register_random(_TORCH_RANDOM)

_SHARED = {
    "database": None,  # what one clone has found before must not decide what it runs
    "deadline": None,  # the machine may be busy
    "suppress_health_check": [HealthCheck.too_slow],
}
settings.register_profile("suite", derandomize=True, **_SHARED)
settings.register_profile("fuzz", derandomize=False, print_blob=True, **_SHARED)
settings.load_profile("suite")  # `--hypothesis-profile` replaces it


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """For `pytest -n 2 --dist loadgroup`: one worker runs what starts several processes, and the runtime's tests, which
    watch the clock, one after the other; the others share the rest, a file at a time."""
    if not hasattr(config, "workerinput"):
        return  # one process runs all of them
    for item in items:
        alone = item.get_closest_marker("torchrun") or RUNTIME in item.path.parents
        item.add_marker(pytest.mark.xdist_group("processes" if alone else str(item.path)))


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
