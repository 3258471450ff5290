"""Actions as tokens, and a small vision-language-action policy: the sibling of OpenVLA (arXiv:2406.09246) for a CPU.

    pictures ─▶ vision encoder ─▶ projector ─┐
    instruction ─▶ one token per byte ───────┼─▶ decoder ─▶ C x A action tokens, each from those before it
    state (optional) ─▶ one token ───────────┘      └─▶ value head, on the hidden state that the first one is drawn from

Encoder and decoder are models of transformers, named by their `model_type`. Action tokens are the last of the
vocabulary, and only they can be drawn. `draw` keeps keys and values from token to token; `score` reads all tokens at
once, which gives the same log-probs up to rounding. The value head sees what comes before a token and never the token
itself, so it stays a baseline (arXiv:2505.19789, section 4: hidden state of the first action token, three layers).

Each number of an action is one action token, as in OpenVLA (section 3.2, and its released tokenizer), so that weights
made there keep their meaning. With B bins, edges are B numbers spread evenly from -1 to 1; a number between edges d - 1
and d (from 0) is token V - d of a vocabulary of V, so a larger number is an earlier token; and a token says the middle
of its bin. Of the B tokens the first stands for exactly 1, and says the same as the second.

Instructions are one token per byte, without a tokenizer's files: enough for a small policy that tells a handful of
tasks apart; a policy that starts from a language model brings that model's tokenizer in this place.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import AutoConfig, AutoModel, DynamicCache, PreTrainedModel

from rlinf.algos.advantages import Reduce
from rlinf.data.tokenizer import without_own_code
from rlinf.models.policy.actor_critic import Exact, RunningNorm, perceptron
from rlinf.models.policy.base import Drawn, Evaluated, Level, Observation, Policy, PolicyConfig, Stored, looked_at

if TYPE_CHECKING:
    from transformers import Cache


class ActionTokens(Exact):
    """Between numbers in [-1, 1] and tokens, in both directions.

    Args:
        vocabulary: V, tokens in all, the bins included.
        bins: B, at least 2.
    """

    edges: Tensor
    middles: Tensor

    def __init__(self, vocabulary: int, bins: int):
        super().__init__()
        if not 2 <= bins <= vocabulary:
            raise ValueError(f"policy vla: bins={bins} must be from 2 to the size of the vocabulary, {vocabulary}")
        self.vocabulary, self.bins = vocabulary, bins
        self.first = vocabulary - bins
        """The first token that is a bin."""
        edges = torch.linspace(-1.0, 1.0, bins, dtype=torch.float64)
        # Not saved: they follow from the configuration.
        self.register_buffer("edges", edges, persistent=False)
        self.register_buffer("middles", (edges[1:] + edges[:-1]) / 2, persistent=False)

    def encode(self, actions: Tensor) -> Tensor:
        """Tokens of numbers; what lies outside [-1, 1] is cut to it. int64 in the shape of `actions`."""
        return self.vocabulary - torch.bucketize(actions.double().clamp(-1.0, 1.0), self.edges, right=True)

    def decode(self, tokens: Tensor) -> Tensor:
        """The middles of tokens' bins, float32 in the shape of `tokens`."""
        return self.middles[(self.vocabulary - tokens - 1).clamp(0, self.bins - 2)].float()


def hidden_states(
    decoder: nn.Module, embedded: Tensor, attention: Tensor, *, mask: Tensor | None = None, cache: Cache | None = None
) -> Tensor:
    """Output of a decoder of transformers at the last places of a sequence, [N, T, width].

    Args:
        decoder: without output embedding.
        embedded: [N, T, width], the last T of all S places.
        attention: which of all places are read, bool or int64 [N, S]; positions count these alone.
        mask: of the attention, as the decoder takes it, where places read others than those before them.
        cache: keys and values of the places before.
    """
    output: Tensor = decoder(
        inputs_embeds=embedded,
        attention_mask=attention.long() if mask is None else mask,
        position_ids=(attention.cumsum(1) - 1).clamp(min=0)[:, -embedded.shape[1] :],
        past_key_values=cache,
        use_cache=cache is not None,
    ).last_hidden_state
    return output


def picked_by(logprobs: Tensor, noise: Tensor) -> Tensor:
    """One of the bins each, by inverting the distribution function: the first whose cumulated probability exceeds u.

    Args:
        logprobs: [..., bins].
        noise: u in [0, 1), float64 [...].

    Returns:
        int64 [...]; never a bin of probability 0, since that adds nothing to the sum.
    """
    cumulated = logprobs.double().exp().cumsum(-1)
    below = cumulated <= noise[..., None] * cumulated[..., -1:]
    return below.sum(-1).clamp(max=logprobs.shape[-1] - 1)


PAD, END = 0, 1
_FIRST_BYTE = 2


class ByteTexts:
    """Texts as rows of equal length, padded on the left, so that what follows stands next to the last word.

    Args:
        length: tokens in a row, the END token behind every text included.
    """

    size = _FIRST_BYTE + 256
    """Size of this vocabulary."""

    def __init__(self, length: int):
        if length < 1:
            raise ValueError(f"policy vla: text_length={length} must be at least 1, for the token behind the text")
        self.length = length
        self._row = lru_cache(maxsize=4096)(self._encoded)  # environments say the same again at every step

    def encode(self, texts: Sequence[str]) -> Tensor:
        """Tokens of texts, int64 [N, length].

        Raises:
            ValueError: a text is too long; the text says which.
        """
        return torch.tensor([self._row(text) for text in texts], dtype=torch.int64).view(len(texts), self.length)

    def _encoded(self, text: str) -> tuple[int, ...]:
        tokens = [_FIRST_BYTE + byte for byte in text.encode()] + [END]
        if len(tokens) > self.length:
            raise ValueError(
                f"policy vla: text_length={self.length} is too short for {text!r}, which needs {len(tokens)}"
            )
        return (*[PAD] * (self.length - len(tokens)), *tokens)


_VISION = {"hidden_size": 96, "intermediate_size": 192, "num_hidden_layers": 3, "num_attention_heads": 4}
_DECODER = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 3, "num_attention_heads": 4}


@dataclass(frozen=True, slots=True, kw_only=True)
class VlaConfig(PolicyConfig):
    """Configuration of `VlaPolicy`. With the defaults and pictures of 64 x 64 it has about a million parameters."""

    image: tuple[int, int, int]
    """Height, width (equal) and channels of the observation's "rgb": 3 for each camera."""
    level: Level = "token"
    """The unit that has a log-prob of its own: each number of an action, each action, or the chunk."""
    bins: int = 256
    """Tokens that stand for the numbers from -1 to 1."""
    text_length: int = 32
    """Bytes of the longest instruction, and one."""
    instruction: str = ""
    """Instruction where the environment gives none."""
    state_size: int = 0
    """Numbers of the observation's "state", which becomes one token; 0 does not look at it."""
    patch_size: int = 16
    """Pixels along the side of a patch, which becomes one token."""
    vision: Mapping[str, Any] = field(default_factory=dict)
    """Configuration of the encoder: `model_type` (siglip_vision_model, dinov2 …) and keys of its transformers
    configuration."""
    decoder: Mapping[str, Any] = field(default_factory=dict)
    """Configuration of the decoder: `model_type` (llama, qwen2 …) and keys of its transformers configuration."""
    temperature: float = 1.0
    """Logits are divided by it, when drawing as when scoring; more than 0."""

    def __post_init__(self) -> None:
        PolicyConfig.__post_init__(self)  # super() does not work in a dataclass with slots
        height, width, channels = self.image
        if height != width or height % self.patch_size or channels < 3 or channels % 3:
            raise ValueError(
                f"policy vla: image={list(self.image)} must be square, a multiple of patch_size={self.patch_size} "
                "pixels, with 3 channels for each camera"
            )
        if not self.temperature > 0:
            raise ValueError(f"policy vla: temperature={self.temperature} must be more than 0")


class VlaPolicy(Policy):
    """Looks at "rgb", uint8 [N, H, H, 3 k], reads the instruction, and draws tokens one after the other."""

    Config: ClassVar[type[PolicyConfig]] = VlaConfig

    def __init__(self, config: VlaConfig):
        super().__init__(config)
        self.texts = ByteTexts(config.text_length)
        self.bins = ActionTokens(self.texts.size + config.bins, config.bins)
        pictures = {"model_type": "siglip_vision_model", **_VISION, **config.vision}
        words = {"model_type": "llama", **_DECODER, **config.decoder}
        words.setdefault("num_key_value_heads", words["num_attention_heads"])  # some types have a number of their own
        self.eyes = _model(pictures, image_size=config.image[0], patch_size=config.patch_size)
        self.decoder = _model(words, vocab_size=self.bins.vocabulary, pad_token_id=PAD)
        features, width = self.eyes.config.hidden_size, self.decoder.config.hidden_size
        self.projector = nn.Sequential(nn.Linear(features, width), nn.GELU(), nn.Linear(width, width))
        self.norm = RunningNorm(config.state_size) if config.state_size else None
        self.state_token = nn.Linear(config.state_size, width) if config.state_size else None
        self.head = nn.Linear(width, self.bins.vocabulary, bias=False)
        nn.init.normal_(self.head.weight, std=0.02)
        self.critic: nn.Module | None = None
        if config.value_level is not None:
            self.critic = perceptron(width, [width, width], 1, gain=0.0, activation=nn.GELU)

    # What goes in -----------------------------------------------------------------------------------------------------

    def inputs(self, observation: Observation, instructions: Sequence[str] | None = None) -> Stored:
        """Pictures as bytes, the instruction as tokens, the state as it came."""
        rgb = looked_at(observation, "rgb", self.config.image, "policy vla")
        texts = [self.config.instruction] * len(rgb) if instructions is None else instructions
        stored = {"rgb": rgb, "text": self.texts.encode(texts).to(rgb.device)}
        if self.config.state_size:
            stored["state"] = looked_at(observation, "state", (self.config.state_size,), "policy vla").float()
        return stored

    def encode(self, actions: Tensor, inputs: Stored) -> Tensor:
        """The bins' tokens, int64 [N, C, A]."""
        return self.bins.encode(actions)

    def adapt(self, stored: Stored, mask: Tensor | None = None, reduce: Reduce | None = None) -> None:
        """Take the states of this step into the running scale."""
        if self.norm is not None:
            self.norm.update(stored["state"], mask, reduce)

    # What comes out ---------------------------------------------------------------------------------------------------

    def draw(self, inputs: Stored, noise: Tensor | None) -> Drawn:
        """See `Policy.draw`: one token after the other."""
        cache = DynamicCache(config=self.decoder.config)
        prefix, attention = self._prefix(inputs)
        hidden = hidden_states(self.decoder, prefix, attention, cache=cache)[:, -1]
        hiddens, tokens, logprobs = [hidden], [], []
        numbers = self.config.chunk * self.config.action_size
        for number in range(numbers):
            each = self._logprobs(hidden)
            choice = each.argmax(-1) if noise is None else picked_by(each, noise[:, number])
            tokens.append(choice + self.bins.first)
            logprobs.append(each.gather(1, choice[:, None])[:, 0])
            if number + 1 < numbers:
                attention = functional.pad(attention, (0, 1), value=1)
                hidden = hidden_states(self.decoder, self._embedded(tokens[-1][:, None]), attention, cache=cache)[:, -1]
                hiddens.append(hidden)
        actions = torch.stack(tokens, 1).view(-1, self.config.chunk, self.config.action_size)
        values = self._values(torch.stack(hiddens, 1))
        return Drawn(self.bins.decode(actions), actions, torch.stack(logprobs, 1).view(actions.shape), values)

    def score(self, stored: Stored) -> Evaluated:
        """See `Policy.score`: all tokens in one pass."""
        shape, tokens = stored["actions"].shape, stored["actions"].flatten(1)
        prefix, attention = self._prefix(stored)
        embeddings = self._embedded(tokens[:, :-1])
        attention = functional.pad(attention, (0, embeddings.shape[1]), value=1)
        hidden = hidden_states(self.decoder, torch.cat([prefix, embeddings], 1), attention)[:, prefix.shape[1] - 1 :]
        each = self._logprobs(hidden)
        logprobs = each.gather(-1, (tokens - self.bins.first)[..., None])[..., 0]
        entropy = -(each.exp() * each).sum(-1)
        return Evaluated(logprobs.view(shape), entropy.view(shape), self._values(hidden))

    @torch.no_grad()
    def value(self, observation: Observation, instructions: Sequence[str] | None = None) -> Tensor:
        """See `Policy.value`."""
        if self.critic is None:
            raise ValueError("policy: value_level is null, so there is no critic to ask for values")
        hidden = hidden_states(self.decoder, *self._prefix(self.inputs(observation, instructions)))
        values: Tensor = self.critic(hidden[:, -1])
        return values[:, 0].float()

    # Parts ------------------------------------------------------------------------------------------------------------

    def _prefix(self, inputs: Stored) -> tuple[Tensor, Tensor]:
        """Tokens before the actions, [N, P, width], and which of them are to be read, int64 [N, P]."""
        rgb = inputs["rgb"].movedim(-1, 1)
        views = rgb.shape[1] // 3
        pixels = rgb.reshape(-1, 3, *rgb.shape[2:]).to(self.head.weight.dtype) / 127.5 - 1.0
        patches = self.projector(self.eyes(pixel_values=pixels).last_hidden_state)
        parts = [patches.reshape(len(rgb), views * patches.shape[1], -1)]
        if self.norm is not None and self.state_token is not None:
            parts.append(self.state_token(self.norm(inputs["state"]).to(pixels.dtype))[:, None])
        text = inputs["text"]
        text = text[:, int((text != PAD).any(0).long().argmax()) :]  # columns that nobody fills cost time
        before = sum(part.shape[1] for part in parts)
        attention = functional.pad((text != PAD).long(), (before, 0), value=1)
        return torch.cat([*parts, self._embedded(text)], 1), attention

    def _embedded(self, tokens: Tensor) -> Tensor:
        embeddings: Tensor = self.decoder.get_input_embeddings()(tokens)
        return embeddings

    def _logprobs(self, hidden: Tensor) -> Tensor:
        """Log-probs of all bins, float32 [..., bins]; other tokens' logits are not computed."""
        logits = functional.linear(hidden, self.head.weight[self.bins.first :])
        return functional.log_softmax(logits.float() / self.config.temperature, -1)

    def _values(self, hidden: Tensor) -> Tensor | None:
        """Values, from the hidden states [N, C x A, width] that tokens are drawn from."""
        if self.critic is None:
            return None
        if self.config.value_level == "chunk":
            return self.critic(hidden[:, 0])[:, 0].float()
        return self.critic(hidden[:, :: self.config.action_size])[..., 0].float()


def _model(settings: Mapping[str, Any], **sizes: int) -> PreTrainedModel:
    """A model of transformers with new weights; `sizes` are ours to say."""
    overlap = sorted(set(sizes) & set(settings))
    if overlap:
        raise ValueError(
            f"policy vla: {' and '.join(overlap)} cannot be set in vision or decoder: they follow from others"
        )
    if "vision" in settings["model_type"]:
        settings = {**settings, "vision_use_head": False}  # pools patches into one, which nobody reads
    config = AutoConfig.for_model(**{**settings, **sizes})
    model: PreTrainedModel = without_own_code(AutoModel, config, dtype=torch.float32, attn_implementation="sdpa")
    return model
