"""Real processes for the tests that need them."""

import pytest

from tests.runtime.programs.jobs import Ranks, Zygote


@pytest.fixture(scope="session")
def zygotes(tmp_path_factory):
    """One fork server for the whole session."""
    server = Zygote(tmp_path_factory.mktemp("ranks"))
    yield server
    server.close()


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
