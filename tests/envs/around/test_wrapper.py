"""What a wrapper does not change reaches the simulator inside."""

import pytest
import torch

from rlinf.envs.base import Simulator
from rlinf.envs.environment import FrameStack
from rlinf.envs.toy import Reach
from rlinf.envs.wrappers import Mixture, Scored, Wrapper

HEARD: list[str] = []


class Hearing(Reach):
    """Notes what it is asked beside episodes."""

    resets_together = True

    def instructions(self):
        return [f"go {env}" for env in range(self.num_envs)]

    def tasks(self):
        return [f"task {env}" for env in range(self.num_envs)]

    def weigh(self, weights):
        HEARD.append(f"weigh {list(weights)}")

    def render(self, env_ids):
        HEARD.append("render")
        return torch.zeros(len(env_ids), 2, 2, 3, dtype=torch.uint8)

    def offload(self):
        HEARD.append("offload")

    def onload(self):
        HEARD.append("onload")

    def close(self):
        HEARD.append("close")


@pytest.mark.parametrize(
    "wrap", [lambda: Scored(2, simulator=Hearing), lambda: FrameStack(Scored(2, simulator=Hearing), 2)]
)
def test_every_call_reaches_the_simulator_inside(wrap):
    HEARD.clear()
    wrapped = wrap()
    assert wrapped.resets_together
    assert wrapped.instructions() == ["go 0", "go 1"]
    assert wrapped.tasks() == ["task 0", "task 1"]
    assert wrapped.render(torch.tensor([1])).shape == (1, 2, 2, 3)
    wrapped.weigh([1.0])
    wrapped.offload(), wrapped.onload(), wrapped.close()
    assert HEARD == ["render", "weigh [1.0]", "offload", "onload", "close"]


def test_no_call_is_forgotten():
    calls = {name for name, each in vars(Simulator).items() if callable(each) and not name.startswith("_")}
    for around in (Wrapper, Mixture):
        assert around.deferring is None, "each picture is used, so nobody asks to `look`"
        assert calls - vars(around).keys() == {"look"}, around


def test_frames_are_stacked_around_rewards_of_ones_own_around_mixed_tasks():
    """The whole chain: functions see single observations, and weights reach the mixture."""
    tasks = [{"name": "still"}, {"name": "windy", "options": {"wind": True}}]
    chain = FrameStack(Scored(3, simulator=Mixture, options={"simulator": Reach, "tasks": tasks}, scale=2.0), 2)
    chain.weigh([0.0, 1.0])
    chain.reset(torch.arange(3), torch.arange(3))
    assert chain.tasks() == ["windy"] * 3
    saved = chain.save()
    actions = torch.rand(3, 1), torch.ones(3, dtype=torch.bool)
    once = chain.step(*actions)
    chain.restore(saved, torch.arange(3))
    again = chain.step(*actions)
    assert torch.equal(once.reward, again.reward)
    assert torch.equal(once.observation["state"], again.observation["state"])
