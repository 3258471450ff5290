"""Processes that no role has are refused, and no configuration that comes with us starts any."""

import re
from pathlib import Path
from types import SimpleNamespace

import pytest

from rlinf.cli.main import describe
from rlinf.config.embodied import EmbodiedConfig
from rlinf.config.learning import SUPERVISED
from rlinf.config.load import ConfigError
from rlinf.placement.seats import CONTROL, place
from rlinf.runs.prepare import algorithm_of, refuse_idle, roles_of
from rlinf.runs.roles import kinds_of
from rlinf.runs.rules import load_any, load_config
from tests.launching import QUICKSTART, ROOT, TINY, start

CONFIGS = sorted((ROOT / "configs").rglob("*.yaml"))
SIZES = r"(?:--nnodes (\d+) )?--nproc-per-node (\d+)"


def kinds(config):
    if isinstance(config, EmbodiedConfig):
        return CONTROL
    if config.algorithm.name in SUPERVISED:
        return kinds_of(config, ())
    return kinds_of(config, roles_of(config, algorithm_of(config)))


def lines(path: Path):
    """(processes, overrides) of a configuration as its first lines start it: `N devices: KEY=VALUE ...` overrides."""
    said = path.read_text().split("\nname:")[0]
    found = [(int(nodes or 1) * int(each), []) for nodes, each in re.findall(SIZES, said)]
    more = re.findall(r"#\s+(\d+) devices:\s+(.*)", said)
    return [*found, *((int(count), keys.split()) for count, keys in more)] or [(1, [])]


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: str(path.relative_to(ROOT / "configs")))
def test_no_configuration_of_ours_starts_a_process_that_it_does_not_use(path, monkeypatch, tmp_path):
    monkeypatch.chdir(ROOT)
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / ".cache/rlinf/SmolLM2-135M-Instruct").mkdir(parents=True)  # what `make smollm2` brings
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "8")
    for hosts, keys in lines(path):
        config = load_any(path, keys, hosts)
        assert place(config.placement, kinds(config), hosts).idle == []


def test_the_fix_is_told_in_one_line():
    config = load_config(ROOT / QUICKSTART, TINY, 4)
    placed = place(config.placement, kinds(config), 4)
    with pytest.raises(ConfigError) as refused:
        refuse_idle(config.placement, SimpleNamespace(placed=placed, chosen=None))
    (problem,) = refused.value.problems
    assert str(problem.advice) == (
        "2 of 4 processes have no role (2, 3) and would idle: start 2, give a role more in `placement` "
        "(mode=collocated: trainer and rollout get all), or set this to true"
    )
    refuse_idle(config.placement, SimpleNamespace(placed=placed, chosen=object()))  # a planner left them out


@pytest.mark.parametrize("path", [QUICKSTART, "configs/embodied/toy_grpo.yaml"])
def test_a_dry_run_refuses_them_unless_they_are_meant(path):
    with pytest.raises(ConfigError, match=r"processes.*start"):
        describe(load_any(ROOT / path, [], 5), 5)
    assert "Roles: 5 processes" in describe(load_any(ROOT / path, ["placement.idle_processes=true"], 5), 5)
    describe(load_any(ROOT / path, [], 1), 1)


def test_those_in_the_middle_are_named():
    config = load_config(None, ["placement.rollout=0", "placement.trainer=3"], 4)
    placed = place(config.placement, kinds(config), 4)
    with pytest.raises(ConfigError, match=r"2.*4 processes.*\(1, 2\).*would"):
        refuse_idle(config.placement, SimpleNamespace(placed=placed, chosen=None))


@pytest.mark.slow
def test_a_run_refuses_them_before_anything_starts(tmp_path):
    ranks = start("--config", QUICKSTART, *TINY, f"output_dir={tmp_path}", processes=3)
    try:
        assert ranks.code(0, 100) == 2
        (line,) = [line for line in ranks.complained(0).splitlines() if "placement.idle_processes" in line]
    finally:
        ranks.end()
    assert "1 of 3 processes have no role (2) and would idle: start 2" in line
    assert not [*tmp_path.iterdir()]
