"""π0-FAST (arXiv:2501.09747) as a policy that learns by acting: PaliGemma alone, whose answers are actions.

    pictures, "Task: …, State: …;\\n" ─▶ PaliGemma, all places read all ─▶ keys and values
    BOS, "Action: ", FAST's tokens, "|", EOS ─▶ the same layers, each place reads those before it

FAST's token f is word V - 1 - skip - f of V. Imitation is its authors' loss, over all words. When it acts, "Action: "
is given, and only FAST's tokens or the end can be drawn, one after the other; `score` reads all at once. Lengths differ
from row to row, and every token says something of the whole chunk, so that a chunk has one log-prob. The value head
reads the hidden state that the first token is drawn from.

Directories are LeRobot's, under its names, and beside them lie PaliGemma's tokenizer (see `pi0.py`) and FAST's files:

    fast/tokenizer.json, fast/processor_config.json      or elsewhere, where `fast` or `action_tokenizer_name` says

LeRobot shows BOS to the prompt when it acts, though not when it learns: `reads_bos` says which it is here.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional

from rlinf.algos.loss_sum import LossSum
from rlinf.data.demonstrations.statistics import FeatureStatistics
from rlinf.models.policy import base, lerobot
from rlinf.models.policy.actor_critic import perceptron
from rlinf.models.policy.base import Generator, Observation, Policy, PolicyConfig, Stored
from rlinf.models.policy.published import tensor_files, tensor_shapes, to_be_read, write_sharded
from rlinf.models.policy.robots import RobotActions, Scaling, cameras, nearest_valid, padded
from rlinf.models.policy.vla import pi0
from rlinf.models.policy.vla.fast_tokens import FastTokens, WrongLength
from rlinf.models.policy.vla.gemma import LANGUAGE, VISION, Cache, PaliGemma, Prefix
from rlinf.models.policy.vla.openvla import entropy
from rlinf.models.policy.vla.tokens import picked_by

logger = logging.getLogger(__name__)

PROMPT = "Task: {instruction}, State: {state};\n"
_BEGIN, _END, _PAD = "Action: ", "|", 0
_FAST = "fast"
"""Folder of FAST's files in a directory."""
_BLACK = -3.0
"""What stands beside a picture that is no square: lerobot pads pictures in 0..1 by -1, and then doubles, less 1."""
_ABOUT: Mapping[str, Any] = {
    "type": "pi0_fast",
    "chunk_size": 50,
    "max_state_dim": 32,
    "max_action_tokens": 256,
    "max_decoding_steps": 256,
    "tokenizer_max_length": 200,
    "fast_skip_tokens": 128,
    "action_tokenizer_name": "physical-intelligence/fast",
    "normalization_mapping": {"VISUAL": "IDENTITY", "STATE": "MEAN_STD", "ACTION": "MEAN_STD"},
}
"""LeRobot's defaults."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pi0FastConfig(PolicyConfig):
    """Configuration of `Pi0FastPolicy`. A directory says sizes and statistics, an environment `image`, `state_size` and
    bounds."""

    image: tuple[int, int, int]
    """Height, width and channels of the observation's "rgb": 3 for each camera."""
    state_size: int = 0
    """Numbers of the observation's "state"; 0 does not look at it."""
    level: base.Level = "chunk"
    """The unit that has a log-prob of its own: the chunk, of which every token says something."""
    model: Mapping[str, Any] = field(default_factory=dict)
    """LeRobot's config.json; keys that are missing are as LeRobot's."""
    statistics: Mapping[str, Any] = field(default_factory=dict)
    """Statistics of `state` and `actions`, or by the names of LeRobot's features; empty: numbers are used as they are,
    and actions are in [-1, 1]."""
    fast: str | None = None
    """Directory of FAST's tokenizer.json and processor_config.json; null: `fast` in that of the checkpoint, or the one
    that its `action_tokenizer_name` says."""
    wrong_length: WrongLength = "padded"
    """Meaning of tokens that do not say as many coefficients as a chunk has: those that they say, cut or with zeros
    behind (padded, as lerobot); or zeros alone (zeros, as the authors' processor)."""
    reads_bos: bool = True
    """When it acts, the prompt reads the token that begins the answer, as in lerobot; false: as when it imitates."""
    temperature: float = 1.0
    """Logits are divided by it, when drawing as when scoring; more than 0."""
    instruction: str = ""
    """Instruction where the environment gives none."""
    gripper: str = "same"
    """Convention of the gripper."""
    critic_hidden: tuple[int, ...] = (512, 128)
    """Widths of the value head's hidden layers."""
    vision: Mapping[str, Any] = field(default_factory=dict)
    """Sizes of the vision encoder that are not SigLIP so400m's."""
    language: Mapping[str, Any] = field(default_factory=dict)
    """Sizes of the language model that are not Gemma-2B's."""
    action_low: tuple[float, ...] = ()
    """Least value of each number of an action in the simulator; without, -1."""
    action_high: tuple[float, ...] = ()
    """Greatest values; without, 1."""

    def __post_init__(self) -> None:
        PolicyConfig.__post_init__(self)  # super() does not work in a dataclass with slots
        about = self.about
        lerobot.check_kinds(about, "pi0_fast")
        if self.level != "chunk" or self.value_level == "action":
            raise ValueError(
                f"policy pi0_fast: level={self.level} and value_level={self.value_level} must be chunk (value_level "
                "may be null): its tokens are not the numbers of one action"
            )
        if not self.temperature > 0:
            raise ValueError(f"policy pi0_fast: temperature={self.temperature} must be more than 0")
        if self.chunk > about["chunk_size"]:
            raise ValueError(
                f"policy pi0_fast: chunk={self.chunk} must be at most model.chunk_size={about['chunk_size']}, the "
                "actions that its tokens say"
            )

    @property
    def about(self) -> dict[str, Any]:
        """The whole config.json; features are the environment's, under the checkpoint's names of cameras."""
        named = {"action_tokenizer_name": self.fast} if self.fast is not None else {}
        whole = {**_ABOUT, "n_obs_steps": 1, "n_action_steps": self.chunk, **self.model, **named}
        return {**whole, **lerobot.fitting(whole, self.image, self.state_size, self.action_size)}


@dataclass(frozen=True, slots=True)
class _Vocabulary:
    """Words that answers are made of."""

    fast: FastTokens
    bos: int
    begin: tuple[int, ...]
    """Tokens that say that actions follow."""
    end: int
    """Token behind the actions."""
    eos: int
    """Token behind that."""
    top: int
    """The word that is FAST's token 0; those after it are words before."""

    @property
    def choices(self) -> Tensor:
        """Words that can be drawn: FAST's tokens by number, then the end, int64 [F + 1]."""
        return torch.cat([self.top - torch.arange(self.fast.size), torch.tensor([self.end])])

    def numbers(self, words: Tensor) -> Tensor:
        """Places of words among the choices, int64 in the shape of `words`; 0 for what is none."""
        places = torch.where(words == self.end, self.fast.size, self.top - words)
        return torch.where((places >= 0) & (places <= self.fast.size), places, 0)

    def tokens(self, words: Tensor) -> list[list[int]]:
        """FAST's tokens in rows of words, int64 [N, T], up to the end."""
        rows: list[list[int]] = words.tolist()
        ends = [row.index(self.end) if self.end in row else len(row) for row in rows]
        return [[self.top - word for word in row[:end] if word != _PAD] for row, end in zip(rows, ends, strict=True)]


class Pi0FastPolicy(Policy):
    """Looks at "rgb", uint8 [N, H, W, 3 k], and "state", float32 [N, S]; reads the instruction."""

    Config: ClassVar[type[PolicyConfig]] = Pi0FastConfig
    published = ("config.json", "*.safetensors")
    small_files = ("config.json", *pi0.FILES, *lerobot.FILES, "train_config.json", f"{_FAST}/*")
    needs_path = True
    float32 = (
        *("*.vision_model.embeddings.*", "*.input_layernorm.*", "*.post_attention_layernorm.*", "*model.norm.*"),
        "critic.*",
    )  # as for pi0
    lora_targets = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")

    def __init__(self, config: Pi0FastConfig):
        super().__init__(config)
        about = config.about
        self.horizon: int = about["chunk_size"]
        """Actions that tokens say, H; the first `chunk` of them are done."""
        self.side: int = {**VISION, **config.vision}["image_size"]
        with to_be_read():
            self.paligemma_with_expert = nn.Module()  # of which no expert is there
            self.paligemma_with_expert.paligemma = PaliGemma(config.vision, config.language)
        self.critic: nn.Module | None = None
        if config.value_level is not None:
            width = {**LANGUAGE, **config.language}["hidden_size"]
            self.critic = perceptron(width, config.critic_hidden, 1, gain=0.0, activation=nn.GELU)
        self._around = lerobot.Processors(about, config.statistics, {})
        self._robot = self.actions_of(config, self._around.actions)
        self._prompts: pi0.Prompts | None = None
        self._vocabulary: _Vocabulary | None = None
        self._words = pi0.PREFIX + pi0.WORDS
        self._unused: dict[str, Tensor] = {}

    # Directories ------------------------------------------------------------------------------------------------------

    @classmethod
    def published_settings(cls, directory: Path) -> dict[str, Any]:
        """See `Policy.published_settings`.

        Raises:
            ValueError: it is of another policy, lacks something, or has no statistics.
        """
        settings = lerobot.opened(directory, "pi0_fast")
        rows = settings["statistics"]
        del settings["pictures"]  # which are not normalised
        settings["statistics"] = {name: rows[name] for name in (lerobot.STATE, lerobot.ACTION) if rows.get(name)}
        shapes = {pi0.ours(name): shape for name, shape in tensor_shapes(tensor_files(directory)).items()}
        try:
            words = shapes[next(each for each in (pi0.WORDS, *pi0.TIED) if each in shapes)]
            language = pi0.stack_sizes(shapes, f"{pi0.MAIN}language_model.") | {"vocab_size": words[0]}
            sizes = {"vision": pi0.vision_sizes(shapes, settings["model"]), "language": language}
        except (KeyError, IndexError, ZeroDivisionError, StopIteration) as error:
            raise ValueError(f"{directory} lacks {error}: it is no checkpoint of pi0-FAST") from error
        return settings | sizes

    @classmethod
    def with_statistics(cls, name: str, statistics: Mapping[str, FeatureStatistics], episodes: int) -> dict[str, Any]:
        """See `Policy.with_statistics`; lerobot's files have no place for the name."""
        return {"statistics": lerobot.counted(statistics)}

    @classmethod
    def actions_of(cls, config: Pi0FastConfig, scaling: Scaling | None) -> RobotActions:
        """See `Policy.actions_of`."""
        return lerobot.robot_actions(config, scaling)

    def open_published(self, directory: Path) -> None:
        """Take PaliGemma's tokenizer, and FAST's.

        Raises:
            ValueError: one is missing, or they do not fit together.
        """
        about = self.config.about
        self._prompts = pi0.Prompts(self.files, about["tokenizer_max_length"], "model.tokenizer_max_length")
        self.files |= self._files_of_fast(directory)
        begin = f"{_FAST}/"
        mine = {name.removeprefix(begin): each for name, each in self.files.items() if name.startswith(begin)}
        words, fast = self._prompts.words, FastTokens.of_files(mine, f"{directory / _FAST}")
        end, top = words.encode(_END), words.size - 1 - about["fast_skip_tokens"]
        first = (*words.encode(_BEGIN),)
        if len(end) != 1 or top - fast.size + 1 <= max(*first, end[0], words.first, words.last):
            raise ValueError(
                f"{directory}: FAST's {fast.size} tokens do not lie behind PaliGemma's own words, of which there are "
                f"{words.size}, model.fast_skip_tokens={about['fast_skip_tokens']} left out: tokenizers of two models?"
            )
        self._vocabulary = _Vocabulary(fast, words.first, first, end[0], words.last, top)
        names = tensor_files(directory)
        self._words = next((each for each in names if pi0.ours(each) in (pi0.WORDS, *pi0.TIED)), self._words)

    def _files_of_fast(self, directory: Path) -> dict[str, bytes]:
        """FAST's files, from where the run or the checkpoint says that they are; none where they lie in it already."""
        ours = (directory / "policy.json").is_file()
        has = any(name.startswith(f"{_FAST}/") for name in self.files)
        name = self.config.about["action_tokenizer_name"]
        if has and (ours or self.config.fast is None):
            return {}
        folder = next((each for each in (directory / name, Path(name).expanduser()) if each.is_dir()), None)
        if folder is None:
            raise ValueError(
                f"policy.path: {directory} has no FAST's tokens: copy tokenizer.json and processor_config.json of "
                f"{name} into its folder {_FAST}, or set policy.settings.fast to the directory that has them"
            )
        return {f"{_FAST}/{path.name}": path.read_bytes() for path in sorted(folder.glob("*.json"))}

    def read_published(self, directory: Path) -> Iterator[tuple[str, Tensor]]:
        """See `Policy.read_published`."""
        return pi0.tensors_of(directory, self._unused)

    def write_published(self, directory: Path, state: Mapping[str, Tensor]) -> None:
        """See `Policy.write_published`; processors with the statistics that it acts by."""
        named = {pi0.PREFIX + name: each for name, each in state.items() if name != pi0.WORDS}
        write_sharded(directory, {**named, self._words: state[pi0.WORDS]})
        self._around.write(directory, self.files)

    def blocks(self) -> Sequence[nn.Module]:
        """Layers of the encoder and the language model."""
        model = self._paligemma.model
        return [*model.vision_tower.vision_model.encoder.layers, *model.language_model.layers]

    # What goes in -----------------------------------------------------------------------------------------------------

    def inputs(self, observation: Observation, instructions: Sequence[str] | None = None) -> Stored:
        """Pictures as they came, and the prompt, which says the state, as tokens."""
        config, where = self.config, "policy pi0_fast"
        if self._prompts is None:
            raise ValueError(f"{where}: it reads with its checkpoint's tokenizer: set policy.path")
        pictures = cameras(base.looked_at(observation, "rgb", config.image, where))
        pictures = pictures[:, : len(lerobot.cameras_of(config.about))].contiguous()
        state = torch.zeros(len(pictures), 0)
        if config.state_size:
            state, _ = self._around.states(base.looked_at(observation, "state", (config.state_size,), where).float())
        texts = [config.instruction] * len(pictures) if instructions is None else list(instructions)
        rows = zip(texts, padded(state, max(config.about["max_state_dim"], config.state_size)), strict=True)
        prompts = [
            (PROMPT.format(instruction=pi0.cleaned(text), state=pi0.written(numbers)),) for text, numbers in rows
        ]
        return {"rgb": pictures, "text": self._prompts.encode(prompts).to(pictures.device)}

    def encode(self, actions: Tensor, inputs: Stored) -> Tensor:
        """Normalised numbers, [N, H, A], of which `imitate` makes tokens."""
        return self._robot.to_model(actions)

    @property
    def lesson(self) -> tuple[int, int]:
        """See `Policy.lesson`: all that tokens say."""
        return 0, self.horizon

    @property
    def randomness(self) -> int:
        """One number for each token that may be drawn."""
        return int(self.config.about["max_decoding_steps"])

    # What comes out ---------------------------------------------------------------------------------------------------

    def draw(self, inputs: Stored, noise: Tensor | None) -> base.Drawn:
        """See `Policy.draw`: one token after the other, until all rows have ended. Log-probs are [N, 1, T]."""
        own, rows, count = self.vocabulary, len(inputs["text"]), self.randomness
        prefix, opening = self._beginning(inputs)
        hidden, before = self._read(prefix, opening, prefix.cache)
        values, place = self._values(hidden[:, -1]), opening.shape[1]
        words = torch.full((rows, count), _PAD, device=opening.device)
        logprobs = torch.zeros(rows, count, device=opening.device)
        choices = own.choices.to(opening.device)
        open_rows = torch.ones(rows, dtype=torch.bool, device=opening.device)
        for number in range(count - len(own.begin)):
            each = self._logprobs(hidden[:, -1])
            choice = each.argmax(-1) if noise is None else picked_by(each, noise[:, number])
            words[:, number] = torch.where(open_rows, choices[choice], _PAD)
            logprobs[:, number] = torch.where(open_rows, each.gather(1, choice[:, None])[:, 0], 0.0)
            open_rows = open_rows & (words[:, number] != own.end)
            if not bool(open_rows.any()):
                break
            hidden, before = self._read(prefix, words[:, number : number + 1], before, place + number)
        numbers, broken = own.fast.decode(
            own.tokens(words), self.horizon, self.config.action_size, self.config.wrong_length
        )
        if bool(broken.any()):
            _tell_broken(self.config.wrong_length)
        actions = self._robot.to_simulator(numbers[:, : self.config.chunk].to(opening.device))
        return base.Drawn(actions, words, logprobs[:, None], values, also={base.BROKEN: broken.to(opening.device)})

    def score(self, stored: Stored) -> base.Evaluated:
        """See `Policy.score`: all tokens in one pass, log-probs [N, 1, T]."""
        words, own = stored["actions"], self.vocabulary
        if words.is_floating_point():
            raise ValueError("policy pi0_fast: demonstrated actions have no log-probs; `imitate` learns from them")
        length = max(1, int((words != _PAD).any(0).sum()))  # columns that nobody fills cost time
        prefix, opening = self._beginning(stored)
        hidden, _ = self._read(prefix, torch.cat([opening, words[:, : length - 1]], 1), prefix.cache)
        hidden = hidden[:, opening.shape[1] - 1 :]
        each, counts = self._logprobs(hidden), words[:, :length] != _PAD
        logprobs = each.gather(-1, own.numbers(words[:, :length])[..., None])[..., 0]
        rows = (torch.where(counts, row, 0.0) for row in (logprobs, entropy(each)))
        behind = words.shape[1] - length
        likely, unsure = (functional.pad(row, (0, behind))[:, None] for row in rows)
        return base.Evaluated(likely, unsure, self._values(hidden[:, 0]))

    @torch.no_grad()
    def value(self, observation: Observation, instructions: Sequence[str] | None = None) -> Tensor:
        """See `Policy.value`."""
        prefix, opening = self._beginning(self.inputs(observation, instructions))
        values = self._values(self._read(prefix, opening, prefix.cache)[0][:, -1])
        if values is None:
            raise ValueError("policy: value_level is null, so there is no critic to ask for values")
        return values

    def imitate(self, stored: Stored, mask: Tensor | None = None, generator: Generator = None) -> LossSum:
        """The authors' loss: cross-entropy of "Action: ", FAST's tokens and what ends them, over all words.

        As LeRobot has it, actions beyond an episode's end are copies of the last.

        Args:
            stored: of `demonstrated`.
            mask: which actions were done, bool [N, H]; None for all.
            generator: not used.
        """
        actions = stored["actions"]
        real = torch.ones(actions.shape[:2], dtype=torch.bool, device=actions.device) if mask is None else mask.bool()
        actions = actions.gather(1, nearest_valid(real)[..., None].expand_as(actions))
        words = self._answers(actions).to(actions.device)
        prefix = self._prefix(stored["rgb"], stored["text"])
        hidden, _ = self._read(prefix, words[:, :-1], prefix.cache)
        counts = (words[:, 1:] != _PAD) & real.any(1, keepdim=True)
        logits = functional.linear(hidden[counts], self._paligemma.lm_head.weight).float()
        loss = functional.cross_entropy(logits, words[:, 1:][counts], reduction="sum")
        return LossSum(loss, counts.sum(dtype=torch.float64))

    # Parts ------------------------------------------------------------------------------------------------------------

    @property
    def vocabulary(self) -> _Vocabulary:
        """Words that answers are made of.

        Raises:
            ValueError: no directory was read that has them.
        """
        if self._vocabulary is None:
            raise ValueError("policy pi0_fast: it acts by its checkpoint's tokenizers: set policy.path")
        return self._vocabulary

    @property
    def _paligemma(self) -> Any:
        return self.paligemma_with_expert.paligemma

    def _answers(self, numbers: Tensor) -> Tensor:
        """Whole answers to demonstrated numbers [N, H, A]: words from BOS to EOS, and 0 behind, int64 [N, T]."""
        own, most = self.vocabulary, self.config.about["max_action_tokens"]
        rows = []
        for tokens in own.fast.encode(numbers):
            row = [own.bos, *own.begin, *(own.top - token for token in tokens), own.end, own.eos]
            if len(row) > most:
                _tell_long(most)
            rows.append(row[:most])
        length = max(map(len, rows))
        return torch.tensor([[*row, *[_PAD] * (length - len(row))] for row in rows])

    def _beginning(self, inputs: Stored) -> tuple[Prefix, Tensor]:
        """The prompt, and words that open the answer, int64 [N, G]."""
        text, own = inputs["text"], self.vocabulary
        first = text.new_full((len(text), 1), own.bos)
        opening = text.new_tensor(own.begin).expand(len(text), -1)
        if self.config.reads_bos:
            return self._prefix(inputs["rgb"], torch.cat([text, first], 1)), opening
        return self._prefix(inputs["rgb"], text), torch.cat([first, opening], 1)

    def _prefix(self, rgb: Tensor, text: Tensor) -> Prefix:
        """Pictures and prompt; all places see all."""
        x = rgb.flatten(0, 1).float() / 255.0
        height, width = x.shape[-2:]
        ratio = max(height, width) / self.side
        inner = int(height / ratio), int(width / ratio)
        if inner != (height, width):
            x = functional.interpolate(x, inner, mode="bilinear", align_corners=False)
        above, left_of_it = (self.side - inner[0]) // 2, (self.side - inner[1]) // 2
        edges = left_of_it, self.side - inner[1] - left_of_it, above, self.side - inner[0] - above
        pixels = functional.pad(x * 2.0 - 1.0, edges, value=_BLACK)
        prefix: Prefix = self._paligemma(pixels.unflatten(0, rgb.shape[:2]), text)
        return prefix

    def _read(self, prefix: Prefix, words: Tensor, before: Cache, done: int = 0) -> tuple[Tensor, Cache]:
        """Hidden states of words of the answer, [N, S, width], each of which sees those before it, and the cache.

        Args:
            prefix: what stands before all of them.
            words: int64 [N, S].
            before: keys and values of the prefix and of words before.
            done: how many these are.
        """
        rows, places = words.shape
        earlier = functional.pad(prefix.mask, (0, done), value=True)[:, None].expand(-1, places, -1)
        own = torch.ones(places, places, dtype=torch.bool, device=words.device).tril().expand(rows, -1, -1)
        positions = prefix.mask.sum(1, keepdim=True) + done + torch.arange(places, device=words.device)
        paligemma = self._paligemma
        hidden, after = paligemma.model.language_model(
            paligemma.embedded(words), torch.cat([earlier, own], 2), positions, before
        )
        return hidden, after

    def _logprobs(self, hidden: Tensor) -> Tensor:
        """Log-probs of what can be drawn, float32 [..., F + 1]; other words' logits are not computed."""
        weight = self._paligemma.lm_head.weight[self.vocabulary.choices.to(hidden.device)]
        return functional.log_softmax(functional.linear(hidden, weight).float() / self.config.temperature, -1)

    def _values(self, hidden: Tensor) -> Tensor | None:
        """Values [N] from the hidden state that the first token is drawn from, [N, width]."""
        if self.critic is None:
            return None
        values: Tensor = self.critic(hidden.float())
        return values[:, 0]


@cache  # told once
def _tell_broken(wrong: WrongLength) -> None:
    logger.warning(
        "policy pi0_fast: tokens were drawn that do not say as many coefficients as a chunk has: they are %s; "
        "actions/broken says how many",
        "zeros" if wrong == "zeros" else "cut, or zeros stand behind them",
    )


@cache  # told once
def _tell_long(most: int) -> None:
    logger.warning(
        "policy pi0_fast: policy.settings.model.max_action_tokens=%d is too short for demonstrated actions: ends of "
        "answers are cut off, as by lerobot",
        most,
    )
