"""A simulator that says, as its time limit, on which GPU it is; its process sees eight, none of which are real."""

from __future__ import annotations

import pytest
import torch

from rlinf.envs.toy import Reach
from rlinf.runtime.base import tensors
from tests.cards import pretend


class OnACard(Reach):
    """See the module."""

    def __init__(self, num_envs):
        told = tensors._index
        pretend(pytest.MonkeyPatch())
        tensors.choose_device(told)
        tensors.enter_device()
        super().__init__(num_envs, max_steps=torch.cuda.current_device())
