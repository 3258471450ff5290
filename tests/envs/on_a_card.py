"""A simulator that says, as its time limit, on which GPU it is; its process sees eight, none of which are real."""

from __future__ import annotations

import pytest
import torch

from rlinf.envs.toy import Reach
from rlinf.runtime.gpu import own_device
from tests.cards import pretend


class OnACard(Reach):
    """See the module."""

    def __init__(self, num_envs):
        told = own_device._index
        pretend(pytest.MonkeyPatch())
        own_device.choose_device(told)
        own_device.enter_device()
        super().__init__(num_envs, max_steps=torch.cuda.current_device())
