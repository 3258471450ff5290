"""The model as decoding sees it: its own `forward`, new weights, leaving its device; and texts laid out for reading.

Flows in: token ids. Flows out: logits, keys and values. Blocking code; nobody waits here.

`LeanForward` is a faster forward pass for Llama-like models, used once it has been compared with the model's own. A
transformers module spends as long in Python as in matrices while a small batch decodes: here query, key and value are
one matrix product, as are gate and up; queries and keys are rotated together, by angles computed once; and there are no
hooks, wrappers or mask builders. The joined matrices are the model's own parameters, laid next to one another: its
modules go on working, weights are loaded as before, and nothing is held twice. `python -m benchmarks.engine` measures
what it gains.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from itertools import accumulate
from typing import TYPE_CHECKING, Any, TypeVar, cast

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from rlinf.data.images import GRID
from rlinf.data.sample import ImageRef
from rlinf.data.weights import Weights, misfits
from rlinf.engines.base import TextScores
from rlinf.engines.transformers.adapters import Own, RowAdapters
from rlinf.engines.transformers.cache import Band, Layers
from rlinf.engines.transformers.float8 import Float8Weights
from rlinf.engines.transformers.int8 import Int8Layers, Int8Linear, Int8Weight, join
from rlinf.models.language.truth import Results, Truth, blocks, length_of_text
from rlinf.models.offload import Parking
from rlinf.runtime.base.tensors import give_back_freed

if TYPE_CHECKING:
    from transformers import PreTrainedModel
    from transformers.cache_utils import Cache

    from rlinf.data.images import Pictures
    from rlinf.models.language.moe import Routers

_TOKENS = 8192
"""Tokens read at once, padding included: bounds the memory it takes."""
_PADDING = 256
"""Padded tokens that cost less than reading some texts apart from the others."""

_RAGGED, _ALIKE, _STEPS, _REST = (47, 31, 16, 6), (24, 24), 6, 2
"""Tokens of made-up texts that are read, together and with padding, and without; tokens by which they are then stepped;
and those of the end that are read on from the rest."""

_REFUSALS = (AttributeError, IndexError, KeyError, NotImplementedError, RuntimeError, TypeError, ValueError)
"""Exceptions that a model may raise that cannot be read token by token."""

_SCORED = 1 << 27
"""Logits that are held at once while texts are scored."""

Job = TypeVar("Job", bound=Sequence[Any])


class ModelForward:
    """The model by its own `forward`.

    It makes its own masks, from which columns are real, so that windows, chunks and biases are those that it has
    everywhere else; and it keeps what it remembers in a transformers cache, of which a band holds the memory.

    Args:
        model: in place on its device, in evaluation mode.
        version: of the weights it has.
        pictures: reads those of prompts; None if the model reads text alone.
    """

    continues = False
    """It reads texts on from what it read of their beginnings, as if it read them whole; see `continues`."""

    verifies = False
    """`step` takes several tokens of a row."""
    slower: str | None = None
    """Why it is not the lean forward; None if it is."""
    adapters: RowAdapters | None = None
    """Those that rows may have; None: it takes none."""

    def __init__(self, model: PreTrainedModel, version: int, pictures: Pictures | None = None):
        self.device: torch.device = model.device
        self.dtype: torch.dtype = model.dtype
        self.version = version
        self.reads_images = pictures is not None
        """It takes the images of a prompt."""
        self.padding: Tensor | None = None
        """Ids that no answer has, see `choose`, int64 [ids]."""
        self._pictures = pictures
        self._model = model
        self.int8 = Int8Layers(model)
        """Those of its layers whose weights have 8 bits."""
        self.float8: Float8Weights | None = None
        """Those of its parameters that are rounded to float8."""
        self._parking: Parking | None = None  # kept once it was parked, with its host memory
        self._arrived: Weights | None = None
        self._version_now: Callable[[], int] | None = None  # of weights that are a trainer's own tensors
        self._routers: Routers | None = None
        self._routes: list[Tensor] = []  # of the passes since somebody asked
        self._takes = set(inspect.signature(type(model).forward).parameters)
        self._cache_name = "past_key_values" if "past_key_values" in self._takes else "cache_params"

    @cached_property
    def _caches(self) -> Any:
        """The module of transformers' caches, which the lean forward does without: it takes two seconds to import."""
        from rlinf.engines.transformers import own_caches

        return own_caches

    @cached_property
    def _like(self) -> Cache:
        """A cache as the model has it."""
        return self._caches.empty_cache(self._model)  # type: ignore[no-any-return]

    @property
    def pads(self) -> bool:
        """Texts of different lengths can be read together; a state of fixed size would remember their padding."""
        return not self._caches.keeps_states(self._like)

    def read(
        self,
        ids: Tensor,
        real: Tensor | None,
        images: Sequence[Sequence[ImageRef]] = (),
        past: Layers | None = None,
    ) -> tuple[Tensor, Layers]:
        """Read texts from their beginnings, or on from what was read of them before.

        Args:
            ids: int64 [rows, tokens], texts aligned at their ends; of equal lengths unless `pads`.
            real: which of them are no padding, bool of that shape; None if all. With `past` it is given, and is of
                [rows, past + tokens].
            images: of each row; empty unless `reads_images`.
            past: keys and values of the tokens before these, aligned at their ends.

        Returns:
            Logits after the last token, [rows, vocabulary], and what the model remembers of all, the past included.
        """
        cache = self._caches.empty_cache(self._model)
        for number, pair in enumerate(() if past is None else past.pairs):
            cache.update(*pair, number)
        pixels: dict[str, Tensor] = {}
        positions, shifts = positions_of(ids, real), None
        if self._pictures is not None and any(images):
            positions, shifts, pixels = self._seen(self._pictures, ids, real, images, positions)
        logits = self._logits_of(ids, positions, None if real is None else real.long(), cache, pixels)
        columns = ids.shape[1] if real is None else real.shape[1]
        empty = torch.empty((len(ids), 0, columns, 0), dtype=self.dtype, device=self.device)
        pairs = [
            (empty, empty) if getattr(layer, "keys", None) is None else (layer.keys, layer.values)
            for layer in cast(list[Any], cache.layers)
        ]
        states, places = self._caches.states_of(cache)
        return logits, Layers(pairs, states, places, shifts)

    def _seen(
        self,
        pictures: Pictures,
        ids: Tensor,
        real: Tensor | None,
        images: Sequence[Sequence[ImageRef]],
        positions: Tensor,
    ) -> tuple[Tensor, np.ndarray | None, dict[str, Tensor]]:
        """Positions, [4, rows, tokens] where they have three dimensions (text, then time, row and column), what
        `Layers.shifts` says, and the pixels, in the order of the rows."""
        inputs = [pictures.inputs(some) for some in images]
        names = next(list(one) for one in inputs if one)
        pixels = {name: torch.cat([one[name] for one in inputs if one]).to(self.device) for name in names}
        if GRID not in pixels:
            return positions, None, pixels
        wide = positions.cpu().numpy()
        spatial, shifts = np.tile(wide, (4, 1, 1)), np.zeros(len(ids), dtype=np.int64)
        for row, one in enumerate(inputs):
            if one:
                length = int(wide[row, -1]) + 1
                spatial[1:, row, -length:] = pictures.positions(ids[row, -length:].cpu().numpy(), one[GRID])
                shifts[row] = (
                    spatial[1, row, -1] + 1 - length
                )  # behind its pictures a text has one number for all three
        return torch.from_numpy(spatial).to(self.device), shifts, pixels

    def step(self, ids: Tensor, positions: Tensor, bands: Sequence[Band]) -> Tensor:
        """Read one token per row and write its keys and values; the caller has reserved the column and advances it.

        Args:
            ids: int64 [tokens], band after band; where it `verifies`, as many of each row as was reserved for.
            positions: of each in its own text, int64 [tokens].
            bands: what was read before.

        Returns:
            Logits after them, [tokens, vocabulary].
        """
        sizes = [len(band) for band in bands]
        parts = zip(ids.split(sizes), positions.split(sizes), bands, strict=True)
        logits = [self._step(token, position, band) for token, position, band in parts]
        return logits[0] if len(logits) == 1 else torch.cat(logits)

    def rows_by(self, names: Sequence[str | None]) -> None:
        """Have the rows of the passes that follow computed with their own adapters; None for the model itself."""

    def versions_of(self, names: Sequence[str | None]) -> int | np.ndarray:
        """Versions of the weights that rows are computed with: of all, or int32 [rows]."""
        if self.adapters is None or not any(names):
            return self.version
        own = self.adapters.versions
        return np.array([self.version if name is None else own[name] for name in names], np.int32)

    def allowed(self, logits: Tensor) -> Tensor:
        """Logits, [rows, vocabulary], of which tokens are drawn: an answer never has placeholders of pictures."""
        if self._pictures is None:
            return logits
        return logits.index_fill(1, torch.tensor(self._pictures.banned, device=logits.device), -torch.inf)

    @torch.inference_mode()
    def watch(self) -> bool:
        """Have `routes` told from now on; False where the model has no experts, or chooses them in an unknown way."""
        from rlinf.models.language.moe import watch  # comes with DTensors, which take half a second

        self._routers = watch(self._model)
        if self._routers is not None:
            self._model(input_ids=torch.arange(2, device=self.device)[None], use_cache=False)
            self._routers = self._routers if self._routers.understood else None
        return self._routers is not None

    def routes(self) -> np.ndarray | None:
        """Experts to which all tokens went that were computed since this was last asked, padding included, in order,
        uint8 or int16 [tokens, layers, experts per token]; None unless it watches."""
        routes, self._routes = self._routes, []
        return torch.cat(routes).cpu().numpy() if routes else None

    @property
    def rounded(self) -> Float8Weights | Int8Layers | None:
        """Those of its weights that are rounded; None where they are as they came."""
        return self.float8 or self.int8 or None

    @property
    def weights(self) -> int:
        """How many it has."""
        rounded = sum(rows * columns for rows, columns in self.int8.shapes.values())
        return rounded + sum(parameter.numel() for parameter in self._model.parameters())

    @property
    def vocabulary(self) -> int:
        """Tokens the model knows."""
        return len(cast(nn.Embedding, self._model.get_input_embeddings()).weight)

    @torch.inference_mode()
    def whole(self, texts: Sequence[np.ndarray], steps: int) -> Tensor:
        """Log-probs after the last `steps` + 1 tokens of texts that the model reads whole, without a cache, float32
        [texts, steps + 1, vocabulary]."""
        longest = max(map(len, texts))  # what stands behind a text changes nothing in it
        ids = torch.from_numpy(np.stack([np.pad(text, (0, longest - len(text)), "edge") for text in texts]))
        logits: Tensor = self._model(input_ids=ids.to(self.device), use_cache=False).logits
        ends = [logits[row, len(text) - steps - 1 : len(text)] for row, text in enumerate(texts)]
        return torch.stack(ends).float().log_softmax(-1)

    @torch.inference_mode()
    def scores(self, texts: Sequence[np.ndarray], top: int) -> list[TextScores]:
        """Score the tokens of texts; see `Engine.score`."""
        room, scores = max(1, _SCORED // self.vocabulary), dict[int, TextScores]()
        order = sorted(range(len(texts)), key=lambda number: -len(texts[number]))
        for run in rectangles([(texts[number], number) for number in order], room=room):
            longest = len(run[0][0])  # what stands behind a text changes nothing in it
            rows = np.stack([np.pad(text, (0, longest - len(text)), "edge") for text, _ in run])
            ids = torch.from_numpy(rows).to(self.device)
            nexts = ids[:, 1:].split(room, dim=1)
            parts = [_measures(*both, top) for both in zip(self._in_pieces(ids[:, :-1], room), nexts, strict=True)]
            columns = [torch.cat(part, dim=1).cpu().numpy() for part in zip(*parts, strict=True)]
            if np.isnan(columns[0]).any():
                weights = f"weights of version {self.version} in {self.dtype}"
                raise FloatingPointError(f"the engine's model gave logits that are not finite, with {weights}")
            for row, (text, number) in enumerate(run):
                scores[number] = TextScores(*(column[row, : len(text) - 1] for column in columns))
        return [scores[number] for number in range(len(texts))]

    def _in_pieces(self, ids: Tensor, room: int) -> Iterator[Tensor]:
        """Logits after every token of texts, [rows, some, vocabulary], of so many columns at a time."""
        whole = ids.shape[1] <= room
        remembering = {} if whole else {self._cache_name: self._caches.empty_cache(self._model)}
        for piece in ids.split(room, dim=1):
            if piece.shape[1] == 0:  # of a single token nothing is scored
                yield torch.empty((*piece.shape, self.vocabulary), device=self.device)
                continue
            yield self._model(input_ids=piece, use_cache=not whole, **remembering).logits
            if self._routers is not None:
                self._routers.taken()  # nobody generates from them

    @torch.inference_mode()
    def stepped(self) -> Results:
        """Log-probs after the last tokens of made-up texts, that are read but for these tokens and then stepped."""
        texts = self._texts()
        ragged, alike = texts[: len(_RAGGED)], texts[len(_RAGGED) :]
        return Results(torch.cat([self._stepped(ragged), self._stepped(alike)]).log_softmax(-1))

    def truth(self, compute: Callable[[], Tensor] | None = None) -> Truth:
        """Right numbers, by default those for `stepped`.

        Args:
            compute: gives it by `whole`.
        """
        numbers = compute or (lambda: self.whole(self._texts(), _STEPS))
        return Truth.of(lambda: Results(numbers()), self._model, blocks(self._model), self.dtype)

    def _texts(self) -> list[np.ndarray]:
        longest = (getattr(self._model.config, "max_position_embeddings", None) or _RAGGED[0] + _STEPS) - _STEPS
        wanted = [length_of_text(length, self.dtype) for length in (*_RAGGED, *_ALIKE)]
        lengths = [max(1, min(length, longest)) for length in wanted]
        return [(np.arange(length + _STEPS) * 7919 + 31 * n) % self.vocabulary for n, length in enumerate(lengths)]

    def _stepped(self, texts: Sequence[np.ndarray]) -> Tensor:
        """Logits after the last tokens of texts, longest first, that are read and stepped together."""
        every, lengths = np.arange(len(texts)), np.array([len(text) - _STEPS for text in texts])
        band, first = None, []
        for run in [every] if self.pads else np.split(every, len(every)):
            logits, layers = self.read(*pad_left([texts[row][:-_STEPS] for row in run.tolist()], self.device))
            band = band or Band(layers, _STEPS)
            band.place(run, lengths[run], layers, torch.arange(len(run), device=self.device))
            first.append(logits)
        assert band is not None
        logits_of_steps = [torch.cat(first)]
        for number in range(_STEPS):
            tokens = torch.from_numpy(np.stack([text[number - _STEPS] for text in texts])).to(self.device)
            band.reserve()
            logits_of_steps.append(self.step(tokens, torch.from_numpy(lengths + number).to(self.device), [band]))
            band.advance()
        return torch.stack(logits_of_steps, dim=1).float()

    def _step(self, ids: Tensor, positions: Tensor, band: Band) -> Tensor:
        real = band.real() if self._caches.keeps_columns(self._like) else None
        cache = self._caches.BandCache(band, self._like)
        return self._logits_of(ids[:, None], positions[:, None], real, cache)

    def _logits_of(
        self, ids: Tensor, positions: Tensor, mask: Tensor | None, cache: Cache, pixels: dict[str, Tensor] | None = None
    ) -> Tensor:
        """Logits after the last column, [rows, vocabulary]."""
        inputs = {"attention_mask": mask, "position_ids": positions, "logits_to_keep": 1, self._cache_name: cache}
        inputs |= pixels or {}
        output = self._model(
            input_ids=ids, use_cache=True, **{name: each for name, each in inputs.items() if name in self._takes}
        )
        logits: Tensor = output.logits[:, -1]
        if self._routers is not None:
            self._routes.append(self._routers.taken())
        return logits

    def check(self, weights: Weights) -> None:
        """Raise ValueError if `weights` are not this model's, by name and shape; changes nothing."""
        if weights.adapter is not None:
            if self.adapters is None:
                raise ValueError(
                    f"adapters {weights.adapter}: {type(self._model).__name__} is decoded without any here"
                )
            return self.adapters.check(weights)
        for each in weights.adapters:
            self.check(each)
        own = {name: tuple(parameter.shape) for name, parameter in self._model.named_parameters()} | self.int8.shapes
        kinds = {name: tensor.dtype for name, tensor in weights.named()}
        odd = "; ".join(f"{name} is of {kind}" for name, kind in kinds.items() if not kind.is_floating_point)
        if problems := misfits(own, weights.shapes) or odd:
            raise ValueError(
                f"weights of version {weights.version} do not fit {type(self._model).__name__}: {problems}"
            )

    def load(self, weights: Weights) -> None:
        """Take `weights`, cast to the model's type, or raise ValueError and change nothing.

        While the model is parked they are kept as they came, and taken when it is back: there is no device to put
        them on.
        """
        self.check(weights)
        if weights.adapter is not None and self.adapters is not None:
            return self.adapters.load(weights)
        self.version = weights.version
        if self._parking is not None and self._parking.parked:
            self._arrived = weights
        else:
            self._take(weights)

    @torch.no_grad()
    def _take(self, weights: Weights) -> None:
        parameters, tensors = dict(self._model.named_parameters()), dict(weights.named())
        rounded = frozenset[str]() if self.float8 is None else self.float8.names
        if weights.version_now is not None and self._version_now is None:
            for name, parameter in parameters.items():
                if name not in rounded:
                    parameter.data = tensors[name].to(self.device, self.dtype)
            self._join()
            give_back_freed()
        self._version_now = weights.version_now
        for each in weights.adapters if self.adapters is not None else ():
            self.adapters.load(each)  # type: ignore[union-attr]
        self.int8.load(tensors)
        for name in parameters:
            if self.float8 is not None and name in rounded:
                self.float8.put(name, tensors[name].to(self.device), parameters[name])
            elif weights.version_now is None or parameters[name].data_ptr() != tensors[name].data_ptr():
                parameters[name].copy_(tensors[name])

    def _join(self) -> None:
        """Find the parameters again, which have other memory."""

    def check_current(self) -> None:
        """See that the weights are those that were loaded.

        Raises:
            RuntimeError: they are a trainer's own tensors, and it has learned since.
        """
        if self._version_now is not None and self._version_now() != self.version:
            raise RuntimeError(
                f"the engine was to answer by version {self.version} of the trainer's own tensors, and they are of "
                f"version {self._version_now()} by now: call rollout.load(trainer.weights()) after trainer.train"
            )

    def park(self) -> None:
        """Give the memory of all weights back; `read` and `step` need them again."""
        self._parking = self._parking or Parking(self._held)
        self._parking.park()

    def unpark(self) -> None:
        """Undo `park`, with the weights that have come meanwhile, in place of which the old ones are not copied."""
        if self._parking is not None:
            self._parking.unpark(without=() if self._arrived is None else self._model.parameters())
        if self._arrived is not None:
            self._take(self._arrived)
            self._arrived = None

    def _held(self) -> list[Tensor]:
        """All that lies on the device."""
        return [*self._model.parameters(), *self._model.buffers()]


@torch.inference_mode()
def continues(forward: ModelForward, truth: Truth) -> bool:
    """True if made-up texts give what is right when their beginnings are read first and the rest later."""
    if not forward.pads:  # a state of fixed size is that of the whole text, and cannot be cut
        return False
    ids, real = pad_left([text[:-_STEPS] for text in forward._texts()[: len(_RAGGED)]], forward.device)
    if real is None:  # a model of so short a context that all texts fill it
        real = torch.ones_like(ids, dtype=torch.bool)
    try:
        _, past = forward.read(ids[:, :-_REST], real[:, :-_REST])
        logits, _ = forward.read(ids[:, -_REST:], real, (), past)
    except Exception:  # of a model that cannot: then every turn is read whole
        return False
    texts = slice(0, len(ids))
    return truth.at(texts, 0).refuses(Results(logits.float().log_softmax(-1))) is None


def positions_of(ids: Tensor, real: Tensor | None) -> Tensor:
    """Position of every token in its own text, int64 [rows, tokens]; 0 in the padding before it.

    `real` may be wider than `ids`, by what was read before.
    """
    if real is None:
        return torch.arange(ids.shape[1], device=ids.device).expand(ids.shape)
    return (real.cumsum(dim=1) - 1).clamp(min=0)[:, -ids.shape[1] :]


def _measures(logits: Tensor, ids: Tensor, top: int) -> tuple[Tensor, ...]:
    """Columns of `TextScores`, [rows, tokens] and [rows, tokens, top], of tokens by the logits before them."""
    logprobs = logits.float().log_softmax(-1)
    own = logprobs.gather(-1, ids[..., None])
    values, likeliest = logprobs.topk(min(top, logprobs.shape[-1]), dim=-1)
    return own.squeeze(-1), (logprobs > own).sum(-1) + 1, likeliest, values


def rectangles(texts: Sequence[Job], *, pads: bool = True, room: int = _TOKENS) -> Iterator[list[Job]]:
    """Cut texts, longest first, into runs to be read together.

    Args:
        texts: tuples that begin with token ids, int64 [tokens].
        pads: those of a run may differ in length.
        room: tokens of a run, its padding included.

    Yields:
        Runs with at most an eighth of padding, or so little that it does not matter, and no more tokens than there is
        room for unless a single text has more.
    """
    run: list[Job] = []
    padding = 0
    for text in texts:
        if run:
            longest, own = len(run[0][0]), len(text[0])
            area = longest * (len(run) + 1)
            wasted = padding + longest - own
            if area > room or wasted > (max(_PADDING, area // 8) if pads else 0):
                yield run
                run, padding = [], 0
            else:
                padding = wasted
        run.append(text)
    if run:
        yield run


def pad_left(texts: Sequence[np.ndarray], device: torch.device) -> tuple[Tensor, Tensor | None]:
    """Token ids of texts, longest first, int64 [rows, longest], and which of them are real; None if all are."""
    longest = len(texts[0])
    ids = np.zeros((len(texts), longest), dtype=np.int64)
    for row, text in enumerate(texts):
        ids[row, longest - len(text) :] = text
    starts = longest - np.array([len(text) for text in texts])
    real = torch.from_numpy(np.arange(longest) >= starts[:, None]).to(device) if starts.any() else None
    return torch.from_numpy(ids).to(device), real


class LeanForward(ModelForward):
    """A faster `ModelForward` with the same answers, for models that are not `unlike` a Llama.

    Args:
        model: in place on its device, in evaluation mode; only `park` may take it from there: moving the module would
            part its parameters from the joined matrices.
        version: of the weights it has.
    """

    verifies = True
    pads = True  # type: ignore[assignment]  # it has attention alone

    def __init__(self, model: PreTrainedModel, version: int):
        super().__init__(model, version)
        self._join()
        self.adapters = RowAdapters(model, self.embedding)
        self._own: Own | None = None  # what adapters of the rows add to the logits

    def rows_by(self, names: Sequence[str | None]) -> None:
        assert self.adapters is not None
        own = self.adapters.of_rows(names) if any(names) else []
        for number, block in enumerate(self.blocks):
            block.own = own[number] if own else _NONE
        (self._own,) = own[-1] if own else (None,)

    def read(
        self,
        ids: Tensor,
        real: Tensor | None,
        images: Sequence[Sequence[ImageRef]] = (),
        past: Layers | None = None,
    ) -> tuple[Tensor, Layers]:
        hidden = F.embedding(ids, self.embedding)
        biases = self._biases(ids, real)
        cos, sin = self.angles(positions_of(ids, real), ids.shape[1] if real is None else real.shape[1])
        pairs = []
        for number, block in enumerate(self.blocks):
            before = None if past is None else past.pairs[number]
            hidden, pair = block.read(hidden, cos, sin, biases[block.window], before)
            pairs.append(pair)
        return self.logits(hidden[:, -1]), Layers(pairs)

    def step(self, ids: Tensor, positions: Tensor, bands: Sequence[Band]) -> Tensor:
        hidden = F.embedding(ids, self.embedding)
        cos, sin = self.angles(positions, max(band.reach for band in bands))
        masks = {window: [band.mask(window) for band in bands] for window in self.windows}
        for number, block in enumerate(self.blocks):
            hidden = block.step(hidden, cos, sin, bands, masks[block.window], number)
        return self.logits(hidden)

    def watch(self) -> bool:
        return False  # a Llama has no experts

    def _held(self) -> list[Tensor]:
        return [*super()._held(), self._cos, self._sin]

    def _join(self) -> None:
        trunk: Any = self._model.model
        windows = windows_of(self._model)
        self.blocks = [Block(layer, window) for layer, window in zip(trunk.layers, windows, strict=True)]
        self.windows = set(windows)
        self.embedding: Tensor = trunk.embed_tokens.weight
        self._norm = trunk.norm
        self._head: nn.Linear = self._model.lm_head  # type: ignore[assignment]
        self._rotary = trunk.rotary_emb
        self._cos = self._sin = self.embedding.new_empty(0, 0)

    def _biases(self, ids: Tensor, real: Tensor | None) -> dict[int | None, Tensor | None]:
        """Additive masks for the scores of texts, by the layer's window; None where all that came before is seen."""
        columns = ids.shape[1] if real is None else real.shape[1]
        biases: dict[int | None, Tensor | None] = {}
        for window in self.windows:
            whole = window is None or window >= columns
            every = torch.ones_like(ids, dtype=torch.bool) if real is None else real
            biases[window] = None if real is None and whole else causal_bias(every, self.dtype, ids.shape[1], window)
        return biases

    def logits(self, hidden: Tensor) -> Tensor:
        """[rows, hidden] to [rows, vocabulary]."""
        logits = _product(normed := _rms_norm(hidden, self._norm), self._head.weight, self._head.bias)
        return logits if self._own is None else self._own.onto(logits, normed)

    def angles(self, positions: Tensor, length: int) -> tuple[Tensor, Tensor]:
        """Cosines and sines for every head of these positions, all below `length`, [..., 1, head size]."""
        self.reach(length)
        return self._cos[positions], self._sin[positions]

    def reach(self, length: int) -> None:
        """Have angles for all positions below `length`; they move only where they had not reached so far."""
        if length > len(self._cos):
            every = torch.arange(2 * length, device=self.embedding.device)[None]
            cos, sin = self._rotary(self.embedding, every)
            half = sin.shape[-1] // 2
            self._cos = cos[0, :, None]
            self._sin = torch.cat([-sin[0, :, :half], sin[0, :, half:]], dim=-1)[:, None]  # see `Block.heads`

    def addresses(self) -> tuple[int, ...]:
        """Where all that steps read lies: a recording of a step is of these addresses."""
        joined = [part for block in self.blocks for part in (*block.qkv, *block.gate_up) if isinstance(part, Tensor)]
        return tuple(tensor.data_ptr() for tensor in (*self._held(), *joined))


_NONE: tuple[Own | None, ...] = (None,) * 4


class Block:
    """One transformer layer, which sees so many tokens at most, itself included; None for all."""

    def __init__(self, layer: Any, window: int | None):
        self.window = window
        attention, mlp = layer.self_attn, layer.mlp
        self.norms = (layer.input_layernorm, layer.post_attention_layernorm)
        self.qkv = _joined([attention.q_proj, attention.k_proj, attention.v_proj])
        self.head_norms = (getattr(attention, "q_norm", None), getattr(attention, "k_norm", None))
        self.output: nn.Linear = attention.o_proj
        self.gate_up = _joined([mlp.gate_proj, mlp.up_proj])
        self.down: nn.Linear = mlp.down_proj
        self.head = int(attention.head_dim)
        self.queries = attention.q_proj.out_features // self.head
        self.keys = attention.k_proj.out_features // self.head
        self.scale = float(attention.scaling)
        self.own: tuple[Own | None, ...] = _NONE
        """Additions of the rows' adapters to the four products of the block."""

    def read(
        self, hidden: Tensor, cos: Tensor, sin: Tensor, bias: Tensor | None, past: tuple[Tensor, Tensor] | None
    ) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        """[rows, tokens, hidden] to the same, with the keys and values of these tokens and of those before them, each
        [rows, key-value heads, tokens, head size]."""
        turned, values = self.heads(hidden, cos, sin)
        query = turned[..., : self.queries, :].transpose(1, 2)
        keys, values = turned[..., self.queries :, :].transpose(1, 2), values.transpose(1, 2)
        if past is not None:
            keys, values = torch.cat([past[0], keys], dim=2), torch.cat([past[1], values], dim=2)
        grouped = hidden.device.type == "cpu"  # elsewhere no fast kernel takes a mask and fewer keys than queries
        repeats = self.queries // self.keys
        attended = F.scaled_dot_product_attention(
            query,
            keys if grouped else keys.repeat_interleave(repeats, dim=1),
            values if grouped else values.repeat_interleave(repeats, dim=1),
            attn_mask=bias,
            is_causal=bias is None,
            scale=self.scale,
            enable_gqa=grouped,
        )
        return self.finish(hidden, attended.transpose(1, 2).flatten(2)), (keys, values)

    def step(
        self,
        hidden: Tensor,
        cos: Tensor,
        sin: Tensor,
        bands: Sequence[Band],
        masks: Sequence[Tensor | None],
        number: int,
    ) -> Tensor:
        """[tokens, hidden] to the same; `number` is the layer's, in the bands."""
        turned, values = self.heads(hidden, cos, sin)
        parts = []
        start = 0
        for band, mask in zip(bands, masks, strict=True):
            some = slice(start, start + band.tokens)
            start = some.stop
            keys, past_values = band.write(number, turned[some, self.queries :], values[some], self.window)
            if band.alone:
                # The queries that share a key are the "tokens" of one head: no key is repeated.
                query = turned[some, : self.queries].view(len(band), self.keys, -1, self.head)
                attended = F.scaled_dot_product_attention(query, keys, past_values, attn_mask=mask, scale=self.scale)
                parts.append(attended.reshape(len(band), -1))
                continue
            query = band.by_row(turned[some, : self.queries]).transpose(1, 2)
            attended = F.scaled_dot_product_attention(
                query, keys, past_values, attn_mask=mask, scale=self.scale, enable_gqa=True
            )
            parts.append(band.by_token(attended.transpose(1, 2)).flatten(1))
        return self.finish(hidden, parts[0] if len(parts) == 1 else torch.cat(parts))

    def heads(self, hidden: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        """Rotated queries and keys, [..., heads, head size], and values."""
        turning, values = self.unturned(hidden)
        # The halves change places, and the sines carry the minus sign of the first.
        return torch.addcmul(turning * cos, turning.roll(self.head // 2, dims=-1), sin), values

    def unturned(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """Queries and keys before they are rotated, [..., heads, head size], and values."""
        heads = _product(normed := _rms_norm(hidden, self.norms[0]), *self.qkv)
        heads = heads if self.own[0] is None else self.own[0].onto(heads, normed)
        heads = heads.view(*heads.shape[:-1], self.queries + 2 * self.keys, self.head)
        turning, values = heads.split([self.queries + self.keys, self.keys], dim=-2)
        query_norm, key_norm = self.head_norms
        if query_norm is not None and key_norm is not None:
            query, key = turning.split([self.queries, self.keys], dim=-2)
            turning = torch.cat([_rms_norm(query, query_norm), _rms_norm(key, key_norm)], dim=-2)
        return turning, values

    def finish(self, hidden: Tensor, attended: Tensor) -> Tensor:
        """Compute the rest of the block after attention: its output projection and the feed-forward layer."""
        _, own_output, own_gate_up, own_down = self.own
        hidden = _product(attended, self.output.weight, self.output.bias, hidden)
        hidden = hidden if own_output is None else own_output.onto(hidden, attended)
        both = _product(normed := _rms_norm(hidden, self.norms[1]), *self.gate_up)
        gate, up = (both if own_gate_up is None else own_gate_up.onto(both, normed)).chunk(2, dim=-1)
        hidden = _product(inner := F.silu(gate).mul_(up), self.down.weight, self.down.bias, hidden)
        return hidden if own_down is None else own_down.onto(hidden, inner)


def causal_bias(real: Tensor, dtype: torch.dtype, tokens: int, window: int | None = None) -> Tensor:
    """Additive mask for the scores of the last tokens of texts aligned at their ends, [rows, 1, tokens, columns].

    Args:
        real: which tokens are no padding, bool [rows, columns].
        dtype: of the scores.
        tokens: how many of each text look at it.
        window: tokens that a token sees at most, itself included; None for all.
    """
    columns = torch.arange(real.shape[1], device=real.device)
    looking = columns[-tokens:, None]
    causal = columns <= looking
    if window is not None:
        causal &= columns > looking - window
    # Padding sees itself: a row of attention that sees nothing is NaN, and 0 x NaN spreads from the cache.
    itself = columns == looking
    hidden = ~((real[:, None, :] & causal) | itself)
    return torch.zeros(hidden.shape, dtype=dtype, device=real.device).masked_fill_(hidden, -torch.inf)[:, None]


def _rms_norm(hidden: Tensor, norm: Any) -> Tensor:
    weight: Tensor = norm.weight
    return F.rms_norm(hidden, weight.shape, weight, norm.variance_epsilon)


def _product(inputs: Tensor, weight: Tensor | Int8Weight, bias: Tensor | None, onto: Tensor | None = None) -> Tensor:
    """A linear layer, and what it is added to."""
    if not isinstance(weight, Tensor):
        return weight.product(inputs, bias, onto)
    outputs = F.linear(inputs, weight, bias)
    return outputs if onto is None else onto + outputs


def _joined(linears: Sequence[Any]) -> tuple[Tensor | Int8Weight, Tensor | None]:
    """Weight and bias of all in one; the parameters become parts of them."""
    whole = join(linears) if isinstance(linears[0], Int8Linear) else _join([linear.weight for linear in linears])
    return whole, None if linears[0].bias is None else _join([linear.bias for linear in linears])


def _join(parameters: Sequence[Tensor]) -> Tensor:
    first, storages = parameters[0].detach(), {each.untyped_storage().data_ptr() for each in parameters}
    starts = accumulate((each.nbytes for each in parameters[:-1]), initial=first.data_ptr())
    if len(storages) == 1 and [*starts] == [each.data_ptr() for each in parameters]:  # they lie so already
        return first.as_strided((sum(map(len, parameters)), *first.shape[1:]), first.stride())
    joined = torch.cat([parameter.detach() for parameter in parameters])
    for parameter, part in zip(parameters, joined.split([len(parameter) for parameter in parameters]), strict=True):
        parameter.data = part
    return joined


@torch.no_grad()
def join_parts(model: PreTrainedModel) -> None:
    """Lay the parameters that `LeanForward` reads in one next to one another, so that an engine can compute on them."""
    for parameter in model.parameters():  # off the file that they may be mapped from, which would stay in memory
        parameter.data = parameter.clone()
    if unlike(model) is None:
        for layer in model.model.layers:  # type: ignore[union-attr]
            Block(layer, None)


_ROTATIONS = {"default", "linear", "llama3", "yarn"}  # those whose angles do not depend on how long the text is
_LINEAR = (nn.Linear, Int8Linear)
_PARTS = {"input_layernorm", "self_attn", "post_attention_layernorm", "mlp"}


_WINDOWED = {"mistral", "ministral", "qwen2", "qwen3", "smollm3", "cwm"}
"""Kinds of model whose windows are those that their configuration says, in the layers that it says."""


def fastest(model: PreTrainedModel, version: int, pictures: Pictures | None = None) -> ModelForward:
    """The lean forward if it is as near to the truth as the model's own, else that.

    Args:
        model: in place on its device, in evaluation mode.
        version: of the weights it has.
        pictures: see `ModelForward`.

    Raises:
        ValueError: the model does not give the same token by token as for a whole text.
    """
    own = ModelForward(model, version, pictures)
    with own.int8.exactly():
        try:
            forward, truth = _nearest(own, model)
        except _REFUSALS as error:
            name = f"{type(model).__name__} (model_type {model.config.model_type})"
            raise ValueError(f"{name} cannot be read token by token: {type(error).__name__}: {error}") from error
        forward.continues = continues(forward, truth)
    return forward


def _nearest(own: ModelForward, model: PreTrainedModel) -> tuple[ModelForward, Truth]:
    """The lean forward, or else the model's own, which decodes as the model reads whole texts; and what is right."""
    truth = own.truth()
    own.slower = unlike(model)
    if own.slower is None:
        lean = LeanForward(model, own.version)
        own.slower = truth.refuses(lean.stepped())
        if own.slower is None:
            return lean, truth
    why = truth.refuses(own.stepped(), torch.arange(len(_RAGGED) + len(_ALIKE)))
    if why is not None:
        raise ValueError(f"it does not give the same token by token as it gives for whole texts: {why}")
    return own, truth


def windows_of(model: PreTrainedModel) -> list[int | None]:
    """How many tokens each layer sees at most, itself included; None for all."""
    config = model.config.get_text_config()
    window = getattr(config, "sliding_window", None)
    kinds = getattr(config, "layer_types", None) or ["sliding_attention"] * config.num_hidden_layers
    return [window if kind == "sliding_attention" else None for kind in kinds]


def unlike(model: PreTrainedModel) -> str | None:
    """In what a model differs from a Llama; None if it has the parts of one and no others."""
    trunk, head = getattr(model, "model", None), getattr(model, "lm_head", None)
    parts = {name for name, _ in getattr(trunk, "named_children", list)()}
    if type(head) not in _LINEAR or parts != {"embed_tokens", "layers", "norm", "rotary_emb"}:
        return f"{type(model).__name__} has other parts than a Llama"
    assert isinstance(trunk, nn.Module)
    if str(getattr(trunk.rotary_emb, "rope_type", None)) not in _ROTATIONS:  # models with several have a dict
        return f"{type(model).__name__} turns queries and keys in another way than a Llama"
    if model.config.model_type not in _WINDOWED and any(windows_of(model)):
        return f"the windows of model_type {model.config.model_type} are not known"
    layers: Any = trunk.layers
    if not hasattr(trunk.norm, "variance_epsilon") or not all(_layer_fits(layer) for layer in layers):
        return f"the layers of {type(model).__name__} are not those of a Llama"
    return None


def _layer_fits(layer: nn.Module) -> bool:
    if {name for name, _ in layer.named_children()} != _PARTS:
        return False
    attention, mlp = dict(layer.self_attn.named_children()), dict(layer.mlp.named_children())  # type: ignore[union-attr]
    joined = [[attention.get(f"{x}_proj") for x in "qkv"], [mlp.get("gate_proj"), mlp.get("up_proj")]]
    linears = [*joined[0], *joined[1], attention.get("o_proj"), mlp.get("down_proj")]
    if any(type(linear) not in _LINEAR for linear in linears):
        return False
    for group in joined:  # a bias on all or on none
        if len({getattr(linear, "bias", None) is None for linear in group}) != 1:
            return False
    norms = [layer.input_layernorm, layer.post_attention_layernorm]
    norms += [attention[name] for name in ("q_norm", "k_norm") if name in attention]
    return (
        all(hasattr(norm, "variance_epsilon") for norm in norms) and "silu" in type(mlp.get("act_fn")).__name__.lower()
    )
