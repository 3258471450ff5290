"""`rlinf join`: what is wrong with an address or a token is said in one line."""

import json
import socket

import pytest

from rlinf.cli.commands import main
from rlinf.placement.seats import Seat
from rlinf.runs.data import load_data_of
from rlinf.runs.rules import ConfigError, load_config
from rlinf.runs.start import prepare
from rlinf.runs.text import roles_to_start


def error_of(capsys, *arguments):
    """The line that a command ends with; it is the user's mistake."""
    assert main(["join", *arguments, "--role", "rollout"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    return line


@pytest.fixture
def nobody():
    """A port at which nobody listens."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        yield taken.getsockname()[1]


def test_a_run_that_cannot_be_joined_is_named_with_what_to_do(capsys, tmp_path, monkeypatch, nobody):
    monkeypatch.delenv("RLINF_JOIN_TOKEN", raising=False)
    line = error_of(capsys, str(tmp_path))
    assert str(tmp_path) in line
    assert "rollout.join" in line
    assert "no HOST:PORT" in error_of(capsys, "nowhere")
    assert "RLINF_JOIN_TOKEN" in error_of(capsys, f"127.0.0.1:{nobody}")
    (tmp_path / "join.json").write_text(json.dumps({"address": f"127.0.0.1:{nobody}", "token": "t"}))
    assert f"127.0.0.1:{nobody}" in error_of(capsys, str(tmp_path))
    with pytest.raises(SystemExit):
        main(["join", str(tmp_path)])


def test_a_run_that_replicas_cannot_join_says_by_which_key(capsys, tmp_path):
    assert main(["join", str(tmp_path), "--role", "trainer"]) == 2
    assert "trainer.join" in capsys.readouterr().err
    for wrong in ("algorithm=sft", "trainer.backend=megatron", "trainer.join=29600"):
        key = wrong.partition("=")[0].replace("algorithm", "trainer.join")
        with pytest.raises(ConfigError) as raised:
            load_config("configs/quickstart.yaml", ["trainer.join=127.0.0.1:0", wrong])
        assert key in str(raised.value)
    several = load_config("configs/quickstart.yaml", ["trainer.join=127.0.0.1:0"])
    with pytest.raises(ConfigError, match=r"trainer\.join"):
        prepare(several, 2)
    prepare(several, 1)
    apart = load_config("configs/quickstart.yaml", ["trainer.join=127.0.0.1:0", "trainer.order=free"])
    with pytest.raises(ConfigError, match=r"trainer\.order"):
        prepare(apart, 1)
    prepare(apart, 2)


def test_a_reward_that_runs_in_the_judges_own_process_cannot_be_helped_and_evaluations_let_nobody_in():
    join = "reward.join=127.0.0.1:0"
    with pytest.raises(ConfigError, match=r"reward\.join.*reward\.isolate=always"):
        prepare(load_config("configs/quickstart.yaml", [join]), 1)
    with pytest.raises(ConfigError, match=r"reward\.join"):
        load_config("configs/quickstart.yaml", ["reward.join=29600"])
    config = load_config("configs/quickstart.yaml", [join, "reward.isolate=always", "rollout.dtype=float32"])
    prepare(config, 1)
    assert roles_to_start(config, load_data_of(config))["judge"].settings["settings"].join is None


def test_an_address_to_join_at_is_a_host_and_a_port():
    from rlinf.config.text import RolloutConfig

    for wrong in ("29600", ":29600", "10.0.0.1", "10.0.0.1:99999"):
        assert [key for key, _ in RolloutConfig(join=wrong).mistakes()] == ["join"]
    assert list(RolloutConfig(join="[::1]:0").mistakes()) == []
    assert [key for key, _ in RolloutConfig(own_engine=False).mistakes()] == ["own_engine"]


def test_a_run_without_an_engine_of_its_own_has_no_device_for_one_and_an_evaluation_beside_it_has():
    more = ["rollout.join=127.0.0.1:29600", "rollout.own_engine=false", "rollout.dtype=float32"]
    config = load_config("configs/quickstart.yaml", more)
    prepared = prepare(config, 2)
    assert prepared.placed.seats["rollout"] == Seat((0,), (frozenset(),))
    assert "rollout" not in prepared.placed.of_actors
    beside = roles_to_start(config, load_data_of(config))["rollout"].settings["settings"]
    assert (beside.join, beside.own_engine) == (None, True)
