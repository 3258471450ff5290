"""LeRobot's directories, beside the weights: what normalises numbers around a policy, read and written back.

    config.json                     type, features, normalization_mapping: how each kind of feature is normalised
    policy_preprocessor.json        the steps before the policy, each with the file of its numbers
    policy_postprocessor.json       the steps behind it
    policy_preprocessor_step_3_normalizer_processor.safetensors     `observation.state.mean` and so on

`LeRobotPolicy` is what the policies share that live in such a directory as a whole: all but their network.

Numbers of features are mappings of lists: `{"observation.state": {"mean": [...], "std": [...]}, "action": {...}}`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import torch
from safetensors.torch import load, load_file, save
from torch import Tensor, nn

from rlinf.data.demonstrations.statistics import FeatureStatistics
from rlinf.data.safetensors_io import write_text
from rlinf.models.policy.actor_critic import perceptron
from rlinf.models.policy.base import Observation, Policy, PolicyConfig, Stored
from rlinf.models.policy.robots import Embodiment, RobotActions, Scale, Scaling

PROCESSORS = ("policy_preprocessor", "policy_postprocessor")
"""Beginnings of the names of the files in which lerobot keeps what happens around a policy, statistics included."""
FILES = tuple(f"{name}*" for name in PROCESSORS)
"""Patterns of these files."""
LEROBOT = "lerobot"
"""Name of the statistics that stand there."""
STATE, WORLD, ACTION, PICTURES = "observation.state", "observation.environment_state", "action", "observation.image"
"""Names of features: of the robot's state, the world's, actions, and how those of pictures begin."""
SCALES: Mapping[str, Scale] = {"QUANTILES": "q01_q99", "MEAN_STD": "mean_std", "MIN_MAX": "min_max"}
"""Our names of lerobot's kinds of normalisation; others are none of ours, but for IDENTITY, which is none at all."""
_IMAGENET = {"mean": [0.485, 0.456, 0.406], "std": [0.229, 0.224, 0.225]}
"""Of pictures in 0..1: what lerobot puts in place of a data set's own."""
EPSILON = 1e-8
"""Lerobot's addition to deviations."""
STATISTICS = ("mean", "std", "min", "max", "q01", "q99")
"""Statistics of a feature that kinds of normalisation need."""


def said_in(directory: Path) -> dict[str, Any]:
    """A directory's config.json.

    Raises:
        ValueError: it is damaged.
    """
    path = directory / "config.json"
    try:
        about = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is damaged: {error}") from error
    if not isinstance(about, dict):
        raise ValueError(f"{path} must be an object of JSON")
    return about


def opened(directory: Path, kind: str) -> dict[str, Any]:
    """Settings of the policy in a directory: those of `settings_of`, `statistics`, and `pictures`, those of cameras.

    Args:
        directory: of lerobot.
        kind: the `type` that its config.json must have.

    Raises:
        ValueError: it is of another policy, lacks something, or has no statistics of actions.
    """
    about = said_in(directory)
    if about.get("type") != kind:
        raise ValueError(f"{directory / 'config.json'} is of a {about.get('type')}, not of a {kind}")
    settings, rows = settings_of(about, directory), statistics_of(about, directory)
    cameras = {name for name, each in about["input_features"].items() if each["type"] == "VISUAL"}
    settings["pictures"] = {name: row for name, row in rows.items() if name in cameras and row}
    return settings | {"statistics": {name: row for name, row in rows.items() if name not in settings["pictures"]}}


def settings_of(about: Mapping[str, Any], directory: Path) -> dict[str, Any]:
    """Keys of policies' configurations that a config.json says: `model`, itself, `chunk`, and sizes of features, as
    `env.frame_stack` shows several observations at once.

    Args:
        about: config.json.
        directory: that it lies in, for errors.

    Raises:
        ValueError: it lacks something.
    """
    try:
        inputs, outputs = about["input_features"], about["output_features"]
        pictures = [each["shape"] for each in inputs.values() if each["type"] == "VISUAL"]
        states = [inputs[name]["shape"][0] for name in (STATE, WORLD) if name in inputs]
        frames = about.get("n_obs_steps", 1)
        settings: dict[str, Any] = {
            "model": about,
            "chunk": about["n_action_steps"],
            "state_size": frames * sum(states),
        }
        settings["action_size"] = outputs[ACTION]["shape"][0]
        if pictures:
            settings["image"] = (*pictures[0][1:3], 3 * frames * len(pictures))
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{directory / 'config.json'} lacks {error}: it is no policy of lerobot's") from error
    return settings


def statistics_of(about: Mapping[str, Any], directory: Path) -> dict[str, dict[str, Any]]:
    """Statistics by which a directory's policy normalises, by feature; those of features without any are empty.

    Raises:
        ValueError: there are none of actions, which need some.
    """
    numbers = numbers_in(directory)
    if ACTION not in numbers and about.get("normalization_mapping", {}).get("ACTION") != "IDENTITY":
        raise ValueError(
            f"{directory} has no {PROCESSORS[0]}.json with numbers of actions, without which they have no scale: a "
            "checkpoint of lerobot before 0.4 is brought up to date by its migrate_policy_normalization"
        )
    features = (*about["input_features"], ACTION)
    return {name: {key: row for key, row in numbers.get(name, {}).items() if key in STATISTICS} for name in features}


def counted(statistics: Mapping[str, FeatureStatistics]) -> dict[str, dict[str, list[float]]]:
    """Statistics of data as keys of configurations have them: rounded to float32, as files have them."""
    return {
        part: {name: getattr(each, name).float().tolist() for name in STATISTICS} for part, each in statistics.items()
    }


def by_feature(statistics: Mapping[str, Any], robot: int, world: int) -> dict[str, dict[str, Any]]:
    """Statistics of `state` and `actions`, or by feature, by feature; those of features without any are left out.

    Args:
        statistics: of a configuration; of several observations in one state the last counts.
        robot, world: numbers of the state that are the robot's, and those behind them.
    """
    rows = dict(statistics)
    if (state := rows.pop("state", None)) is not None:
        state = {name: row[-(robot + world) :] for name, row in state.items()}
        if robot:
            rows[STATE] = {name: row[:robot] for name, row in state.items()}
        if world:
            rows[WORLD] = {name: row[robot:] for name, row in state.items()}
    if "actions" in rows:
        rows[ACTION] = rows.pop("actions")
    return {name: row for name, row in rows.items() if row}


def scaling(kinds: Mapping[str, str], kind: str, numbers: Mapping[str, Any] | None, size: int) -> Scaling:
    """Between the robot's units and the model's scale.

    Args:
        kinds: config.json's `normalization_mapping`.
        kind: of the feature, such as STATE.
        numbers: its statistics; None: it is used as it is.
        size: its numbers.
    """
    how = kinds.get(kind, "IDENTITY")
    if how == "IDENTITY" or numbers is None:
        return Scaling(torch.zeros(size, dtype=torch.float64), torch.ones(size, dtype=torch.float64))
    return Scaling.of(numbers, SCALES[how], EPSILON)


def check_kinds(about: Mapping[str, Any], policy: str) -> None:
    """See that all kinds of normalisation are among those that there are here.

    Raises:
        ValueError: one is not.
    """
    if odd := [kind for kind in about["normalization_mapping"].values() if kind not in (*SCALES, "IDENTITY")]:
        raise ValueError(
            f"policy {policy}: model.normalization_mapping says {odd[0]}: numbers are normalised by one of "
            f"{', '.join(SCALES)}, or by IDENTITY not at all"
        )


def features(
    image: tuple[int, int, int] | None, state: int, actions: int, frames: int = 1, robot: int | None = None
) -> dict[str, Any]:
    """`input_features` and `output_features` of a config.json for what an environment shows and takes.

    Args:
        image: of the observation's "rgb"; None without pictures.
        state: numbers of its "state"; 0 for none.
        actions: numbers of an action.
        frames: observations that are seen at once.
        robot: numbers of one state that are the robot's, before the world's; None: all where there are pictures,
            otherwise none, since a policy that sees nothing of the world is not taken by lerobot.
    """
    inputs: dict[str, Any] = {}
    if image is not None:
        for number in range(image[2] // 3 // frames):
            inputs[f"{PICTURES}s.camera{number + 1}"] = {"type": "VISUAL", "shape": [3, *image[:2]]}
    numbers = state // frames
    own = (numbers if inputs else 0) if robot is None else robot
    if own or robot is not None:
        inputs[STATE] = {"type": "STATE", "shape": [own]}
    if numbers > own:
        inputs[WORLD] = {"type": "ENV", "shape": [numbers - own]}
    return {"input_features": inputs, "output_features": {ACTION: {"type": "ACTION", "shape": [actions]}}}


def fitting(
    about: Mapping[str, Any], image: tuple[int, int, int], state: int, actions: int
) -> dict[str, dict[str, Any]]:
    """`input_features` and `output_features` of a config.json for an environment, whatever robot it was of: its first
    cameras, as many as both have, stand for those that the environment shows.

    Args:
        about: config.json; without features, cameras are numbered.
        image, state, actions: see `features`; there is nothing of the world.
    """
    had, fresh = about.get("input_features", {}), features(image, state, actions)
    names = [name for name, each in had.items() if each["type"] == "VISUAL" and ".empty_camera" not in name]
    both = {**fresh["input_features"], **had}
    inputs = {name: both[name] for name in (names or cameras_of(fresh))[: image[2] // 3]}
    if state:
        inputs[STATE] = fresh["input_features"][STATE]
    ordered = {name: inputs[name] for name in had if name in inputs}
    return {"input_features": ordered | inputs, "output_features": fresh["output_features"]}


def cameras_of(about: Mapping[str, Any]) -> tuple[str, ...]:
    """Names of the cameras that a config.json looks at."""
    return tuple(name for name, each in about["input_features"].items() if each["type"] == "VISUAL")


def states_of(about: Mapping[str, Any]) -> tuple[int, int]:
    """Numbers of the robot's state and of the world's in one observation."""
    inputs = about["input_features"]
    robot, world = (inputs.get(name, {"shape": [0]})["shape"][0] for name in (STATE, WORLD))
    return robot, world


def check_fit(about: Mapping[str, Any], policy: str, config: Any) -> None:
    """See that a checkpoint looks at what the environment shows, and does what it takes.

    Args:
        about: config.json.
        policy: its type, for errors.
        config: has `image`, `state_size` and `action_size`.

    Raises:
        ValueError: it does not.
    """
    names, (robot, world), frames = cameras_of(about), states_of(about), about.get("n_obs_steps", 1)
    numbers = about["output_features"][ACTION]["shape"][0]
    if numbers != config.action_size:
        raise ValueError(
            f"policy {policy}: the checkpoint's actions have {numbers} numbers, and action_size={config.action_size}: "
            "of another robot?"
        )
    if not names and not world:
        raise ValueError(f"policy {policy}: it looks at nothing: the environment shows neither pictures nor a state")
    at_once = "" if frames == 1 else f" in {frames} observations at once, which env.frame_stack={frames} shows"
    count = 0 if config.image is None else config.image[2] // 3
    if count % frames or len(names) * frames > count:
        raise ValueError(
            f"policy {policy}: it looks at {len(names)} cameras, {', '.join(names)}{at_once}, and the environment "
            f"shows {count}: set policy.settings.image"
        )
    if (robot + world) * frames != config.state_size:
        raise ValueError(
            f"policy {policy}: the checkpoint looks at {robot} numbers of the robot's state and {world} of the world's"
            f"{at_once}, and the environment's state has {config.state_size}: of another robot?"
        )


def numbers_in(directory: Path) -> dict[str, dict[str, list[float]]]:
    """The numbers of the steps that normalise, by feature; none where there are no such files.

    Raises:
        ValueError: a file is damaged.
    """
    rows: dict[str, Tensor] = {}
    for begin in PROCESSORS:
        path = directory / f"{begin}.json"
        try:
            steps = json.loads(path.read_text(encoding="utf-8"))["steps"] if path.is_file() else []
            for file in (Path(str(step["state_file"])) for step in steps if "state_file" in step):
                if file.is_absolute() or ".." in file.parts:
                    raise ValueError(f"state_file={str(file)!r} lies outside of the directory")
                rows |= load_file(directory / file)
        except Exception as error:  # a file that may hold anything
            raise ValueError(f"{path} or a file that it names is damaged: {error}") from error
    numbers: dict[str, dict[str, list[float]]] = {}
    for name, row in rows.items():
        feature, _, statistic = name.rpartition(".")
        numbers.setdefault(feature, {})[statistic] = row.flatten().tolist()
    return numbers


def statistics_of_processors(directory: Path) -> dict[str, Any]:
    """Statistics of the state and of actions, as those of the asset `lerobot`; none without any of actions."""
    numbers = numbers_in(directory)
    parts = {name: numbers[feature] for name, feature in (("state", STATE), ("actions", ACTION)) if feature in numbers}
    return {LEROBOT: parts} if "actions" in parts else {}


def with_numbers(files: Mapping[str, bytes], numbers: Mapping[str, Mapping[str, Any]]) -> dict[str, bytes]:
    """Files of processors that change where features are to be normalised by other numbers.

    Args:
        files: contents of all files by name.
        numbers: by feature; what the files have of other features stays.
    """
    changed: dict[str, bytes] = {}
    for begin in PROCESSORS:
        steps = json.loads(files.get(f"{begin}.json", b'{"steps": []}'))["steps"]
        for file in (str(step["state_file"]) for step in steps if step.get("state_file") in files):
            before = load(files[file])
            after = dict(before)
            for feature, row in numbers.items():
                wanted = {f"{feature}.{name}": torch.tensor(each) for name, each in row.items()}
                had = {name: each for name, each in before.items() if name.rpartition(".")[0] == feature}
                same = wanted.keys() <= had.keys() and all(torch.equal(had[name], wanted[name]) for name in wanted)
                if had and not same:
                    after = {name: each for name, each in after.items() if name not in had} | wanted
            if after.keys() != before.keys() or any(after[name] is not before[name] for name in before):
                changed[file] = save(after)
    return changed


def processors(about: Mapping[str, Any], numbers: Mapping[str, Mapping[str, Tensor]]) -> dict[str, bytes]:
    """Files of processors that rename nothing and normalise by some numbers.

    Args:
        about: config.json, with features and `normalization_mapping`.
        numbers: by feature, in the shape in which they normalise it.
    """
    kinds, outputs = about["normalization_mapping"], about["output_features"]
    device = {"registry_name": "device_processor", "config": {"device": "cpu", "float_dtype": None}}
    rows = {f"{feature}.{name}": each for feature, row in numbers.items() for name, each in row.items()}
    files: dict[str, bytes] = {}

    def write(begin: str, features: Mapping[str, Any], kind: str, steps: list[dict[str, Any]], place: int) -> None:
        file = f"{begin}_step_{place}_{kind}_processor.safetensors"
        config = {"eps": EPSILON, "features": features, "norm_map": kinds}
        steps.insert(place, {"registry_name": f"{kind}_processor", "config": config, "state_file": file})
        files[f"{begin}.json"] = (json.dumps({"name": begin, "steps": steps}, indent=2) + "\n").encode()
        files[file] = save({name: each.float().contiguous() for name, each in rows.items()})

    before = [
        {"registry_name": "rename_observations_processor", "config": {"rename_map": {}}},
        {"registry_name": "to_batch_processor", "config": {}},
        device,
    ]
    write(PROCESSORS[0], {**about["input_features"], **outputs}, "normalizer", before, 3)
    write(PROCESSORS[1], outputs, "unnormalizer", [device], 0)
    return files


def robot_actions(config: Any, scaling: Scaling | None) -> RobotActions:
    """Between a policy's numbers and a simulator's actions, by the gripper and the bounds of its configuration."""
    row = Embodiment(prompt="", prompt_length=0, gripper=config.gripper, action_size=config.action_size)
    return RobotActions(row, scaling, config.action_low, config.action_high)


class Processors:
    """Steps around a policy in a directory: scales of what it sees and does, and the files that keep them.

    Args:
        about: config.json.
        statistics: see `by_feature`; empty: numbers are used as they are, and actions are in [-1, 1].
        pictures: mean and deviation of the pictures of each camera; None for ImageNet's.
    """

    def __init__(
        self, about: Mapping[str, Any], statistics: Mapping[str, Any], pictures: Mapping[str, Mapping[str, Any]] | None
    ):
        cameras, (robot, world) = cameras_of(about), states_of(about)
        self._about, self._robot = about, robot
        self._numbers = by_feature(statistics, robot, world)
        self._of_pictures = dict.fromkeys(cameras, _IMAGENET) if pictures is None else pictures
        sizes = {"STATE": (STATE, robot), "ENV": (WORLD, world), "ACTION": (ACTION, _size_of_actions(about))}
        kinds = about["normalization_mapping"]
        self._scales = {
            kind: scaling(kinds, kind, self._numbers.get(name), size) if statistics else None
            for kind, (name, size) in sizes.items()
        }
        self._pictures = self._scaling_of_pictures(cameras)

    @property
    def actions(self) -> Scaling | None:
        """Between the robot's units and the model's scale; None for a policy that knows of no units."""
        return self._scales["ACTION"]

    def states(self, state: Tensor) -> tuple[Tensor, Tensor]:
        """The robot's numbers and the world's on the model's scale, [..., R] and [..., W], of a state [..., R + W]."""
        parts = state[..., : self._robot], state[..., self._robot :]
        scales = self._scales["STATE"], self._scales["ENV"]
        own, world = (
            part if scale is None or not part.shape[-1] else scale.normalised(part)
            for part, scale in zip(parts, scales, strict=True)
        )
        return own, world

    def pictures(self, rgb: Tensor) -> Tensor:
        """Pictures on the model's scale, float32 [..., k, 3, h, w] of uint8."""
        centre, half = (each.float().to(rgb.device) for each in self._pictures)
        return (rgb.float() / 255.0 - centre) / half

    def write(self, directory: Path, files: Mapping[str, bytes]) -> None:
        """Write config.json and processors, as far as the files that have been written are others.

        Args:
            directory: there already, with these files.
            files: by name, as the policy's directory had them.
        """
        if json.loads(files.get("config.json", b"{}")) != self._about:
            write_text(directory / "config.json", json.dumps(self._about, indent=2) + "\n")
        if f"{PROCESSORS[0]}.json" in files:
            written = with_numbers(files, self._numbers)
        else:
            colours = {
                name: {key: torch.tensor(row).view(3, 1, 1) for key, row in each.items()}
                for name, each in self._of_pictures.items()
            }
            flat = {name: {key: torch.tensor(row) for key, row in each.items()} for name, each in self._numbers.items()}
            written = processors(self._about, colours | flat)
        for name, content in written.items():
            (directory / name).write_bytes(content)

    def _scaling_of_pictures(self, cameras: Sequence[str]) -> tuple[Tensor, Tensor]:
        """Centre and half of the pictures of each camera, in 0..1, [k, 3, 1, 1]; 0 and 1 where nothing normalises."""
        kind = self._about["normalization_mapping"].get("VISUAL", "IDENTITY")
        centre, half = torch.zeros(len(cameras), 3, 1, 1), torch.ones(len(cameras), 3, 1, 1)
        for number, name in enumerate(cameras):
            if kind != "IDENTITY" and (statistics := self._of_pictures.get(name)):
                scale = Scaling.of(statistics, SCALES[kind], EPSILON)
                centre[number, :, 0, 0], half[number, :, 0, 0] = scale.centre, scale.half
        return centre, half


def _size_of_actions(about: Mapping[str, Any]) -> int:
    size: int = about["output_features"][ACTION]["shape"][0]
    return size


@dataclass(frozen=True, slots=True, kw_only=True)
class LeRobotConfig(PolicyConfig):
    """Configuration of a policy in a directory, which says all but the simulator's bounds."""

    kind: ClassVar[str]
    """The `type` that a config.json says."""
    image: tuple[int, int, int] | None = None
    """Height, width and channels of the observation's "rgb": 3 for each camera in each of the observations that are
    seen at once; null without pictures."""
    state_size: int = 0
    """Numbers of the observation's "state", of all observations that are seen at once; 0 does not look at it."""
    model: Mapping[str, Any] = field(default_factory=dict)
    """LeRobot's config.json, or some of its keys, such as `chunk_size` or `horizon`; others are as LeRobot's."""
    statistics: Mapping[str, Any] = field(default_factory=dict)
    """Statistics of `state` and `actions`, or by the names of LeRobot's features; empty: numbers are used as they are,
    and actions are in [-1, 1]."""
    pictures: Mapping[str, Any] | None = None
    """Mean and deviation of the pictures of each camera, by its name; null for ImageNet's, as LeRobot trains."""
    gripper: str = "same"
    """Convention of the gripper."""
    critic_hidden: tuple[int, ...] = (256,)
    """Widths of the value head's hidden layers."""
    action_low: tuple[float, ...] = ()
    """Least value of each number of an action in the simulator; without, -1."""
    action_high: tuple[float, ...] = ()
    """Greatest values; without, 1."""

    @property
    def about(self) -> dict[str, Any]:
        """The whole config.json, as lerobot reads it."""
        raise NotImplementedError

    def check_directory(self) -> None:
        """See that numbers can be normalised as config.json says, and that it is for this environment.

        Raises:
            ValueError: one is not so.
        """
        check_kinds(self.about, self.kind)
        check_fit(self.about, self.kind, self)


class LeRobotPolicy(Policy):
    """All of a policy in a directory but its network, of whose features a head of its own reads values."""

    published = ("config.json", "*.safetensors")
    small_files: ClassVar[tuple[str, ...]] = ("config.json", *FILES, "train_config.json")
    critic: nn.Module | None

    def surround(self, features: int) -> None:
        """Make what lies around the network: the value head, and the scales of what it sees and does.

        Args:
            features: numbers that the value head reads.
        """
        config = self.config
        self.critic = None
        if config.value_level is not None:
            outputs = config.chunk if config.value_level == "action" else 1
            self.critic = perceptron(features, config.critic_hidden, outputs, gain=0.0, activation=nn.ReLU)
        self.around = Processors(config.about, config.statistics, config.pictures)
        self.robot = self.actions_of(config, self.around.actions)

    @classmethod
    def published_settings(cls, directory: Path) -> dict[str, Any]:
        """See `Policy.published_settings`.

        Raises:
            ValueError: it is of another policy, or has no statistics.
        """
        kind: Any = cls.Config
        return opened(directory, kind.kind)

    @classmethod
    def with_statistics(cls, name: str, statistics: Mapping[str, FeatureStatistics], episodes: int) -> dict[str, Any]:
        """See `Policy.with_statistics`; lerobot's files have no place for the name, and are float32."""
        return {"statistics": counted(statistics)}

    @classmethod
    def actions_of(cls, config: LeRobotConfig, scaling: Scaling | None) -> RobotActions:
        """See `Policy.actions_of`."""
        return robot_actions(config, scaling)

    def write_published(self, directory: Path, state: Mapping[str, Tensor]) -> None:
        """See `Policy.write_published`; processors with the statistics that it acts by."""
        super().write_published(directory, state)
        self.around.write(directory, self.files)

    def encode(self, actions: Tensor, inputs: Stored) -> Tensor:
        """Normalised numbers, [N, L, A]."""
        return self.robot.to_model(actions)

    def features(self, inputs: Stored) -> Tensor:
        """Features that the value head reads, [N, numbers]."""
        raise NotImplementedError

    def values(self, features: Tensor) -> Tensor | None:
        """Values [N] or [N, C] of what the head reads, which gets no gradient; None without a head."""
        if self.critic is None:
            return None
        values: Tensor = self.critic(features.detach().float())
        return values if self.config.value_level == "action" else values[:, 0]

    @torch.no_grad()
    def value(self, observation: Observation, instructions: Sequence[str] | None = None) -> Tensor:
        """See `Policy.value`."""
        values = self.values(self.features(self.inputs(observation)))
        if values is None:
            raise ValueError("policy: value_level is null, so there is no critic to ask for values")
        return values if values.ndim == 1 else values[:, 0]
