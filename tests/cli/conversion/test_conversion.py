"""Configurations of verl and RLinf as ours, held against what their authors publish."""

import re
import sys
from pathlib import Path
from typing import ClassVar

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from rlinf.algos import recipes
from rlinf.cli.commands import main
from rlinf.config.embodied import EmbodiedConfig
from rlinf.config.load import ConfigError, InputError
from rlinf.config.schema import leaves
from rlinf.config.text import RunConfig
from rlinf.placement.grammar import parse
from rlinf.runs.rules import load_config, load_embodied
from rlinf_convert.convert import Absent, Same, _Rules, _table, as_yaml, convert, engine_devices
from rlinf_convert.foreign import read

PUBLISHED = sorted((Path(__file__).parent / "published").glob("*/*.yaml"))
"""Keys and values as their authors have them."""
each = pytest.mark.parametrize("file", PUBLISHED, ids=lambda file: f"{file.parent.name}-{file.stem}")


def found(name):
    return convert(read(next(file for file in PUBLISHED if file.stem == name)))


def test_there_are_ten():
    assert len(PUBLISHED) >= 10


@each
def test_nine_of_ten_keys_are_translated_and_the_rest_are_listed(file, tmp_path):
    """Counted by our own reading of the file: every key of theirs is in one list, and in one alone."""
    converted = convert(read(file))
    theirs = _keys(yaml.safe_load(file.read_text()))
    theirs -= {key for key in theirs if key.startswith("defaults")}
    listed = [*converted.written, *converted.same, *converted.absent]
    assert sorted(listed) == sorted(theirs)
    assert converted.translated >= 0.9
    text = as_yaml(converted, file.name, "ours.yaml")
    assert all(f"#   {key}: " in text for key in converted.absent)


def _keys(tree, prefix=""):
    found = set()
    for key, value in tree.items():
        found |= _keys(value, f"{prefix}{key}.") if isinstance(value, dict) and value else {f"{prefix}{key}"}
    return found


@each
def test_what_is_written_is_a_configuration_but_for_paths_of_other_people(file, tmp_path):
    converted = convert(read(file))
    target = tmp_path / "ours.yaml"
    target.write_text(as_yaml(converted, file.name, str(target)))
    problems = []
    try:
        (load_embodied if converted.embodied else load_config)(str(target))
    except ConfigError as error:
        problems = str(error).splitlines()[1:]
    assert all("there is no such" in line for line in problems), problems


def test_verl_ppo_is_ours():
    ours = found("ppo_trainer").ours
    assert ours["algorithm.name"] == "ppo"
    assert ours["algorithm.prompts_per_step"] == 1024
    assert ours["algorithm.minibatches"] == 4  # of 256 prompts
    assert ours["algorithm.group_size"] == 1
    assert (ours["algorithm.advantage.gamma"], ours["algorithm.advantage.lam"]) == (1.0, 1.0)
    assert (ours["critic.lr"], ours["critic.weight_decay"], ours["algorithm.critic.clip"]) == (1e-5, 0.01, 0.5)
    assert (ours["optimizer.lr"], ours["optimizer.betas"]) == (1e-6, [0.9, 0.999])
    assert (ours["rollout.max_new_tokens"], ours["data.max_prompt_tokens"]) == (512, 512)
    assert ours["evaluation.temperature"] == 0.0
    assert ours["metrics.wandb"] == "verl_examples"
    assert (ours["launch.nodes"], ours["launch.devices"], ours["launch.resume"]) == (1, 8, "auto")
    assert "algorithm.kl" not in ours


def test_verl_grpo_with_a_kl_penalty_is_ours():
    converted = found("gsm8k_function_rm_grpo")
    assert converted.ours["algorithm.name"] == "grpo"
    assert converted.ours["algorithm.kl"] == {"place": "loss", "kind": "k3", "beta": 0.001}
    assert converted.ours["trainer.micro_batch_tokens"] == 4 * (512 + 512)
    assert converted.missing == ("gsm8k_base",)


def test_rlinf_grpo_on_megatron_is_ours():
    ours = found("qwen3-30b-grpo-megatron").ours
    assert ours["trainer.backend"] == "megatron"
    sizes = {key: ours[f"trainer.parallel.{key}"] for key in ("tensor", "pipeline", "expert")}
    assert sizes == {"tensor": 4, "pipeline": 4, "expert": 4}
    assert ours["rollout.max_new_tokens"] == 28672 - 1024  # an interpolation with arithmetic
    assert (ours["algorithm.minibatches"], ours["algorithm.group_size"]) == (4, 16)
    assert ours["algorithm.loss.clip_low"] == ours["algorithm.loss.clip_high"] == 0.2
    assert ours["optimizer.betas"] == [0.9, 0.95]
    assert ours["rollout.engine"] == "sglang"
    assert ours["rollout.engine_args.args"][:2] == ["--attention-backend", "triton"]
    assert ours["launch.nodes"] == 16
    assert "placement.mode" not in ours  # an engine over four devices has a process for each four of them
    assert (ours["placement.rollout"], ours["placement.trainer"]) == ("0-127:0-31", "all")


def test_rlinf_on_a_robot_is_ours():
    ours = found("maniskill_ppo_openvlaoft").ours
    assert (ours["policy.type"], ours["policy.lora.r"]) == ("openvla-oft", 32)
    assert ours["policy.settings.statistics"] == "bridge_orig"  # the models' own name of it; `unnorm_key` is refused
    assert (ours["placement.env"], ours["placement.policy"], ours["placement.trainer"]) == ("0-3", "4-7", "0-7")
    assert (ours["algorithm.minibatch"], ours["algorithm.micro_batch"]) == (640, 40)
    assert (ours["optimizer.critic_lr"], ours["optimizer.grad_clip"]) == (3e-3, 10.0)
    grpo = found("libero_10_grpo_openvlaoft").ours
    assert grpo["env.num_envs"] == 64
    assert grpo["algorithm.filter_returns"] == [0.1, 0.9]
    assert "optimizer.critic_lr" not in grpo
    assert grpo["policy.settings.value_level"] is None


def test_a_simulator_that_the_name_of_a_file_says_is_written_and_any_other_is_asked_for():
    libero = found("libero_10_grpo_openvlaoft")
    assert libero.ours["env.simulator"] == "rlinf.envs.adapters.libero.Libero"
    assert (libero.ours["env.options.suite"], libero.ours["policy.settings.embodiment"]) == ("libero_10", "libero")
    assert libero.ours["policy.horizon"] == 512 // 8
    assert not libero.wanted
    plates = found("maniskill_ppo_openvlaoft")
    assert "env/train/put_on_plate_in_scene_25_main" in plates.wanted["env.simulator"]
    assert "#   env.simulator: " in as_yaml(plates, "theirs.yaml", "ours.yaml")


LIBERO_FILE = """\
simulator_type: libero
task_suite_name: libero_object
auto_reset: ${algorithm.auto_reset}
max_episode_steps: 320
reward_coef: 5.0
group_size: ${algorithm.group_size}
num_envs: ${multiply:${algorithm.group_size}, ${algorithm.num_group_envs}}
video_cfg: {save_video: true}
"""


@pytest.mark.parametrize(
    ("named", "place"), [("env/train: libero_10", "env/train"), ("env/libero_10@env.train", "env")]
)
def test_the_simulators_file_is_read_where_it_lies_beside_a_configuration_of_rlinfs(tmp_path, named, place):
    theirs = (
        next(file for file in PUBLISHED if file.stem == "libero_10_grpo_openvlaoft")
        .read_text()
        .replace("env/train: libero_10", named)
    )
    (tmp_path / "theirs.yaml").write_text(theirs)
    by_name = convert(read(tmp_path / "theirs.yaml"))
    assert by_name.ours["env.options.suite"] == "libero_10", "the name of a file that is not here says it"
    (tmp_path / place).mkdir(parents=True)
    (tmp_path / place / "libero_10.yaml").write_text(LIBERO_FILE)
    converted = convert(read(tmp_path / "theirs.yaml"))
    assert converted.missing == ("env/eval/libero_10",)
    assert converted.ours["env.simulator"] == "rlinf.envs.adapters.libero.Libero"
    assert converted.ours["env.options.suite"] == "libero_object", "the file says it, not its name"
    assert (converted.ours["env.max_steps"], converted.ours["policy.horizon"]) == (320, 320 // 8)
    assert (converted.ours["env.num_envs"], converted.ours["env.group_size"]) == (64, 8)
    assert converted.ours["policy.settings.embodiment"] == "libero"
    assert not converted.wanted


def test_pictures_are_cropped_where_their_models_crop_them():
    whole = found("libero_10_grpo_openvlaoft").ours["policy.settings.crop"]
    assert whole == 1.0, "center_crop is read by nothing of theirs on LIBERO"

    class Theirs:
        missing = ()
        values: ClassVar = {
            "runner.task_type": "embodied",
            "env.train.env_type": "robotwin",
            "actor.model.center_crop": True,
        }

    assert convert(Theirs).ours["policy.settings.crop"] == 0.9


@pytest.mark.parametrize(
    ("split", "theirs", "rollout", "trainer"),
    [
        (1, None, None, None),
        (2, None, "0-15:0-7", "all"),
        (16, None, "0-15:0", "all"),
        (3, None, None, None),  # sixteen devices do not divide so: the mode stays, and the check says the rest
        (2, "0-7", "0-7:0-3", "8-15"),
        (4, "4-7", "4-7:0", "8-15"),
    ],
)
def test_an_engine_over_several_devices_has_one_process_for_all_of_them(split, theirs, rollout, trainer):
    ours = {"rollout.engine_args.tensor_parallel": split, "launch.nodes": 2, "launch.devices": 8}
    ours |= {"placement.mode": "collocated"} if theirs is None else {"placement.rollout": theirs}
    found = engine_devices(ours)
    if rollout is None:
        assert found is None
        return
    assert found == {"placement.rollout": rollout, **({"placement.trainer": trainer} if theirs is None else {})}
    groups = parse(rollout, 16)
    assert all(len(group) == split for group in groups)


def test_files_of_defaults_are_read_where_they_lie_beside_it(tmp_path):
    (tmp_path / "base.yaml").write_text("actor_rollout_ref: {rollout: {n: 5, temperature: 0.7}}\n")
    (tmp_path / "theirs.yaml").write_text("defaults: [base, _self_]\nactor_rollout_ref: {rollout: {n: 8}}\n")
    converted = convert(read(tmp_path / "theirs.yaml"))
    assert converted.missing == ()
    assert (converted.ours["algorithm.group_size"], converted.ours["rollout.temperature"]) == (8, 0.7)


@settings(max_examples=15)
@given(st.dictionaries(st.sampled_from(["lr", "n_x", "grad_clip", "strange"]), st.none() | st.floats(0, 1), max_size=4))
def test_a_key_that_nobody_knows_is_listed_and_never_lost(keys):
    values = {f"actor_rollout_ref.actor.odd.{key}": value for key, value in keys.items()}
    values["actor_rollout_ref.actor.ppo_epochs"] = 2

    class Theirs:
        missing = ()

    Theirs.values = values
    converted = convert(Theirs)
    unset = {key for key, value in values.items() if value is None}
    assert set(converted.absent) == values.keys() - unset - {"actor_rollout_ref.actor.ppo_epochs"}
    assert unset <= converted.same.keys()
    assert converted.ours["algorithm.epochs"] == 2


def test_rules_name_keys_that_there_are():
    """Of every file: a key of ours is one of the schema, or lies in a mapping of it."""
    known = {leaf.key: leaf for leaf in leaves(RunConfig)}
    for file in PUBLISHED:
        converted = convert(read(file))
        if converted.embodied:
            continue
        for key in converted.ours:
            parts = key.split(".")
            above = [".".join(parts[:count]) for count in range(1, len(parts) + 1)]
            assert key.startswith("launch.") or any(each in known for each in above), key


@pytest.mark.parametrize("name", ["verl", "rlinf_text", "rlinf_embodied"])
def test_every_rule_takes_values_of_every_kind(name):
    """A mistake in a table is an exception; a value of a kind that a rule does not expect has no counterpart."""

    class Theirs:
        missing = ()
        values: ClassVar = {}

    rules = _Rules(table := _table(name), Theirs)
    for key in table["rules"]:
        for value in (None, True, False, 7, -1, 0.5, "text", [], ["text", "more"], {"key": 1}):
            assert isinstance(rules.outcome(key, value), Same | Absent | dict), key


@pytest.mark.parametrize("name", ["verl", "rlinf_text", "rlinf_embodied"])
def test_every_rule_names_a_key_that_there_is(name):
    known = {leaf.key for leaf in leaves(EmbodiedConfig if name == "rlinf_embodied" else RunConfig)}
    table = _table(name)
    written = re.findall(r"-> ([a-z_.]+)", str(table["rules"]))
    assert len(written) > 50
    for key in written:
        parts = key.rstrip(".").split(".")
        above = {".".join(parts[:count]) for count in range(1, len(parts) + 1)}
        assert above & (known | {"launch"}), key


def test_a_value_of_another_kind_than_a_rule_expects_has_no_counterpart():
    class Theirs:
        missing = ()
        values: ClassVar = {"actor_rollout_ref.rollout.n": 8, "data.val_max_samples": "many"}

    assert convert(Theirs).absent.keys() == {"data.val_max_samples"}


SCRIPT = """\
#!/usr/bin/env bash
set -x  # data.train_batch_size=1
export N=${N:-8} HYDRA_FULL_ERROR=1
name='gspo run'; longest=$((1024 * (1 + 1)))
MODEL=$HOME/models/tiny
TRAIN="['$MODEL/a.parquet']"
DATA=(
    data.train_files="$TRAIN"   # (one file)
    data.max_response_length=${longest} data.prompt_key=prompt
)
if [ "$1" = "fast" ]; then echo "data.shuffle=True never run"; fi
python3 -m verl.trainer.main_ppo --config-name='ppo_trainer.yaml' \\
    "${DATA[@]}" algorithm.adv_estimator=grpo \\
    actor_rollout_ref.model.path=$MODEL actor_rollout_ref.rollout.n=$N \\
    actor_rollout_ref.actor.optim.lr=3e-6 \\
    +actor_rollout_ref.actor.policy_loss.loss_mode=gspo \\
    critic.optim.lr='${actor_rollout_ref.actor.optim.lr}' \\
    trainer.logger='["console","wandb"]' trainer.project_name="$name" \\
    trainer.experiment_name="$(basename $MODEL)-$(date +%Y)" \\
    trainer.nnodes=$SLURM_NNODES trainer.n_gpus_per_node=${1:-4} "$@"
"""


class TestScripts:
    @pytest.fixture
    def script(self, tmp_path):
        path = tmp_path / "run.sh"
        path.write_text(SCRIPT)
        return path

    def test_what_a_script_gives_its_command_is_read_without_running_it(self, script):
        values = read(script).values
        assert values["data.train_files"] == ["~/models/tiny/a.parquet"]
        assert (values["data.max_response_length"], values["data.prompt_key"]) == (2048, "prompt")
        assert values["actor_rollout_ref.model.path"] == "~/models/tiny"
        assert (values["actor_rollout_ref.rollout.n"], values["trainer.n_gpus_per_node"]) == (8, 4)
        assert values["critic.optim.lr"] == values["actor_rollout_ref.actor.optim.lr"] == 3e-6
        assert (values["trainer.logger"], values["trainer.project_name"]) == (["console", "wandb"], "gspo run")
        assert values["trainer.experiment_name"] == "tiny-$(date +%Y)"
        assert "data.train_batch_size" not in values
        assert "data.shuffle" not in values

    def test_what_only_the_machine_knows_has_no_counterpart(self, script):
        converted = convert(read(script))
        assert {*converted.absent} == {"trainer.experiment_name", "trainer.nnodes"}
        assert "$SLURM_NNODES" in converted.absent["trainer.nnodes"]
        assert converted.ours["algorithm.loss.ratio"] == "sequence"

    def test_overrides_win(self, script):
        more = ["actor_rollout_ref.rollout.n=16", "++data.shuffle=False", "~trainer.nnodes", "trainer.save_freq=5"]
        ours = convert(read(script, more)).ours
        assert (ours["algorithm.group_size"], ours["data.shuffle"], ours["checkpoint.every"]) == (16, False, 5)
        with pytest.raises(InputError, match=r"'--fast'.*override"):
            read(script, ["--fast"])

    def test_a_configuration_that_a_script_names_is_read_where_it_lies_beside_it(self, script, tmp_path):
        script.write_text("python -m x --config-path=config --config-name=mine data.train_batch_size=64\n")
        assert convert_or_none(script) == ("mine",)
        (tmp_path / "config").mkdir()
        (tmp_path / "config" / "mine.yaml").write_text("actor_rollout_ref: {rollout: {n: 5}}\n")
        converted = convert(read(script))
        assert (converted.missing, converted.ours["algorithm.group_size"]) == ((), 5)

    @pytest.mark.parametrize(
        ("text", "told"),
        [
            ("echo nothing\n", "no key=value of verl's"),
            ("torchrun -m verl.trainer.sft_trainer data.train_files=a\n", "supervised trainer"),
        ],
    )
    def test_scripts_of_something_else_are_refused(self, script, text, told, tmp_path, capsys):
        script.write_text(text)
        assert main(["convert", str(script), str(tmp_path / "ours.yaml")]) == 2
        assert told in capsys.readouterr().err

    def test_the_command_takes_scripts_and_overrides_and_its_help_says_so(self, script, tmp_path, capsys):
        target = tmp_path / "ours.yaml"
        given = ["trainer.total_training_steps=7", "--table", "trainer.n_gpus_per_node=2"]
        assert main(["convert", str(script), str(target), *given]) == 0
        out = capsys.readouterr().out
        assert "to be looked at: reward.function: " in out
        assert "(left out)" in out
        assert (yaml.safe_load(target.read_text())["steps"], "--nproc-per-node 2 " in target.read_text()) == (7, True)
        with pytest.raises(SystemExit):
            main(["convert", "--help"])
        out = capsys.readouterr().out
        assert "--table" in out
        assert "key=value" in out
        assert "--statistics" in out


def convert_or_none(script):
    return read(script).missing


class TestWhatIsLeftOut:
    @staticmethod
    def of(**values):
        class Theirs:
            missing = ()

        Theirs.values = {"actor_rollout_ref.rollout.n": 8, **{key.replace("__", "."): v for key, v in values.items()}}
        return convert(Theirs)

    def test_verl_does_as_it_does_where_nobody_says_anything(self):
        converted = self.of(algorithm__adv_estimator="grpo")
        ours = converted.ours
        assert (ours["optimizer.weight_decay"], ours["algorithm.loss.dual_clip"]) == (0.01, 3.0)
        assert (ours["algorithm.prompts_per_step"], ours["algorithm.minibatches"]) == (1024, 4)
        assert ours["reward.function"] == "rlinf.rewards.math"
        assert "data_source" in converted.remarks["reward.function"]
        assert "steps" in converted.remarks
        assert not converted.defaults.keys() & {"critic.lr", "algorithm.advantage.gamma"}, "there is no critic"
        text = as_yaml(converted, "theirs.yaml", "ours.yaml")
        assert "optimizer.weight_decay=0.01" in text

    def test_a_whole_file_and_a_part_of_it_are_the_same_run(self):
        whole, part = found("ppo_trainer"), self.of(actor_rollout_ref__rollout__n=1)
        keys = [key for key in part.defaults if key not in ("data.overlong",)]
        assert keys
        assert {key: part.ours[key] for key in keys} == {key: whole.ours[key] for key in keys}

    def test_where_a_reward_model_scores_there_is_no_function(self):
        converted = self.of(reward_model__enable=True, reward_model__model__path="rm")
        assert "reward.function" not in converted.ours
        assert not {"reward.function"} & converted.remarks.keys()

    @pytest.mark.parametrize(
        ("mode", "written", "absent"),
        [("sapo", "tau_neg", "clip_low"), ("cispo", "clip_low", "dual_clip"), ("vanilla", "dual_clip", "tau_neg")],
    )
    def test_keys_of_other_losses_are_left_out(self, mode, written, absent):
        modes = {"actor_rollout_ref.actor.policy_loss.loss_mode": mode, "actor_rollout_ref.actor.tau_neg": 1.1}
        ours = self.of(**modes).ours
        assert f"algorithm.loss.{written}" in ours
        assert f"algorithm.loss.{absent}" not in ours
        assert recipes.get("grpo", {k.removeprefix("algorithm."): v for k, v in ours.items() if ".loss." in k})

    def test_null_and_off_are_no_news(self):
        converted = self.of(trainer__new_thing=None, data__another=False, actor_rollout_ref__rollout__odd={})
        assert not converted.absent


class TestCommand:
    def test_it_writes_a_file_that_says_how_it_is_started_and_what_is_missing(self, tmp_path, capsys):
        source = next(file for file in PUBLISHED if file.stem == "qwen2.5-1.5b-grpo-megatron")
        target = tmp_path / "ours.yaml"
        assert main(["convert", str(source), str(target)]) == 0
        told = capsys.readouterr().out
        assert "194 keys of rlinf: " in told
        assert "  runner.max_epochs: epochs: set steps\n" in told
        assert "before it can be run:" in told
        assert "nothing was started" not in told
        text = target.read_text()
        assert "torchrun --nnodes 8 --nproc-per-node 8 -m rlinf train --config" in text
        assert "#   algorithm.early_stop_imp_ratio: " in text
        assert main(["convert", str(source), str(target)]) == 2
        assert "is there already" in capsys.readouterr().err

    def test_a_reward_function_beside_the_file_is_found_as_by_a_run(self, tmp_path, capsys, monkeypatch):
        monkeypatch.chdir(tmp_path)
        monkeypatch.setattr("sys.path", [*sys.path])
        (tmp_path / "beside_reward.py").write_text("def right(solution_str, ground_truth):\n    return 1.0\n")
        (tmp_path / "theirs.yaml").write_text(
            "actor_rollout_ref: {rollout: {n: 8}}\ncustom_reward_function: {path: beside_reward.py, name: right}\n"
        )
        assert main(["convert", "theirs.yaml", "ours.yaml"]) == 0
        told = capsys.readouterr().out
        assert "before it can be run" in told, "there is no model"
        assert "beside_reward" not in told.partition("before it can be run")[2]

    def test_a_script_that_names_neither_model_nor_data_is_told_so_with_the_keys_that_are_meant(self, tmp_path, capsys):
        script = tmp_path / "run.sh"
        script.write_text("python3 -m verl.trainer.main_ppo actor_rollout_ref.modle.path=x data.trian_files=y\n")
        assert main(["convert", str(script), str(tmp_path / "ours.yaml")]) == 0
        told = capsys.readouterr().out.partition("before it can be run")[2]
        for key in ("actor_rollout_ref.model.path", "actor_rollout_ref.modle.path", "data.train_files", "data.train"):
            assert key in told

    @pytest.mark.parametrize(
        ("named", "lacking", "other"),
        [
            ("actor_rollout_ref.model.path={}", "data.train_files", "actor_rollout_ref.model.path"),
            ("data.train_files={}/rows.parquet", "actor_rollout_ref.model.path", "data.train_files"),
        ],
    )
    def test_a_script_that_lacks_a_model_or_data_cannot_be_tried_yet(self, tmp_path, capsys, named, lacking, other):
        (tmp_path / "rows.parquet").touch()
        script = tmp_path / "run.sh"
        script.write_text(f"python3 -m verl.trainer.main_ppo actor_rollout_ref.rollout.n=4 {named.format(tmp_path)}\n")
        assert main(["convert", str(script), str(tmp_path / "ours.yaml")]) == 0
        told = capsys.readouterr().out
        assert "can be tried" not in told
        (line,) = [line for line in told.partition("before it can be run")[2].splitlines() if lacking in line]
        assert other not in line

    @pytest.mark.parametrize(
        ("given", "said"),
        [
            (["x.sh", "y.yaml"], "no such file"),
            (["x", "y"], "x: there is no such"),
            (["x.sh"], "required: OURS.yaml\n"),
        ],
    )
    def test_a_file_that_is_not_there_and_one_that_is_not_named_are_told(self, given, said, capsys):
        try:
            code = main(["convert", *given])
        except SystemExit as end:
            code = end.code
        assert code == 2
        assert said in capsys.readouterr().err

    def test_the_table_has_a_row_for_every_key(self, tmp_path, capsys):
        source = next(file for file in PUBLISHED if file.stem == "gsm8k_function_rm_grpo")
        assert main(["convert", str(source), str(tmp_path / "ours.yaml"), "--table"]) == 0
        lines = capsys.readouterr().out.splitlines()
        rows = [line for line in lines if ("  ->  " in line or "  ==  " in line) and not line.startswith("(left out)")]
        assert len(rows) == 14
        assert any(
            row.startswith("algorithm.adv_estimator") and row.endswith("->  algorithm.name=grpo") for row in rows
        )

    @pytest.mark.parametrize(
        ("text", "said"),
        [
            ("trainer: {lr: 1}\n", "neither verl's nor RLinf's"),
            ("- 1\n", "a mapping of keys is expected"),
            ("a: [\n", "cannot be read as YAML"),
        ],
    )
    def test_what_is_no_configuration_of_theirs_is_refused_in_words(self, text, said, tmp_path, capsys):
        (tmp_path / "x.yaml").write_text(text)
        assert main(["convert", str(tmp_path / "x.yaml"), str(tmp_path / "ours.yaml")]) == 2
        assert said in capsys.readouterr().err
        assert not (tmp_path / "ours.yaml").exists()
