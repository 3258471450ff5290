"""The configuration of runs in which a policy acts: which file is one, what is checked, what is printed."""

import subprocess
import sys

import pytest

from rlinf.cli.main import describe, main
from rlinf.config.load import ConfigError, InputError
from rlinf.runs.rules import is_embodied, load_embodied
from tests.launching import QUICKSTART, ROOT

TOY = ROOT / "configs/embodied/toy.yaml"


def refused(*overrides, hosts=None) -> str:
    with pytest.raises(ConfigError) as caught:
        load_embodied(TOY, overrides, hosts)
    return str(caught.value)


def test_a_file_with_a_section_env_is_one_and_others_are_not(tmp_path):
    assert is_embodied(TOY)
    assert not is_embodied(ROOT / QUICKSTART)
    assert not is_embodied(None)
    assert not is_embodied(tmp_path / "none.yaml")
    (tmp_path / "broken.yaml").write_text("env: [")
    assert not is_embodied(tmp_path / "broken.yaml")
    (tmp_path / "list.yaml").write_text("- env")
    assert not is_embodied(tmp_path / "list.yaml")


@pytest.mark.parametrize("path", sorted((ROOT / "configs/embodied").glob("*.yaml")), ids=lambda path: path.stem)
def test_every_configuration_that_is_shipped_loads(path):
    load_embodied(path, hosts=8)


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("env.simulator=rlinf.envs.toy.Reech", "toy.py has no Reech"),
        ("env.simulator=no.such.Thing", "no such module"),
        ("env.num_envs=15", "a multiple of workers x slices x group_size = 2"),
        ("env.num_envs=1", "= 2, so that shares are equal; take 2"),
        ("env.num_envs=0", "at least 1"),
        ("env.simulater=x", "did you mean env.simulator?"),
        ("policy.path=none/there", "no such directory"),
        ("policy.horizon=0", "at least 1"),
        ("algorithm.kl={}", "unknown section"),
        ("trials.videos=40", "there are only 32 episodes"),
        ("flow=rlinf.flows.embodid", "did you mean rlinf.flows.embodied?"),
        ("flow=rlinf.envs.toy.draw", "must be an `async def`"),
        ("placement.trainer=0,0", "is in '0' already"),
        ("name=a/b", "no slash"),
    ],
)
def test_a_mistake_is_said_with_its_key_and_what_to_write(override, said):
    told = refused(override)
    assert override.split("=")[0] in told
    assert said in told


def test_all_mistakes_are_said_at_once():
    told = refused("env.num_envs=15", "policy.horizon=0", "stepps=3")
    assert told.startswith("3 problems in the configuration") or "env.num_envs" not in told  # values first, then sense
    assert "stepps" in told
    assert "policy.horizon" in told


def test_roles_must_fit_the_processes_of_the_job():
    assert "start 4 processes" in refused("placement.trainer=3", hosts=2)
    load_embodied(TOY, ["placement.trainer=3"], 1)  # one process does everything
    load_embodied(TOY, ["placement.trainer=3"], 4)


def test_a_mistake_on_the_command_line_is_one_message_and_exit_code_2(capsys):
    assert main(["--config", str(TOY), "env.num_envs=15"]) == 2
    out, err = capsys.readouterr()
    assert (out, err.count("error:")) == ("", 1)


def test_a_dry_run_prints_a_config_that_loads_to_the_same_and_where_the_roles_run(tmp_path, capsys):
    config = load_embodied(TOY, ["steps=7", "placement.trainer=1"])
    (tmp_path / "again.yaml").write_text(describe(config, 2, whole=True))
    assert load_embodied(tmp_path / "again.yaml") == config
    assert "\n  trainer    device 1" in describe(config, 2)
    assert "torchrun --nproc-per-node 2 would place them" in describe(config, 1)
    assert main(["--config", str(TOY), "--dry-run", f"output_dir={tmp_path}/none"]) == 0
    assert "simulator: rlinf.envs.toy.Reach" not in capsys.readouterr().out
    assert main(["--config", str(TOY), "--dry-run", "--verbose", f"output_dir={tmp_path}/none"]) == 0
    assert "simulator: rlinf.envs.toy.Reach" in capsys.readouterr().out
    assert not (tmp_path / "none").exists()


def test_help_about_such_a_file_lists_its_keys(capsys):
    assert main(["--help", "--config", str(TOY)]) == 0
    out = capsys.readouterr().out
    for text in ("--config FILE", "env.num_envs: int = 16", "Decisions of each environment per step of the flow"):
        assert text in out
    assert "rollout." not in out


def test_help_is_given_without_importing_torch():
    code = (
        f"import sys; from rlinf.cli.main import main; main(['--config', {str(TOY)!r}, '--help']); "
        "sys.exit([name for name in ('torch', 'transformers', 'numpy') if name in sys.modules] or 0)"
    )
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, capture_output=True, timeout=60)


def test_a_file_that_is_no_yaml_is_said_to_be_none(tmp_path):
    (tmp_path / "broken.yaml").write_text("env: [")
    with pytest.raises(InputError):
        load_embodied(tmp_path / "broken.yaml")
