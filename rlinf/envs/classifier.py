"""A success classifier: from what is seen after a step, a picture or a state, to whether the task is solved.

    python -m rlinf.envs.classifier DIR OUT --look rgb

In: recorded episodes, in any format, of which some solved their task and ended then. Their last observations are what
success looks like; all others, and all of episodes that failed, are what it does not. A few hundred are enough where
success looks alike. Out: a directory, which simulators read by

    env: {reward: rlinf.envs.classifier.reward, success: rlinf.envs.classifier.success, end_solved: true,
          reward_args: {path: OUT}}

so that the reward is 1 for the step after which the classifier sees the task solved, and ends the episode (HIL-SERL,
arXiv:2410.21845). Frames of every class are drawn equally often, and a fifth of the episodes is held out and tells how
often it is right.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn import functional

from rlinf.data.demonstrations import Demonstration, read_demonstrations
from rlinf.envs.base import CannotSimulate, Observation

_WEIGHTS, _ABOUT = "classifier.safetensors", "classifier.json"
_WIDTH, _CHANNELS = 64, (16, 32, 32)
"""Sizes of the network: a few hundred frames teach no larger one."""
_HELD_OUT = 5
"""One episode in so many is not learned from."""
_CERTAIN = 0.9
"""Probability from which the task counts as solved: what is wrongly taken for success is learned as success."""
_LEAST_DEVIATION = 1e-3
"""Numbers of a state that differ less are divided by this."""


@dataclass(frozen=True, slots=True)
class Look:
    """The array that a classifier looks at."""

    name: str
    """Name of the array in the observation."""
    shape: tuple[int, ...]
    """Shape of one row: [S], or [H, W, channels] of a picture."""


class Classifier(nn.Module):
    """Log-odds that the task is solved, of each row.

    Args:
        look: what it looks at.
    """

    mean: Tensor
    """Of each number of a state, [S]; of pictures one number."""
    deviation: Tensor
    """As `mean`."""

    def __init__(self, look: Look):
        super().__init__()
        self.look = look
        pictures = len(look.shape) == 3
        size = look.shape if len(look.shape) == 1 else (1,)
        self.register_buffer("mean", torch.full(size, 127.5))
        self.register_buffer("deviation", torch.full(size, 127.5))
        layers: list[nn.Module] = []
        width = look.shape[-1]
        if pictures:
            height, breadth = look.shape[:2]
            for channels in _CHANNELS:
                layers += [nn.Conv2d(width, channels, 3, stride=2, padding=1), nn.ReLU()]
                width, height, breadth = channels, -(-height // 2), -(-breadth // 2)
            layers.append(nn.Flatten())
            width *= height * breadth
        layers += [nn.Linear(width, _WIDTH), nn.ReLU(), nn.Linear(_WIDTH, _WIDTH), nn.ReLU(), nn.Linear(_WIDTH, 1)]
        self.layers = nn.Sequential(*layers)

    def forward(self, observation: Mapping[str, Tensor]) -> Tensor:
        """Log-odds, float32 [N].

        Raises:
            ValueError: what it looks at is not there.
        """
        array = observation.get(self.look.name)
        if array is None or tuple(array.shape[1:]) != self.look.shape:
            there = {name: list(each.shape[1:]) for name, each in observation.items()}
            raise ValueError(f"the classifier looks at {self.look.name} {list(self.look.shape)}, and there is {there}")
        rows = (array.float() - self.mean) / self.deviation
        odds: Tensor = self.layers(rows.movedim(-1, 1) if rows.ndim == 4 else rows)
        return odds[:, 0]


def frames_of(demonstrations: Sequence[Demonstration], name: str) -> tuple[Tensor, Tensor]:
    """The frames of episodes, and which of them show success.

    Args:
        demonstrations: at least one.
        name: of the array that is looked at.

    Returns:
        [F, ...] and bool [F].

    Raises:
        ValueError: an episode has no such array.
    """
    rows, solved = [], []
    for demo in demonstrations:
        if name not in demo.observation:
            raise ValueError(f"the episodes show no {name!r}, but {sorted(demo.observation)}")
        rows.append(demo.observation[name])
        labels = torch.zeros(len(rows[-1]), dtype=torch.bool)
        labels[-1] = bool(demo.success) and demo.terminated
        solved.append(labels)
    return torch.cat(rows), torch.cat(solved)


def train(
    demonstrations: Sequence[Demonstration], name: str, *, steps: int = 400, batch: int = 64, seed: int = 0
) -> tuple[Classifier, dict[str, float]]:
    """A classifier of the frames of episodes.

    Args:
        demonstrations: of which some solved their task, and ended then.
        name: of the array that is looked at.
        steps: optimizer steps.
        batch: frames in each, half of them of success.
        seed: of weights and of what is drawn.

    Returns:
        The classifier, and how it did on the episodes that were held out: `frames` and `solved` of them, and the shares
        `missed` (of success) and `mistaken` (of the rest) at the probability of `success`.

    Raises:
        ValueError: no episode shows success, or none anything else.
    """
    lessons = [demo for number, demo in enumerate(demonstrations) if (number + 1) % _HELD_OUT]
    tried = [demo for number, demo in enumerate(demonstrations) if not (number + 1) % _HELD_OUT]
    frames, solved = frames_of(lessons, name)
    if not bool(solved.any()) or bool(solved.all()):
        raise ValueError(
            f"{int(solved.sum())} of {len(solved)} frames show success: record episodes that solve their task and end"
        )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = Classifier(Look(name, tuple(frames.shape[1:])))
    if frames.ndim == 2:
        model.mean, model.deviation = frames.mean(0), frames.std(0).clamp(min=_LEAST_DEVIATION)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=1e-2)
    generator, classes = torch.Generator().manual_seed(seed), [solved.nonzero()[:, 0], (~solved).nonzero()[:, 0]]
    for _ in range(steps):
        parts = [each[torch.randint(len(each), (batch // 2,), generator=generator)] for each in classes]
        rows = torch.cat(parts)
        loss = functional.binary_cross_entropy_with_logits(model({name: frames[rows]}), solved[rows].float())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return model.eval(), _measured(model, *frames_of(tried, name)) if tried else {}


def _measured(model: Classifier, frames: Tensor, solved: Tensor) -> dict[str, float]:
    with torch.no_grad():
        taken_for_success = torch.sigmoid(model({model.look.name: frames})) > _CERTAIN
    wrong = taken_for_success != solved
    counts = {"missed": solved, "mistaken": ~solved}
    shares = {name: float(wrong[rows].float().mean()) for name, rows in counts.items() if bool(rows.any())}
    return {"frames": float(len(solved)), "solved": float(solved.sum()), **shares}


def save(model: Classifier, directory: Path) -> None:
    """Write a classifier into a directory, which is made if it is not there."""
    directory.mkdir(parents=True, exist_ok=True)
    save_file({name: each.contiguous() for name, each in model.state_dict().items()}, directory / _WEIGHTS)
    (directory / _ABOUT).write_text(json.dumps(asdict(model.look)) + "\n", encoding="utf-8")


@cache
def load(path: str) -> Classifier:
    """A classifier that was saved; each process reads it once.

    Raises:
        CannotSimulate: there is none.
    """
    directory = Path(path).expanduser()
    if not (directory / _ABOUT).is_file():
        raise CannotSimulate(f"{path} holds no {_ABOUT}: train one with python -m rlinf.envs.classifier")
    about = json.loads((directory / _ABOUT).read_text(encoding="utf-8"))
    model = Classifier(Look(about["name"], tuple(about["shape"])))
    model.load_state_dict(load_file(directory / _WEIGHTS))
    return model.eval()


@torch.no_grad()
def success(observation: Observation, *, path: str, certain: float = _CERTAIN) -> Tensor:
    """Which environments have solved their task, bool [N], for `env.success`.

    Args:
        observation: after the step.
        path: directory of the classifier.
        certain: probability from which it is solved.
    """
    return torch.sigmoid(load(path)({name: array.cpu() for name, array in observation.items()})) > certain


def reward(observation: Observation, *, path: str, certain: float = _CERTAIN) -> Tensor:
    """1 where the task is solved and 0 elsewhere, float32 [N], for `env.reward`; see `success`."""
    return success(observation, path=path, certain=certain).float()


def main(arguments: Sequence[str] | None = None) -> None:
    """See `--help`."""
    parser = argparse.ArgumentParser(prog="python -m rlinf.envs.classifier", description="Trains a success classifier.")
    parser.add_argument("episodes", help="recorded episodes, of which some solved their task")
    parser.add_argument("directory", help="where the classifier goes")
    parser.add_argument("--look", default="rgb", help="what it looks at: rgb, state or another array; default: rgb")
    parser.add_argument("--steps", type=int, default=400, help="optimizer steps; default: 400")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(arguments)
    try:
        demonstrations = read_demonstrations(Path(options.episodes).expanduser(), solved=False)
        model, metrics = train(demonstrations, options.look, steps=options.steps, seed=options.seed)
    except (ValueError, OSError, ImportError) as error:  # what data sets and disks raise
        sys.exit(f"error: {error}")
    save(model, Path(options.directory).expanduser())
    words = ", ".join(f"{name} {number:.3g}" for name, number in metrics.items())
    sys.stdout.write(f"{options.directory}: a classifier of {options.look}; held out: {words or 'nothing'}\n")


if __name__ == "__main__":
    main()
