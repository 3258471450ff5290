"""Every format of demonstrations holds what was written, and a broken file is told by its name."""

import json
import random
import shutil
import tempfile
from pathlib import Path

import h5py
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rlinf.data.demonstrations import DemonstrationSet, open_episodes, open_parts, read_demonstrations
from rlinf.data.demonstrations.episode import decisions
from rlinf.data.demonstrations.lerobot import filled
from rlinf.data.demonstrations.load import WRITTEN, save_demonstrations
from tests.data.demonstrations.shown import LOSES_LAST, assert_same, data_sets, episode, without_last


@settings(max_examples=10, deadline=None)
@given(data_sets(), st.sampled_from(WRITTEN), st.sampled_from(WRITTEN))
def test_what_is_written_in_one_format_and_then_another_is_what_both_can_hold(demonstrations, first, second):
    with tempfile.TemporaryDirectory() as directory:
        once, twice = Path(directory) / "once", Path(directory) / "twice"
        save_demonstrations(once, demonstrations, first, videos=False)
        episodes = open_episodes(once)
        save_demonstrations(twice, [episodes.read(place) for place in range(len(episodes))], second, videos=False)
        found = open_episodes(twice)
        wanted = demonstrations
        if {first, second} & {*LOSES_LAST}:
            wanted = [without_last(shown) for shown in wanted]
        told = [(len(each.actions), each.success) for each in wanted]
        assert [(about.rows, about.success) for about in found.abouts] == told
        for place in reversed(range(len(wanted))):  # any of them, in any order
            assert_same(found.read(place), wanted[place])


@pytest.fixture(scope="module", params=WRITTEN)
def written(request, tmp_path_factory):
    """A data set of three episodes in each of the formats."""
    directory = tmp_path_factory.mktemp("written") / request.param
    save_demonstrations(directory, [episode(rows, seed=rows) for rows in (3, 5, 4)], request.param, videos=False)
    return directory


def test_files_that_end_too_soon_are_told_by_their_names(written, tmp_path):
    random.seed(0)
    files = [path.relative_to(written) for path in written.rglob("*") if path.is_file()]
    for number in range(12):
        copy = shutil.copytree(written, tmp_path / str(number))
        path = copy / random.choice(files)
        content = path.read_bytes()
        path.write_bytes(content[: random.randrange(len(content) // 2)])
        if path.stem in ("stats", "episodes_stats", "tasks"):
            continue  # nobody reads them here
        with pytest.raises((ValueError, FileNotFoundError)) as error:
            read_demonstrations(copy)
        assert path.name in str(error.value) or path.stem in str(error.value)


def test_a_format_that_keeps_single_actions_refuses_chunks_and_leaves_nothing(tmp_path):
    chunked = episode(2, actions=torch.zeros(2, 3, 1), rewards=torch.zeros(2, 3), valid=torch.ones(2, 3).bool())
    for form in WRITTEN[1:]:
        with pytest.raises(ValueError, match="chunks of 3"):
            save_demonstrations(tmp_path / form, [episode(), chunked][::-1], form)
    (tmp_path / "there").mkdir()
    (tmp_path / "there" / "mine").touch()
    with pytest.raises(FileExistsError, match="not empty"):
        save_demonstrations(tmp_path / "there", [episode()])
    assert [path.name for path in tmp_path.iterdir()] == ["there"]


def test_what_a_killed_writer_left_is_neither_read_nor_in_the_way(tmp_path):
    def killed():
        yield episode()
        raise KeyboardInterrupt

    for form in WRITTEN:
        with pytest.raises(KeyboardInterrupt):
            save_demonstrations(tmp_path / "data", killed(), form, videos=False)
        (tmp_path / ".data.unfinished").mkdir()
        (tmp_path / ".data.unfinished" / "rest").touch()  # of one that could not even tidy up
        assert not (tmp_path / "data").exists()
        save_demonstrations(tmp_path / "data", [episode()], form, videos=False)
        assert len(read_demonstrations(tmp_path / "data")) == 1
        shutil.rmtree(tmp_path / "data")


# LeRobot --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("form", LOSES_LAST)
def test_frames_of_videos_are_those_of_their_rows(tmp_path, form, monkeypatch):
    monkeypatch.setattr("rlinf.data.demonstrations.lerobot._FILE_FRAMES", 8)  # two videos for five episodes
    shades = torch.arange(0, 250, 8, dtype=torch.uint8)  # no two frames of the data set are alike

    def shown(number, rows):
        first = number * 6
        pictures = shades[first : first + rows + 1].view(-1, 1, 1, 1).expand(-1, 16, 16, 6).clone()
        pictures[..., 3:] = 255 - pictures[..., 3:]
        return episode(rows, cameras=0, observation={"rgb": pictures, "state": torch.zeros(rows + 1, 1)})

    wanted = [shown(number, rows) for number, rows in enumerate((5, 3, 5, 1, 4))]
    save_demonstrations(tmp_path / "set", wanted, form, fps=30000 / 1001)
    found = open_episodes(tmp_path / "set")
    assert len([*(tmp_path / "set").rglob("*.mp4")]) == (10 if form == "lerobot-v2.1" else 4)
    for place in (4, 0, 3, 1, 2):
        apart = found.read(place).observation["rgb"][:-1].int() - wanted[place].observation["rgb"][:-1].int()
        assert apart.abs().max() <= 3  # frames differ by 8


def lerobot(directory, version=3):
    save_demonstrations(
        directory, [episode(3), episode(2, seed=1)], "lerobot" if version == 3 else "lerobot-v2.1", videos=False
    )
    return directory


def change_info(directory, **changes):
    path = directory / "meta" / "info.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def change_rows(directory, **columns):
    path = next((directory / "data").rglob("*.parquet"))
    table = pq.read_table(path)
    for name, rows in columns.items():
        table = table.set_column(table.column_names.index(name), name, pa.array(rows))
    pq.write_table(table, path)


WRONG = {
    "a version nobody knows": (lambda path: change_info(path, codebase_version="v4.0"), "codebase_version: v4.0"),
    "a rate that is none": (lambda path: change_info(path, fps=0), "info.json: fps"),
    "a path out of the data set": (
        lambda path: change_info(path, data_path="../../{chunk_index:03d}/{file_index}.parquet"), "leads out",
    ),
    "a path with other holes": (lambda path: change_info(path, data_path="{secret}.parquet"), "more to fill in"),
    "features that are none": (lambda path: change_info(path, features=[1]), "info.json: features"),
    "rows out of order": (lambda path: change_rows(path, frame_index=[0, 2, 1, 0, 1]), "frame_index: of episode 0"),
    "rows of another rate": (
        lambda path: change_rows(path, timestamp=[0.0, 0.1, 0.25, 0.0, 0.1]), r"timestamp: row 2 is 0.0500 s off",
    ),
    "actions of another length": (
        lambda path: change_rows(path, action=[[1.0]] * 5), "action: its rows have 1 numbers",
    ),
    "pictures that are none": (
        lambda path: change_rows(path, **{"observation.images.main": [{"bytes": b"GIF89", "path": None}] * 5}),
        "observation.images.main: cannot identify",
    ),
    "pictures from elsewhere": (
        lambda path: change_rows(path, **{"observation.images.main": [{"bytes": None, "path": "/etc/passwd"}] * 5}),
        "outside of the data set",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_a_lerobot_data_set_that_is_wrong_is_told_by_file_and_field(tmp_path, name):
    change, told = WRONG[name]
    change(lerobot(tmp_path / "set"))
    with pytest.raises(ValueError, match=told) as error:
        read_demonstrations(tmp_path / "set")
    assert str(tmp_path) in str(error.value)


def test_features_are_named_by_a_mapping(tmp_path):
    lerobot(tmp_path / "set")
    names = {"observation.state": "state", "action": "actions", "observation.images.main": "front"}
    found = open_episodes(tmp_path / "set", names=names).read(0)
    assert found.observation.keys() == {"state", "front"}
    assert not found.rewards.any()  # they were not asked for
    twice = open_episodes(tmp_path / "set", names={**names, "next.reward": "state"}).read(0)
    assert twice.observation["state"].shape == (4, 4)
    with pytest.raises(ValueError, match=r"'observation.images.top'.*action"):
        open_episodes(tmp_path / "set", names={**names, "observation.images.top": "rgb"})
    with pytest.raises(ValueError, match=r"feature.*'actions'"):
        open_episodes(tmp_path / "set", names={"observation.state": "state"}).read(0)


def test_a_data_set_of_others_is_read_by_what_every_data_set_has(tmp_path):
    lerobot(tmp_path / "set", version=2)
    lines = [json.loads(line) for line in (tmp_path / "set/meta/episodes.jsonl").read_text().splitlines()]
    own = ("success", "terminated", "tasks")
    kept = [{name: value for name, value in line.items() if name not in own} for line in lines]
    (tmp_path / "set/meta/episodes.jsonl").write_text("\n".join(map(json.dumps, kept)))
    change_info(tmp_path / "set", codebase_version="v2.0")
    found = open_episodes(tmp_path / "set")
    assert found.abouts[0].success is None
    assert found.read(0).instruction == "pick up the cube"  # by the task's number in the rows
    assert not found.read(0).terminated


def test_paths_of_templates_are_filled_as_they_ask():
    assert filled("a/{n:03d}/{key}.mp4", {"n": 7, "key": "x"}) == "a/007/x.mp4"
    for template in ("{n.__class__}", "{n!r}", "{n:0999999999d}", "{m}", "{"):
        with pytest.raises(ValueError, match="to fill in"):
            filled(template, {"n": 7})


# ManiSkill ------------------------------------------------------------------------------------------------------------


def recorded_by_maniskill(path, obs, rewards=True):
    """As `RecordEpisode` of mani_skill 3.0.1 lays a trajectory out."""
    with h5py.File(path / "x.h5", "w") as file:
        group = file.create_group("traj_7", track_order=True)
        obs(group)
        group["actions"] = np.arange(6, dtype=np.float32).reshape(3, 2) / 10
        group["success"] = np.array([False, False, True])
        group["terminated"], group["truncated"] = np.array([False, False, True]), np.zeros(3, bool)
        state = group.create_group("env_states/actors", track_order=True)
        state["cube"] = np.ones((4, 13), np.float32)
        if rewards:
            group["rewards"] = np.array([0.0, 0.5, 1.0], np.float32)
    episodes = [{"episode_id": 7, "episode_seed": 3, "elapsed_steps": 3, "success": True}]
    (path / "x.json").write_text(json.dumps({"env_info": {"env_id": "PushCube-v1"}, "episodes": episodes}))
    return open_episodes(path)


def test_trajectories_of_maniskill_in_its_modes(tmp_path):
    def state(group):
        group["obs"] = np.arange(8, dtype=np.float32).reshape(4, 2)

    def groups(group):
        group["obs/agent/qpos"], group["obs/agent/qvel"] = np.ones((4, 2), np.float32), np.zeros((4, 1), np.float32)
        group["obs/sensor_param/base_camera/cam2world"] = np.zeros((4, 4, 4), np.float32)
        group["obs/sensor_data/base_camera/rgb"] = np.full((4, 6, 6, 3), 9, np.uint8)
        group["obs/sensor_data/hand_camera/rgb"] = np.full((4, 6, 6, 3), 8, np.uint8)

    found = recorded_by_maniskill(tmp_path, state).read(0)
    assert found.observation["state"].tolist() == np.arange(8).reshape(4, 2).tolist()
    assert found.rewards[:, 0].tolist() == [0.0, 0.5, 1.0]
    assert found.terminated
    found = recorded_by_maniskill(tmp_path, groups, rewards=False).read(0)
    assert found.observation["state"].tolist() == [[1.0, 1.0, 0.0]] * 4
    assert found.observation["rgb"].unique(dim=0).flatten()[[0, -1]].tolist() == [9, 8]
    assert found.rewards.sum() == 0
    with pytest.raises(ValueError, match="obs_mode none"):
        recorded_by_maniskill(tmp_path, lambda group: None).read(0)
    named = {"env_states/actors/cube": "state", "actions": "actions"}
    assert open_episodes(tmp_path, names=named).read(0).observation["state"].shape == (4, 13)


def test_trajectories_that_do_not_fit_their_json_are_refused(tmp_path):
    def state(group):
        group["obs"] = np.zeros((4, 2), np.float32)

    recorded_by_maniskill(tmp_path, state)
    about = json.loads((tmp_path / "x.json").read_text())
    for field, value, told in (("elapsed_steps", 2, "it has 3 rows"), ("episode_id", 8, "traj_8")):
        (tmp_path / "x.json").write_text(json.dumps({**about, "episodes": [{**about["episodes"][0], field: value}]}))
        with pytest.raises(ValueError, match=told):
            open_episodes(tmp_path).read(0)
    (tmp_path / "x.json").unlink()
    with pytest.raises(ValueError, match=r"x\.json"):
        open_episodes(tmp_path)


# RLDS -----------------------------------------------------------------------------------------------------------------


def test_one_archive_holds_several_episodes_cut_where_they_begin(tmp_path):
    first = np.array([True, False, True, False, False])
    np.savez(
        tmp_path / "steps.npz",
        **{
            "observation/proprio": np.arange(5.0)[:, None],
            "observation/wrist_image": np.full((5, 4, 4, 3), 2, np.uint8),
            "observation/image": np.full((5, 4, 4, 3), 1, np.uint8),
            "action": np.arange(10, dtype=np.float32).reshape(5, 2),
            "is_first": first,
            "is_last": np.roll(first, -1),
            "is_terminal": np.array([False, True, False, False, False]),
            "language_instruction": np.array(["open"] * 2 + ["close"] * 3),
        },
    )
    found = read_demonstrations(tmp_path / "steps.npz")
    assert [each.instruction for each in found] == ["open", "close"]
    assert [each.terminated for each in found] == [True, False]
    assert found[0].actions[:, 0].tolist() == [[0, 1], [2, 3]]  # the last step acts, too
    assert found[1].observation["state"].flatten().tolist() == [2, 3, 4, 4]
    assert found[1].observation["rgb"][0, 0, 0].tolist() == [1, 1, 1, 2, 2, 2]


def test_pickled_archives_and_steps_that_do_not_match_are_refused(tmp_path):
    np.savez(tmp_path / "a.npz", action=np.array([{"x": 1}], dtype=object))
    with pytest.raises(ValueError, match=r"a.npz: action: .*allow_pickle"):
        open_episodes(tmp_path)
    np.savez(tmp_path / "a.npz", action=np.zeros((2, 1)), is_first=np.array([True]))
    with pytest.raises(ValueError, match=r"is_first:.*2 rows"):
        open_episodes(tmp_path)
    np.savez(tmp_path / "a.npz", action=np.zeros((2, 1)), **{"observation/state": np.zeros((5, 1))[:1]})
    with pytest.raises(ValueError, match=r"'observation/state'.*1 rows.*episode 2"):
        read_demonstrations(tmp_path)


def test_nothing_to_read_says_what_is_looked_for(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"episode_\*.json .* meta/info.json"):
        open_episodes(tmp_path)
    with pytest.raises(ValueError, match=r"demonstrations:.*lerobot"):
        open_episodes(tmp_path, "hdf6")


@pytest.mark.parametrize("form", ["lerobot", "lerobot-v2.1"])
def test_what_lerobot_reads_by_pandas_and_normalises_by_is_there(tmp_path, form):
    pandas = pytest.importorskip("pandas")
    shown = [episode(40, seed=1, instruction=("open", *["close"] * 39)), episode(30, seed=2)]
    save_demonstrations(tmp_path, shown, form, videos=False)
    rows = torch.cat([each.actions[:, 0] for each in shown]).double().numpy()
    if form == "lerobot":
        tasks = pandas.read_parquet(tmp_path / "meta/tasks.parquet")  # LeRobot's `load_tasks`
        assert {text: int(tasks.loc[text].task_index) for text in tasks.index} == {
            "open": 0, "close": 1, "pick up the cube": 2,
        }  # fmt: skip
        statistics = json.loads((tmp_path / "meta/stats.json").read_text())["action"]
    else:
        lines = (tmp_path / "meta/episodes_stats.jsonl").read_text().splitlines()
        rows, statistics = rows[:40], json.loads(lines[0])["stats"]["action"]
    for name, level in (("q01", 1), ("q10", 10), ("q50", 50), ("q90", 90), ("q99", 99)):
        assert statistics[name] == pytest.approx(np.percentile(rows, level, axis=0).tolist())


def test_each_decision_has_the_instruction_of_its_row():
    shown = [episode(3, instruction=("open", "close", "close")), episode(2, instruction="push")]
    assert decisions(shown, 2).instructions == ("open", "close", "close", "push", "push")


def write_robomimic(file, episodes, attributes=()):
    with h5py.File(file, "w") as content:
        data = content.create_group("data")
        data.attrs.update(attributes)
        for name, (arrays, about) in episodes.items():
            group = data.create_group(name)
            group.attrs.update({"num_samples": len(arrays["actions"]), **about})
            for path, rows in arrays.items():
                group.create_dataset(path, data=rows)


def rows_of(shape, seed, count=3, pixels=False):
    numbers = np.random.default_rng(seed).random((count, *shape))
    return (255 * numbers).astype(np.uint8) if pixels else numbers


@pytest.mark.parametrize("name", ["low_dim.hdf5", "image.h5"])
def test_robomimics_episodes_are_read_in_the_order_of_their_numbers(tmp_path, name):
    parts = {"object": 10, "robot0_eef_pos": 3, "robot0_eef_quat": 4, "robot0_gripper_qpos": 2, "robot0_joint_pos": 7}
    arrays = {
        f"{which}/{each}": rows_of((size,), size) for each, size in parts.items() for which in ("obs", "next_obs")
    }
    arrays |= {f"obs/{each}_image": rows_of((8, 8, 3), 1, pixels=True) for each in ("agentview", "a_wrist")}
    arrays |= {"actions": rows_of((7,), 2), "rewards": np.array([0.0, 0, 1]), "dones": np.array([0, 0, 1])}
    failed = {**arrays, "rewards": np.zeros(3), "dones": np.zeros(3, int)}
    shaped = {**arrays, "rewards": np.array([0.1, 0.2, 0.3])}
    said = {"ep_meta": json.dumps({"lang": "lift the cube"})}
    write_robomimic(tmp_path / name, {"demo_10": (shaped, {}), "demo_2": (failed, {}), "demo_0": (arrays, said)})
    episodes = open_episodes(tmp_path)
    assert [about.success for about in episodes.abouts] == [True, False, None]
    found = episodes.read(0)
    order = ("robot0_eef_pos", "robot0_eef_quat", "robot0_gripper_qpos", "object")
    state = np.concatenate([arrays[f"obs/{each}"] for each in order], axis=1)
    last = np.concatenate([arrays[f"next_obs/{each}"][-1] for each in order])
    np.testing.assert_allclose(found.observation["state"], [*state, last], rtol=1e-6)
    cameras = np.concatenate([arrays["obs/agentview_image"], arrays["obs/a_wrist_image"]], axis=3)
    np.testing.assert_array_equal(found.observation["rgb"][:3], cameras)  # what was seen in the end is not recorded
    np.testing.assert_allclose(found.actions[:, 0], arrays["actions"], rtol=1e-6)
    assert (found.instruction, found.terminated, episodes.read(1).terminated) == ("lift the cube", True, False)
    assert sorted(episodes.read(0, pictures=False).observation) == ["state"]
    one = open_episodes(tmp_path / name, names={"obs/object": "state", "actions": "actions"}).read(0)
    assert one.observation["state"].shape == (4, 10)


def test_liberos_files_are_tasks_with_pictures_as_its_simulator_shows_them(tmp_path):
    for number, words in enumerate(["open the drawer", list("push the plate")]):
        arrays = {
            "obs/ee_states": rows_of((6,), 1),
            "obs/gripper_states": rows_of((2,), 2),
            "actions": rows_of((7,), 3),
        }
        arrays |= {"obs/joint_states": rows_of((7,), 4), "states": rows_of((50,), 5), "rewards": np.array([0, 0, 1])}
        arrays |= {f"obs/{each}_rgb": rows_of((8, 8, 3), 6, pixels=True) for each in ("eye_in_hand", "agentview")}
        about = {"problem_info": json.dumps({"language_instruction": words}), "macros_image_convention": "opengl"}
        write_robomimic(tmp_path / f"task{number}_demo.hdf5", {"demo_0": (arrays, {})}, about)
    episodes = open_episodes(tmp_path)
    assert [about.instruction for about in episodes.abouts] == ["open the drawer", "push the plate"]
    found = episodes.read(1)
    state = np.concatenate([arrays["obs/ee_states"], arrays["obs/gripper_states"]], axis=1)
    np.testing.assert_allclose(found.observation["state"][:3], state, rtol=1e-6)
    pictures = [arrays[f"obs/{each}_rgb"][:, ::-1, ::-1] for each in ("agentview", "eye_in_hand")]
    np.testing.assert_array_equal(found.observation["rgb"][:3], np.concatenate(pictures, axis=3))


def test_an_hdf5_file_of_neither_layout_and_one_cut_in_half_are_told_by_their_names(tmp_path):
    file = tmp_path / "other.hdf5"
    with h5py.File(file, "w") as content:
        content.create_dataset("data/actions", data=np.zeros((100, 7)))
    with pytest.raises(ValueError, match=r"other\.hdf5: .*data/demo_0.*other\.json"):
        open_episodes(file)
    write_robomimic(file, {"demo_0": ({"obs/object": np.zeros((3, 2)), "actions": np.zeros((3, 7))}, {})})
    file.write_bytes(file.read_bytes()[:-500])
    with pytest.raises(ValueError, match=r"other\.hdf5"):
        open_episodes(file)


def shift_times(directory, version, by):
    """Add seconds to the times of an episode's rows, as clocks of real robots do."""
    (file,) = (directory / "data").rglob("*.parquet")
    table = pq.read_table(file)
    times = table["timestamp"].to_numpy() + np.asarray(by, np.float32)
    pq.write_table(table.set_column(table.column_names.index("timestamp"), "timestamp", pa.array(times)), file)


def test_clocks_of_real_robots_are_taken_as_they_are_where_nothing_goes_by_them(tmp_path, caplog):
    shown = episode(4, cameras=0)
    save_demonstrations(tmp_path / "numbers", [shown], "lerobot", videos=False)
    shift_times(tmp_path / "numbers", 3, [0, 0.01, -0.02, 0.02])
    assert_same(open_episodes(tmp_path / "numbers").read(0), without_last(shown))
    assert "row 3" in caplog.text
    save_demonstrations(tmp_path / "pictures", [episode(4)], "lerobot", videos=True)
    shift_times(tmp_path / "pictures", 3, [0, 0.01, -0.02, 0.02])
    with pytest.raises(ValueError, match=r"timestamp.*frame_index / fps"):
        open_episodes(tmp_path / "pictures").read(0)
    shift_times(tmp_path / "numbers", 3, [0, 0.5, 0, 0])
    with pytest.raises(ValueError, match="timestamp"):
        open_episodes(tmp_path / "numbers").read(0)  # they go back


def test_episodes_that_are_not_whole_end_a_run_or_are_left_out_and_told_of(tmp_path, caplog):
    broken = episode(2, cameras=0, actions=torch.full((2, 1, 2), torch.nan))
    save_demonstrations(tmp_path, [episode(3, cameras=0), broken, episode(4, cameras=0)], "rlinf")
    sets = {"data": {"path": str(tmp_path)}}
    ((part,), _) = open_parts(DemonstrationSet(sets=sets, broken="drop"))
    assert part.places == (0, 2)
    assert "1 of 3 episodes" in caplog.text
    ((part,), _) = open_parts(DemonstrationSet(sets=sets))
    assert part.places == (0, 1, 2)
    sets = {"data": {"path": str(tmp_path), "bounds": "min_max"}}
    with pytest.raises(ValueError, match=r"episode 1.*imitation\.broken"):
        open_parts(DemonstrationSet(sets=sets))
