"""A success classifier: trained from a few hundred frames of episodes, and taken as a reward."""

import pytest
import torch

from rlinf.data.demonstrations import Demonstration, write_demonstrations
from rlinf.envs import classifier
from rlinf.envs.base import CannotSimulate
from rlinf.envs.environment import Environment, Rules
from rlinf.envs.toy import NEAR, Reach, expert
from rlinf.envs.wrappers import Scored
from rlinf.flows.record import demonstrated


class Shown:
    """What a slice shows, as `demonstrated` takes it."""

    def __init__(self, observation, chunk=None):
        self.observation, self.chunk, self.first, self.instructions = observation, chunk, 0, None


def episodes(count, noise, seed, **options):
    """Episodes of the toy: the expert's way, with so much noise."""
    environment = Environment(Reach(count, **options), Rules(auto_reset=False, seed=seed))
    told, actions, generator = [Shown(environment.reset(0).observation)], [], torch.Generator().manual_seed(seed)
    for _ in range(12):
        drawn = torch.rand(count, 1, 1, generator=generator) * 2 - 1
        actions.append(((1 - noise) * expert(told[-1].observation) + noise * drawn).clamp(-1, 1))
        told.append(Shown((chunk := environment.step(actions[-1])).observation, chunk))
    return demonstrated(told, actions)


@pytest.fixture(scope="module", params=["rgb", "state"])
def trained(request, tmp_path_factory):
    """What it looks at, and the directory of the classifier."""
    path = tmp_path_factory.mktemp("classifier")
    shown = episodes(40, 0.3, 1, pixels=16) + episodes(10, 1.0, 2, pixels=16)
    write_demonstrations(path / "shown", shown)
    classifier.main([str(path / "shown"), str(path / "made"), "--look", request.param, "--steps", "300"])
    return request.param, str(path / "made")


def test_it_sees_success_where_the_simulator_says_so(trained):
    _, path = trained
    demos = episodes(64, 0.5, 9, pixels=16)
    frames, pictures = (torch.cat([demo.observation[name] for demo in demos]) for name in ("state", "rgb"))
    distance = (frames[:, 0] - frames[:, 1]).abs()
    seen = classifier.success({"state": frames, "rgb": pictures}, path=path, certain=0.5)
    assert seen[distance > 2 * NEAR].float().mean() < 0.03  # pixels of 0.13 do not tell what lies between
    assert seen[distance <= NEAR].float().mean() > 0.75


def test_it_is_reward_and_end_of_an_episode(trained):
    _, path = trained
    functions = {name: f"rlinf.envs.classifier.{name}" for name in ("reward", "success")}
    options = {"pixels": 16, "sparse": True}
    made = Scored(8, simulator=Endless, options=options, **functions, arguments={"path": path}, ends=True)
    environment = Environment(made, Rules(auto_reset=False))
    chunk = environment.reset(0)
    ended = []
    for _ in range(12):
        chunk = environment.step(expert(chunk.observation))
        ended += chunk.episodes
    assert sum(episode.success_once for episode in ended) >= 6
    for episode in ended:
        assert (episode.total, episode.truncated) == ((1.0, False) if episode.success_once else (0.0, True))


class Endless(Reach):
    """A toy that neither rewards nor ends."""

    def step(self, actions, active):
        moved = super().step(actions, active)
        nothing = torch.zeros_like(moved.terminated)
        return type(moved)(moved.observation, nothing.float(), nothing, nothing, None)


def test_what_cannot_be_learned_from_or_looked_at_is_said(tmp_path, trained):
    look, path = trained
    failed = Demonstration(
        {"state": torch.zeros(3, 2)}, torch.zeros(2, 1, 1), *(torch.zeros(2, 1),) * 2, False, False, None
    )
    with pytest.raises(ValueError, match="0 of 3 frames show success"):
        classifier.train([failed], "state")
    with pytest.raises(ValueError, match=r"no 'rgb', but \['state'\]"):
        classifier.train([failed], "rgb")
    with pytest.raises(ValueError, match=rf"looks at {look} .* there is .*'state': \[3\]"):
        classifier.success({"state": torch.zeros(1, 3)}, path=path)
    with pytest.raises(CannotSimulate, match=r"classifier\.json"):
        classifier.load(str(tmp_path))
    with pytest.raises(SystemExit, match="error: "):
        classifier.main([str(tmp_path), str(tmp_path / "out")])
