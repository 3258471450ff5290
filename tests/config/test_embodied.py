"""The configuration of runs in which a policy acts: which file is one, what is checked, what is printed."""

import pytest

from rlinf.cli.main import describe, main
from rlinf.config.load import ConfigError
from rlinf.runs.rules import is_embodied, load_embodied
from tests.launching import QUICKSTART, ROOT

TOY = ROOT / "configs/embodied/toy.yaml"


def test_a_file_with_a_section_env_is_one_and_others_are_not(tmp_path):
    assert is_embodied(TOY)
    assert not is_embodied(ROOT / QUICKSTART)
    assert not is_embodied(None)
    assert not is_embodied(tmp_path / "none.yaml")
    (tmp_path / "broken.yaml").write_text("env: [")
    assert not is_embodied(tmp_path / "broken.yaml")
    (tmp_path / "list.yaml").write_text("- env")
    assert not is_embodied(tmp_path / "list.yaml")


def test_roles_must_fit_the_processes_of_the_job():
    with pytest.raises(ConfigError, match=r"placement\.trainer"):
        load_embodied(TOY, ["placement.trainer=3"], 2)
    load_embodied(TOY, ["placement.trainer=3"], 1)  # one process does everything
    load_embodied(TOY, ["placement.trainer=3"], 4)


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


@pytest.mark.parametrize(
    ("keys", "named"),
    [
        (["env.intervener=rlinf.envs.toy.expert"], r"env\.intervener.*ppo learns from its own actions alone"),
        (["algorithm=sac", "env.intervener=rlinf.envs.toy.nobody"], r"env\.intervener.*has no nobody"),
        (["algorithm=sac", "env.intervener_args={path: x}"], r"env\.intervener_args"),
        (["algorithm=dagger"], r"dagger\.expert.*or name who intervenes in env\.intervener"),
        (
            ["algorithm=dagger", "dagger.expert=rlinf.envs.toy.expert", "env.intervener=rlinf.envs.toy.expert"],
            r"dagger\.expert.*nobody can intervene",
        ),
        (["algorithm=dagger", "env.intervener=rlinf.envs.toy.expert", "dagger.beta=0.5"], r"dagger\.beta"),
        (["algorithm=iql", "policy.settings.gripper=true"], r"policy\.settings\.gripper.*sac"),
        (["algorithm=sac", "off_policy.gripper_penalty=0.1"], r"off_policy\.gripper_penalty.*gripper=true"),
        (["algorithm=crossq", "off_policy.gripper_penalty=0.1"], r"off_policy\.gripper_penalty.*sac"),
        (["algorithm=sac", "off_policy.returns=[1, 0]"], r"off_policy\.returns.*least"),
        (["algorithm=sac", "off_policy.imitation=0.1"], r"off_policy\.imitation.*demonstrations"),
    ],
)
def test_who_intervenes_must_teach_somebody(keys, named):
    plain = ["algorithm={}", "optimizer={}", "policy.settings={hidden: [8]}"]  # what the toy sets for ppo
    with pytest.raises(ConfigError, match=named):
        load_embodied(TOY, [*plain, *keys])
