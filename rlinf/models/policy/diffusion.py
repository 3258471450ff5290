"""Diffusion Policy (arXiv:2303.04137) in LeRobot's directories and in its numbers: actions are noise, taken away.

It sees the last `n_obs_steps` observations at once, as `env.frame_stack` shows them, and denoises `horizon` actions,
of which the first stands beside the oldest observation; the chunk that is done begins at the newest. A step from
noise t to noise p, with a the share of the signal's variance, first predicts the actions, x0, cut to a range, and

    DDPM    mean  sqrt(a_p) (1 - r) / (1 - a_t) x0 + sqrt(r) (1 - a_p) / (1 - a_t) x        with r = a_t / a_p
            var   (1 - a_p) / (1 - a_t) (1 - r), at the last step 0                         (arXiv:2006.11239, eq. 7)
    DDIM    mean  sqrt(a_p) x0 + sqrt(1 - a_p - var) noise                                  (arXiv:2010.02502, eq. 12)
            var   that of DDPM where it draws; 0 where it begins at noise alone, as LeRobot evaluates

To learn by acting, as DPPO does (arXiv:2409.00588), every step draws from a normal distribution whose deviation is at
least `min_std`; the log-prob is the mean over the steps, and what is stored of a decision is the whole chain. Few steps
are best for it: `method: DDIM`, `steps: 5`. The value head reads the condition, without gradient.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn

from rlinf.algos.loss_sum import LossSum
from rlinf.models.policy import lerobot
from rlinf.models.policy.base import (
    Drawn,
    Evaluated,
    Generator,
    Observation,
    PolicyConfig,
    Stored,
    looked_at,
    normals,
    uniforms,
)
from rlinf.models.policy.diffusion_network import SIZES, DiffusionNetwork
from rlinf.models.policy.published import to_be_read
from rlinf.models.policy.resnet import BACKBONES
from rlinf.models.policy.robots import cameras, nearest_valid, resized
from rlinf.models.policy.vla.flow import density

Method = Literal["DDPM", "DDIM"]
_KINDS = {"VISUAL": "MEAN_STD", "STATE": "MIN_MAX", "ACTION": "MIN_MAX", "ENV": "MIN_MAX"}
"""LeRobot's kinds of normalisation for it, and that of the state for the world's, of which LeRobot says none."""
_NOISE: Mapping[str, Any] = {
    "noise_scheduler_type": "DDPM",
    "num_train_timesteps": 100,
    "num_inference_steps": None,
    "beta_schedule": "squaredcos_cap_v2",
    "beta_start": 0.0001,
    "beta_end": 0.02,
    "prediction_type": "epsilon",
    "clip_sample": True,
    "clip_sample_range": 1.0,
}
"""LeRobot's defaults."""
_CHOICES: Mapping[str, tuple[Any, ...]] = {
    "vision_backbone": tuple(BACKBONES),
    "use_group_norm": (True,),  # with others a row would depend on its batch
    "noise_scheduler_type": ("DDPM", "DDIM"),
    "beta_schedule": ("squaredcos_cap_v2", "linear"),
    "prediction_type": ("epsilon", "sample"),
}
"""Values of keys of config.json that there are here."""


def signal(about: Mapping[str, Any]) -> Tensor:
    """Share of the actions' variance in what is seen at each step of the noise, float32 [T].

        squaredcos_cap_v2   1 - b_t = f(t + 1) / f(t), at least 0.001, f(t) = cos((t / T + 0.008) / 1.008 pi / 2)^2
        linear              b from beta_start to beta_end

    Products are taken in float32, as diffusers has them.
    """
    count = about["num_train_timesteps"]
    if about["beta_schedule"] == "linear":
        betas = torch.linspace(about["beta_start"], about["beta_end"], count)
    else:
        shares = [math.cos((step / count + 0.008) / 1.008 * math.pi / 2.0) ** 2 for step in range(count + 1)]
        betas = torch.tensor([min(1.0 - after / before, 0.999) for before, after in pairwise(shares)])
    return (1.0 - betas).cumprod(0)


@dataclass(frozen=True, slots=True, kw_only=True)
class DiffusionConfig(lerobot.LeRobotConfig):
    """Configuration of `DiffusionPolicy`."""

    kind: ClassVar[str] = "diffusion"
    method: Method | None = None
    """Steps of DDPM or DDIM; null as the model says."""
    steps: int | None = None
    """Denoising steps; null as the model says."""
    min_std: float = 0.1
    """Least standard deviation of a step that draws, on the scale of normalised actions. With 0 DDPM draws as LeRobot
    evaluates, and the last step, which is certain then, counts in no log-prob."""

    def __post_init__(self) -> None:
        PolicyConfig.__post_init__(self)  # super() does not work in a dataclass with slots
        sizes, about = self.sizes, self.about
        for key, choices in _CHOICES.items():
            if about.get(key, choices[0]) not in choices:
                values = ", ".join(map(repr, choices))
                raise ValueError(f"policy diffusion: model.{key}={about[key]!r} must be one of {values}")
        self.check_directory()
        if lerobot.STATE not in about["input_features"]:
            raise ValueError("policy diffusion: model.input_features must have observation.state, which it looks at")
        frames, horizon, shorter = sizes["n_obs_steps"], sizes["horizon"], 2 ** len(sizes["down_dims"])
        if horizon % shorter:
            raise ValueError(
                f"policy diffusion: model.horizon={horizon} must be a multiple of {shorter}, see down_dims"
            )
        if self.chunk > horizon - frames + 1:
            raise ValueError(
                f"policy diffusion: chunk={self.chunk} is more than the {horizon - frames + 1} actions that are "
                f"predicted from the newest observation on (model.horizon={horizon}, n_obs_steps={frames})"
            )
        most = about["num_train_timesteps"]
        if not 1 <= self.denoising <= most:
            raise ValueError(f"policy diffusion: steps={self.denoising} must be from 1 to num_train_timesteps={most}")
        if self.min_std < 0.0:
            raise ValueError(f"policy diffusion: min_std={self.min_std} must be at least 0")

    @property
    def sizes(self) -> dict[str, Any]:
        """Sizes of the network; a crop's follow from `crop_ratio` where pictures are resized."""
        sizes = {name: self.model.get(name, value) for name, value in SIZES.items()}
        if (whole := sizes["resize_shape"]) is not None:
            ratio = self.model.get("crop_ratio", 1.0)
            sizes["crop_shape"] = [int(length * ratio) for length in whole] if ratio < 1.0 else None
        return sizes

    @property
    def about(self) -> dict[str, Any]:
        """The whole config.json, as lerobot reads it."""
        frames = self.sizes["n_obs_steps"]
        robot = None if self.image is not None else 0  # without pictures it must see the world
        features = lerobot.features(self.image, self.state_size, self.action_size, frames, robot)
        kinds = {name: each for name, each in _KINDS.items() if self.image is None or name != "ENV"}
        rest = {"n_action_steps": self.chunk, "pretrained_backbone_weights": None, "normalization_mapping": kinds}
        return {"type": "diffusion", **features, **rest, **self.sizes, **_NOISE, **self.model}

    @property
    def denoising(self) -> int:
        """Denoising steps."""
        about = self.about
        count: int = self.steps or about["num_inference_steps"] or about["num_train_timesteps"]
        return count


class DiffusionPolicy(lerobot.LeRobotPolicy):
    """Looks at "rgb", uint8 [N, H, W, 3 k K], and "state", float32 [N, K S], of the last K observations, the oldest
    first."""

    Config: ClassVar[type[PolicyConfig]] = DiffusionConfig

    def __init__(self, config: DiffusionConfig):
        super().__init__(config)
        about, sizes = config.about, config.sizes
        self._frames, self.horizon = sizes["n_obs_steps"], sizes["horizon"]
        self._cameras = lerobot.cameras_of(about)
        _, *side = about["input_features"][self._cameras[0]]["shape"] if self._cameras else (3, 0, 0)
        self._side = (side[0], side[1])
        with to_be_read():
            self.diffusion = DiffusionNetwork(
                sizes,
                cameras=len(self._cameras),
                side=self._side,
                state=sum(lerobot.states_of(about)),
                numbers=config.action_size,
            )
        self.surround(self.diffusion.condition)
        self._noise, self._signal = about, signal(about)
        self._method = config.method or about["noise_scheduler_type"]
        apart = about["num_train_timesteps"] // config.denoising
        self._times = [(number * apart, (number - 1) * apart) for number in reversed(range(config.denoising))]

    def blocks(self) -> Sequence[nn.Module]:
        """Blocks of the U-Net."""
        return self.diffusion.blocks()

    # What goes in -----------------------------------------------------------------------------------------------------

    @property
    def lesson(self) -> tuple[int, int]:
        """See `Policy.lesson`: the whole horizon, from the oldest observation on."""
        return self._frames - 1, self.horizon

    @property
    def randomness(self) -> int:
        """The start, and what every step draws."""
        return self.starts * (1 + len(self._times))

    @property
    def starts(self) -> int:
        """Numbers of the noise that a chain begins with."""
        return int(self.horizon * self.config.action_size)

    def inputs(self, observation: Observation, instructions: Sequence[str] | None = None) -> Stored:
        """Pictures at the checkpoint's size, and the states as they came."""
        config, frames = self.config, self._frames
        stored = {"state": looked_at(observation, "state", (config.state_size,), "policy diffusion").float()}
        if self._cameras:
            pictures = cameras(looked_at(observation, "rgb", config.image, "policy diffusion"))
            pictures = pictures.unflatten(1, (frames, -1))[:, :, : len(self._cameras)]
            stored["rgb"] = resized(pictures, self._side, "bilinear").contiguous()
        return stored

    # What comes out ---------------------------------------------------------------------------------------------------

    def draw(self, inputs: Stored, noise: Tensor | None) -> Drawn:
        """See `Policy.draw`. The likeliest chain starts from 0 and draws 0 in every step; from a random start DDIM does
        what LeRobot's does."""
        condition = self._condition(inputs)
        shape = (len(condition), -1, self.horizon, self.config.action_size)
        draws = noise is not None and noise.shape[1] > self.starts
        if noise is None:
            numbers = torch.zeros(len(condition), self.starts, device=condition.device).view(shape)
        else:
            numbers = normals(noise).view(shape)
        chain, scores = [numbers[:, 0]], []
        for number in range(len(self._times)):
            step = torch.full((len(condition),), number, device=condition.device)
            mean, std = self._step(chain[-1], step, condition, draws=draws)
            chain.append(mean + std * numbers[:, number + 1] if draws else mean)
            scores.append(_likely(chain[-1], mean, std)[0])
        actions = self.robot.to_simulator(self._done(chain[-1]))
        logprobs = self._done(torch.stack(scores, 1).sum(1)) / self._counted
        return Drawn(actions, torch.stack(chain, 1), logprobs, self.values(condition))

    def score(self, stored: Stored) -> Evaluated:
        """See `Policy.score`; all steps at once.

        Raises:
            ValueError: the rows are demonstrations, which no chain led to.
        """
        chain = stored["actions"]
        if chain.ndim != 4:
            raise ValueError("policy diffusion: demonstrated actions have no log-probs; `imitate` learns from them")
        condition, count = self._condition(stored), len(self._times)
        steps = torch.arange(count, device=chain.device).repeat(len(chain))
        where = condition.repeat_interleave(count, 0)
        mean, std = self._step(chain[:, :-1].flatten(0, 1), steps, where, draws=True)
        logprobs, entropy = (
            self._done(each.unflatten(0, (-1, count)).sum(1)) / self._counted
            for each in _likely(chain[:, 1:].flatten(0, 1), mean, std)
        )
        return Evaluated(logprobs, entropy, self.values(condition))

    def imitate(self, stored: Stored, mask: Tensor | None = None, generator: Generator = None) -> LossSum:
        """The authors' loss: the mean of (e - e')^2 of the noise at a random step, or of the actions.

        As LeRobot has it, actions beyond an episode's ends are copies of the nearest, and count, unless
        `do_mask_loss_for_padding` says that they are no error.

        Args:
            stored: of `demonstrated`.
            mask: which actions were done, bool [N, H]; None for all.
            generator: of noise, steps and crops, as for `act`.
        """
        actions, about = stored["actions"], self._noise
        rows = len(actions)
        real = torch.ones(actions.shape[:2], dtype=torch.bool, device=actions.device) if mask is None else mask.bool()
        actions = actions.gather(1, nearest_valid(real)[..., None].expand_as(actions))
        random = uniforms(generator, rows, self.starts + 3, actions.device)
        noise = normals(random[:, : self.starts]).view(actions.shape)
        steps = (random[:, self.starts] * about["num_train_timesteps"]).long()
        share = self._signal.to(actions.device)[steps][:, None, None]
        places = random[:, self.starts + 1 :] if self.config.sizes["crop_is_random"] else None
        noisy = share.sqrt() * actions + (1.0 - share).sqrt() * noise
        output = self.diffusion.unet(noisy, steps, self._condition(stored, places))
        error = (output - (noise if about["prediction_type"] == "epsilon" else actions)).square()
        if about.get("do_mask_loss_for_padding"):
            error = error * real[..., None]
        counts = real.any(1).to(error.dtype)
        total = (error.flatten(1).sum(1) * counts).sum()
        return LossSum(total, error[0].numel() * counts.double().sum())

    def _step(self, x: Tensor, step: Tensor, condition: Tensor, *, draws: bool) -> tuple[Tensor, Tensor]:
        """Mean [M, H, A] and standard deviation [M, 1, 1] of where a step of each row goes to.

        Args:
            x: before it, [M, H, A].
            step: its number from the first one on, int64 [M].
            condition: [M, numbers].
            draws: otherwise deviations are 0.
        """
        about = self._noise
        times = torch.tensor(self._times, device=x.device)[step]
        now, after = times[:, 0], times[:, 1]
        shares = self._signal.to(x.device).double()
        a = shares[now][:, None, None]
        b = torch.where(after >= 0, shares[after.clamp(min=0)], 1.0)[:, None, None]
        output, x = self.diffusion.unet(x, now, condition).double(), x.double()
        noisy = about["prediction_type"] == "epsilon"
        clean = (x - (1 - a).sqrt() * output) / a.sqrt() if noisy else output
        noise = output if noisy else (x - a.sqrt() * clean) / (1 - a).sqrt()
        if about["clip_sample"]:
            clean = clean.clamp(-about["clip_sample_range"], about["clip_sample_range"])
        variance = (1 - b) / (1 - a) * (1 - a / b) * (now > 0)[:, None, None]
        if self._method == "DDPM":
            mean = b.sqrt() * (1 - a / b) / (1 - a) * clean + (a / b).sqrt() * (1 - b) / (1 - a) * x
        else:
            variance = variance if draws else torch.zeros_like(variance)
            mean = b.sqrt() * clean + (1 - b - variance).clamp(min=0.0).sqrt() * noise
        std = variance.sqrt().clamp(min=self.config.min_std) if draws else torch.zeros_like(variance)
        return mean.float(), std.float()

    @property
    def _counted(self) -> int:
        """Steps that count in log-probs."""
        return max(1, len(self._times) - (self.config.min_std == 0.0))

    def features(self, inputs: Stored) -> Tensor:
        """The condition that the network denoises by, which the value head reads, too."""
        return self._condition(inputs)

    def _condition(self, inputs: Stored, places: Tensor | None = None) -> Tensor:
        """The condition, [N, numbers]; of pictures cropped at `places`."""
        own, world = self.around.states(inputs["state"].unflatten(1, (self._frames, -1)))
        pictures = self.around.pictures(inputs["rgb"]) if "rgb" in inputs else None
        return self.diffusion.seen(own, world, pictures, places)

    def _done(self, x: Tensor) -> Tensor:
        """The chunk that is done, [N, C, A] of [N, H, A]."""
        return x[:, self._frames - 1 :][:, : self.config.chunk].float()


def _likely(x: Tensor, mean: Tensor, std: Tensor) -> tuple[Tensor, Tensor]:
    """Log-probs and entropy, [M, H, A]; 0 of steps that are certain."""
    certain = std == 0.0
    logprobs, entropy = (each.masked_fill(certain, 0.0) for each in density(x, mean, std))
    return logprobs, entropy
