"""Videos of episodes: which, how long, and whole."""

import importlib.util

import numpy as np
import pytest
import torch

from rlinf.envs import video
from rlinf.envs.base import CannotRender
from rlinf.envs.environment import Environment, Rules
from rlinf.envs.toy import Reach
from rlinf.envs.video import Recorder, Recording
from rlinf.envs.workers import told_by
from tests.envs.scripted import Scripted

Image = pytest.importorskip("PIL.Image", reason="pillow reads the videos back")


@pytest.fixture(autouse=True)
def webp(monkeypatch):
    """The format that pillow reads back, also where mp4 could be written."""
    monkeypatch.setattr(video, "_writer", lambda: video._write_webp)


def recorded(directory, **settings) -> list[str]:
    """Names of the videos of four environments, whose episodes last 2 steps, in chunks of 4."""
    recording = Recording(str(directory), **settings)
    env = Environment(Reach(4, max_steps=2), Rules(seed=1), first=4, recorder=Recorder(recording))
    for epoch in range(2):
        env.reset(epoch)
        for _ in range(2):
            env.step(torch.zeros(4, 4, 1))
    return sorted(path.name for path in directory.iterdir())


def test_the_wanted_episodes_are_kept_by_epoch_environment_and_number(tmp_path):
    names = recorded(tmp_path, envs=(5, 7), name="evaluation-")
    assert names == [
        f"evaluation-epoch000{epoch}-env000{env}-episode0000-failure.webp" for epoch in range(2) for env in (5, 7)
    ]
    assert len(recorded(tmp_path / "more", envs=(4,), episodes=2)) == 4


def test_a_video_has_one_picture_more_than_steps_and_shows_them_in_order(tmp_path):
    env = Environment(Reach(1, max_steps=3), Rules(seed=8), recorder=Recorder(Recording(str(tmp_path), fps=10)))
    env.reset()
    pictures = [env.simulator.render(torch.arange(1))[0].numpy()]
    push = -torch.sign(env.simulator._point).view(1, 1, 1)
    for _ in range(3):
        if env.step(push).episodes:
            break
        pictures.append(env.simulator.render(torch.arange(1))[0].numpy())
    (path,) = tmp_path.iterdir()
    with Image.open(path) as film:
        assert film.n_frames == len(pictures) + 1
        for index, wanted in enumerate(pictures):
            film.seek(index)
            shown = np.asarray(film.convert("RGB")).astype(int)
            assert np.abs(shown - wanted).mean() < 12  # it is compressed
            assert film.info["duration"] == 100


def test_what_no_simulator_draws_is_an_error_at_the_first_reset(tmp_path):
    env = Environment(Scripted([[]]), recorder=Recorder(Recording(str(tmp_path))))
    with pytest.raises(NotImplementedError, match=r"Scripted.*pictures"):
        env.reset()


def test_without_anything_that_writes_videos_the_message_names_what_to_install(monkeypatch):
    monkeypatch.undo()
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ModuleNotFoundError, match="pip install"):
        Recorder(Recording("nowhere"))


@pytest.mark.skipif(importlib.util.find_spec("imageio_ffmpeg") is None, reason="mp4 needs imageio-ffmpeg")
def test_mp4_is_written_for_odd_sizes(tmp_path):
    video._write_mp4(tmp_path, "film", [np.full((33, 47, 3), 10 * index, np.uint8) for index in range(6)], 20)
    assert [path.name for path in tmp_path.iterdir()] == ["film.mp4"]
    assert (tmp_path / "film.mp4").stat().st_size > 500


def test_pictures_that_nobody_draws_are_told_in_a_line_with_the_key_to_change():
    with pytest.raises(CannotRender) as raised:
        Scripted([[]]).render(torch.tensor([0]))
    told = str(told_by("trials[0]", raised.value))
    assert told.startswith("trials[0]: Scripted ")
    assert "trials.videos=0" in told
