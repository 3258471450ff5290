"""A Hugging Face model as the trainer uses it: packed tokens in; log-probs and entropies, or a critic's values, out.

The model's own layers run over all tokens in one row without padding; the output embedding runs over learned tokens
alone, in chunks. `PolicyModel` is a module so that both happen inside one `forward`, the only place where the weights
of a model spread over ranks are whole. Whether a model can be run like this is not guessed from its name: its own
forward must agree in a trial.

Log-probs are computed without ever holding [tokens, vocabulary] for the batch. Logits are made chunk by chunk, used,
and made again for the gradient: one more product, against memory of 4 bytes x tokens x vocabulary x (three or four
copies). Those of a few tokens are kept instead. On accelerators a fused head (`kernels.py`) computes what is no product
of matrices, with the results of the operations here.

A critic's values say what the rest of an answer is expected to earn, as seen from the place that predicts each learned
token, so before that token is known. Its layers are those of a policy, run in the same way; one linear unit replaces
the output embedding. The unit is the model's `score`, the name that transformers gives to it in models for token
classification: what `save_pretrained` would write,
`AutoModelForTokenClassification.from_pretrained(path, num_labels=1)` reads.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any, ClassVar, Literal, NamedTuple, TypeVar, cast

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from transformers import PreTrainedModel

from rlinf.algos.loss_sum import wide
from rlinf.data.images import Pictures
from rlinf.data.packing import Packed, Row, pack, padded
from rlinf.models.distillation import Logits, TeacherHead, likeliest, logits_of
from rlinf.models.language.attention import ARGUMENT, NAME, REFUSALS, CompiledBlocks, Layout, checkpoint_blocks
from rlinf.models.language.kernels import HALF, CompileTime, FusedHead, Kernel, KernelName, device_at_fault, kernel_of
from rlinf.models.language.moe import Mixture, ModelOutputs, Replay, routers_of
from rlinf.models.language.pictures import in_rows, never, picture_inputs, with_blank, without
from rlinf.models.language.tenants import HeadProducts
from rlinf.models.language.tensor_parallel import Division, Share, TensorRanks
from rlinf.models.language.truth import Results, Truth, Way, blocks, length_of_text, sampled_gradient
from rlinf.models.language.working_copy import WorkingCopy
from rlinf.runtime.base.errors import WrongSetting

T = TypeVar("T")
_LOGIT_CHANGES = ("final_logit_softcapping", "logit_scale", "logits_scaling")
"""Keys of configurations by which models change their logits after the output embedding."""


def token_logprobs(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    temperature: Tensor | None,
    *,
    chunk: int,
    entropy_slope: bool = False,
    fused: FusedHead | None = None,
) -> tuple[Tensor, Tensor]:
    """Log-prob of each target, and entropy, under softmax((hidden weightᵀ + bias) / temperature).

    Args:
        hidden: [tokens, width]
        weight: [vocabulary, width]
        bias: [vocabulary], or None.
        targets: int64 [tokens]
        temperature: of each token, float32 [tokens]; None for 1.
        chunk: tokens whose logits exist at a time.
        entropy_slope: entropies are differentiable like log-probs; otherwise they are not.
        fused: what computes all but products of matrices; None for torch's operations one after the other.

    Returns:
        Log-probs, differentiable in hidden, weight and bias; and entropies; nats, [tokens], at least float32.
    """
    return _Head(chunk, entropy_slope, fused).logprobs(hidden, weight, bias, targets, temperature)


def logprobs_of_logits(
    logits: Tensor, targets: Tensor, temperature: Tensor | None, *, entropy_slope: bool = False
) -> tuple[Tensor, Tensor]:
    """Log-prob of each target, and entropy, from logits [tokens, vocabulary]; otherwise as `token_logprobs`."""
    logits = wide(logits)
    if temperature is not None:
        logits = logits / temperature[:, None]
    all_logprobs = torch.log_softmax(logits, dim=-1)
    with nullcontext() if entropy_slope else torch.no_grad():
        finite = all_logprobs.masked_fill(all_logprobs == -torch.inf, 0.0)
        entropy = -(all_logprobs.exp() * finite).sum(dim=-1)
    return all_logprobs.gather(1, targets[:, None]).squeeze(1), entropy


_TABLE = 1 << 26
"""Bytes of log-probs that are kept for the gradient at most, where one chunk has all tokens."""


class _Head(NamedTuple):
    """Settings of `token_logprobs`, see there."""

    chunk: int
    entropy_slope: bool
    fused: FusedHead | None
    rows: Sequence[slice] = ()
    """Tokens to whose logits adapters add, see `HeadProducts`."""

    def logprobs(
        self,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        temperature: Tensor | None,
        products: HeadProducts | None = None,
    ) -> tuple[Tensor, Tensor]:
        """See `token_logprobs`; differentiable by what adapters add, too."""
        how, matrices = (self, ()) if products is None else (self._replace(rows=products.rows), products.matrices)
        logprobs, entropy = _TokenLogprobs.apply(hidden, weight, bias, targets, temperature, how, *matrices)
        return logprobs, entropy

    def products(self, matrices: Sequence[Tensor]) -> HeadProducts | None:
        """The products that adapters add, of these matrices; None where there are none."""
        return HeadProducts(self.rows, self.chunk, matrices) if self.rows else None


class _TokenLogprobs(torch.autograd.Function):
    """With p = softmax(logits / T), made again in each chunk:

    d logp_t / d logits = (one_hot(t) - p) / T        dH / d logits = -p (log p + H) / T
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        temperature: Tensor | None,
        how: _Head,
        *matrices: Tensor,
    ) -> tuple[Tensor, Tensor]:
        chunk, fused, products = how.chunk, how.fused, how.products(matrices)
        count, table = len(hidden), None
        logprobs = torch.empty(count, dtype=wide(hidden[:0]).dtype, device=hidden.device)
        entropy = torch.empty_like(logprobs)
        norms = torch.empty_like(logprobs)
        for start in range(0, count, chunk):
            part = slice(start, start + chunk)
            raw, warmth = F.linear(hidden[part], weight, bias), _part(temperature, part)
            if products is not None:
                products.add(raw, start)
            if fused is not None:
                logprobs[part], entropy[part], norms[part] = fused.scores(raw, targets[part], warmth)
                continue
            logits = _warmed(raw, warmth)
            norms[part] = torch.logsumexp(logits, dim=-1)
            logprobs[part] = logits.gather(1, targets[part, None]).squeeze(1) - norms[part]
            logits.sub_(norms[part, None])
            entropy[part] = -torch.where(logits == -torch.inf, 0.0, logits.exp().mul_(logits)).sum(dim=-1)
            if any(ctx.needs_input_grad) and count <= chunk and logits.nbytes <= _TABLE:
                table = logits
        for_slopes = entropy if how.entropy_slope else None
        ctx.save_for_backward(hidden, weight, bias, targets, temperature, norms, for_slopes, *matrices)
        ctx.how, ctx.table = how, table
        if not how.entropy_slope:
            ctx.mark_non_differentiable(entropy)
        return logprobs, entropy

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        grad, grad_entropy = gradients
        hidden, weight, bias, targets, temperature, norms, entropy, *matrices = ctx.saved_tensors
        chunk, fused, products = ctx.how.chunk, ctx.how.fused, ctx.how.products(matrices)
        wants_hidden, wants_weight, wants_bias = ctx.needs_input_grad[:3]
        wanted = zip(matrices, ctx.needs_input_grad[6:], strict=True)
        for_matrices = [torch.zeros_like(each, dtype=norms.dtype) if wants else None for each, wants in wanted]
        # allocated even for no token at all: every rank must have a gradient to reduce
        for_hidden = torch.empty_like(hidden) if wants_hidden else None
        at_once = hidden.device.type == "cpu" and 0 < len(hidden) <= chunk  # there is nothing to sum
        sums = wants_weight and not at_once
        for_weight = torch.zeros(weight.shape, dtype=norms.dtype, device=weight.device) if sums else None
        for_bias = torch.zeros_like(bias, dtype=norms.dtype) if wants_bias else None
        for start in range(0, len(hidden), chunk):
            part = slice(start, start + chunk)
            inputs = (targets[part], _part(temperature, part))
            for_entropy = (None, None) if entropy is None else (grad_entropy[part], entropy[part])
            slopes = (grad[part], *for_entropy)
            logp, ctx.table = ctx.table, None  # it is overwritten
            if logp is None:
                raw = F.linear(hidden[part], weight, bias)
                if products is not None:
                    products.add(raw, start)
            if fused is None:
                logp = _warmed(raw, inputs[1]).sub_(norms[part, None]) if logp is None else logp
                slope = _slope(logp, *inputs, *slopes)
                if for_bias is not None:
                    for_bias += slope.sum(dim=0)
                slope = slope.to(hidden.dtype)
            elif for_bias is None:
                slope = fused.slopes(raw, *inputs, norms[part], *slopes)
            else:
                slope, summed = fused.slopes_and_bias(raw, *inputs, norms[part], *slopes)
                for_bias += summed
            if products is not None:
                products.learn(slope, start, for_matrices)
            if for_hidden is not None:
                torch.mm(slope, weight, out=for_hidden[part])
            if wants_weight and at_once:
                for_weight = slope.t() @ hidden
            elif for_weight is not None:
                _add_product(for_weight, slope, hidden[part])
        return (
            for_hidden,
            None if for_weight is None else for_weight.to(weight.dtype),
            None if for_bias is None else for_bias.to(bias.dtype),
            *(None, None, None),
            *(None if each is None else each.to(like.dtype) for each, like in zip(for_matrices, matrices, strict=True)),
        )


def _part(tensor: Tensor | None, part: slice) -> Tensor | None:
    return None if tensor is None else tensor[part]


def _add_product(total: Tensor, slope: Tensor, hidden: Tensor) -> None:
    """Add slopeᵀ hidden to a sum in float32 without another tensor of its size, where the device can."""
    if slope.dtype == total.dtype:
        total.addmm_(slope.t(), hidden)
    elif slope.device.type == "cuda" and total.dtype == torch.float32:
        torch.addmm(total, slope.t(), hidden, out_dtype=torch.float32, out=total)
    else:
        total += slope.t() @ hidden


def _slope(
    slope: Tensor,
    targets: Tensor,
    temperature: Tensor | None,
    grad: Tensor,
    grad_entropy: Tensor | None,
    entropy: Tensor | None,
) -> Tensor:
    """Gradient of the logits as `kernels.slopes` computes it, in place of their log-softmax."""
    if grad_entropy is None or entropy is None:
        slope.exp_().neg_()
        slope.scatter_add_(1, targets[:, None], torch.ones_like(slope[:, :1]))
        return slope.mul_((grad if temperature is None else grad / temperature)[:, None])
    slope = _both_slopes(slope, grad[:, None], grad_entropy[:, None], entropy[:, None])
    slope.scatter_add_(1, targets[:, None], grad[:, None])
    return slope if temperature is None else slope.div_(temperature[:, None])


def _both_slopes(logp: Tensor, grad: Tensor, grad_entropy: Tensor, entropy: Tensor) -> Tensor:
    """-p (grad + grad_entropy (log p + H)): what log-probs and entropies together ask of logits, but for the targets'.

    Args:
        logp: of every token of the vocabulary, [tokens, vocabulary]; used up.
        grad, grad_entropy, entropy: [tokens, 1].
    """
    p = logp.exp()
    finite = logp.masked_fill_(logp == -torch.inf, 0.0)
    return finite.add_(entropy).mul_(grad_entropy).add_(grad).mul_(p).neg_()


def _warmed(logits: Tensor, temperature: Tensor | None) -> Tensor:
    """Over their temperature, at least float32, in place where they are."""
    logits = wide(logits)
    return logits if temperature is None else logits.div_(temperature[:, None])


def _over(logits: Tensor, temperature: Tensor | None) -> Callable[[slice], Tensor]:
    """Logits that are there, over their temperature."""
    return lambda part: wide(logits[part]) if temperature is None else wide(logits[part]) / temperature[part, None]


def head_is_plain(model: PreTrainedModel) -> bool:
    """True if the model is not known to change its logits after the output embedding (scale, softcap); the small logits
    of a new model would not show that in a trial."""
    config = model.config.get_text_config()
    changed = any(getattr(config, name, None) not in (None, 1, 1.0) for name in _LOGIT_CHANGES)
    head = model.get_output_embeddings()
    return type(getattr(head, "base_layer", head)) is nn.Linear and not changed


Attention = Literal["auto", "packed", "padded", "flash", "any"]
"""How sequences may be computed: see `ForwardConfig.attention`. "any" is "auto" that pads on accelerators, too."""
Compile = Literal["auto", True, False]
"""See `ForwardConfig.compile`."""
_PROBE = ((21, 34), (40, 15), (5, 47), (21, 36), (40, 18))
"""Tokens of prompts and answers that a model is tried with; some share their prompt."""
_SPOILT = 2
"""Index in `_PROBE` of the sequence that shares no prompt."""


class _BeforeHead(NamedTuple):
    """Everything that logits are made of."""

    hidden: Tensor
    """[learned, width]"""
    weight: Tensor
    """[vocabulary, width]"""
    bias: Tensor | None
    products: HeadProducts | None
    """Additions of its adapters."""

    def logits(self, temperature: Tensor | None) -> Logits:
        """Logits when they are asked for."""
        add = None if self.products is None else self.products.add
        return logits_of(self.hidden, (self.weight, self.bias), temperature, add)

    def logprobs(self, how: _Head, targets: Tensor, temperature: Tensor | None) -> tuple[Tensor, Tensor]:
        """See `token_logprobs`."""
        return how.logprobs(self.hidden, self.weight, self.bias, targets, temperature, self.products)


class PolicyModel(nn.Module):
    """Log-probs by a causal language model.

    Dropout is off: the log-probs must be those of the policy that sampled.

    Args:
        model: the Hugging Face model; its parameters keep their names under `model`.
        chunk: response tokens whose logits exist at a time.
        gradient_checkpointing: keep only the input of each layer, and compute the rest again for the gradient.
        attention: among which ways to compute attention `settle` chooses.
        compiled: whether `settle` compiles the blocks, and what the head does beside products of matrices; "auto"
            leaves it to `weigh_compiling`, and goes on without where it cannot.
        router_replay: see `Mixture`.
        division: ranks with which it computes every micro-batch together; None for none, as with pictures.
        pictures: reads those of prompts; None if the model reads text alone.
    """

    compiler: ClassVar[str] = "inductor"
    """Back end of `torch.compile`."""

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        chunk: int = 1024,
        gradient_checkpointing: bool = False,
        attention: Attention = "any",
        compiled: Compile = False,
        router_replay: Replay | None = None,
        division: Division | None = None,
        pictures: Pictures | None = None,
    ):
        super().__init__()
        self.model = model.eval()
        self.pictures = pictures
        """Reads the pictures of prompts; None if the model reads text alone."""
        self.keeps_step = False
        """Other ranks compute on other rows of the model: it reads a blank picture where its own rows have none."""
        self.packs = True
        """Sequences lie one behind another; otherwise they are padded to one length."""
        self.plain_head = True
        """Logits are hidden states times the output embedding; otherwise the model makes them, all at once."""
        self.computes_in = torch.float32
        """The dtype that its layers compute in; `shard` and `compute_in` change it."""
        self._working: WorkingCopy | None = None
        self.kernel: Kernel | Literal[False] | None = None
        """The kernel for packed attention, see `Layout.of`; None until `settle`."""
        self._division = division
        self.tensor_ranks: TensorRanks | None = None
        """Those over which its matrices are split; None where they are whole."""
        self.teacher: TeacherHead | None = None
        """Computes divergences of batches that have a teacher's distributions."""
        self._chunk, self._attention = chunk, attention
        self.mixture = Mixture.of(model, router_replay, compiled=compiled is not False)
        """Its experts, if it has any and they are watched."""
        self.refused: tuple[str, ...] = ()
        """Why `settle` did not take ways that would be better."""
        self._refusals: list[str] | None = None
        self._compile, self._checkpointed = compiled, gradient_checkpointing
        self._undecided: tuple[CompileTime, Packed, DeviceMesh | None] | None = None
        self.payoff = ""
        """Reason for compiling, or for not doing so; empty while nothing is decided."""
        self._layers = blocks(model)  # found by their classes' names, which FSDP2 changes
        self._blocks: CompiledBlocks | None = None
        self._fused: FusedHead | None = None
        self._padded_attention: str = model.config._attn_implementation or "sdpa"
        self._use(packs=True, plain_head=head_is_plain(model))
        if gradient_checkpointing:
            checkpoint_blocks(self._layers)

    def forward(self, batch: Packed, *, entropy_slope: bool = False, likeliest: int = 0) -> ModelOutputs:
        """Log-prob and entropy of every learned token, under softmax(logits / temperature).

        Args:
            batch: the sequences.
            entropy_slope: entropies are differentiable, too.
            likeliest: not 0: so many tokens instead that are likeliest in place of every learned one.

        Returns:
            Log-probs, differentiable, and entropies; nats, float32 [learned]. Then `Routed`, if routers are watched.
            Of the likeliest, the likeliest first: tokens, int64 [learned, likeliest], and their log-probs.
            Last, where there is a `teacher` and the batch has its column, divergences, differentiable, [learned].
        """
        with self.computing():
            return self._likeliest(batch, likeliest) if likeliest else self._scored(batch, entropy_slope)

    def _likeliest(self, batch: Packed, count: int) -> ModelOutputs:
        if self._share(batch) is not None:
            raise ValueError("the likeliest tokens are not told of a model that is split over processes")
        if self.plain_head:
            logits = self._before_head(batch, None).logits(batch.temperature)
        else:
            logits = _over(self._own_logits(batch, None), batch.temperature)
        return likeliest(logits, len(batch.targets), self._chunk, count)

    def _own_logits(self, batch: Packed, share: Share | None) -> Tensor:
        """Logits as the model makes them, [learned, vocabulary]."""
        logits = self._outputs(self.model, batch, "logits", share)
        return logits if self.pictures is None else logits + never(self.pictures, logits)

    def _before_head(self, batch: Packed, share: Share | None, some: Tensor | None = None) -> _BeforeHead:
        head: Any = self.model.get_output_embeddings()
        hidden, bias = self._outputs(self.model.base_model, batch, "last_hidden_state", share, some), head.bias
        if self.pictures is not None:
            banned = never(self.pictures, head.weight[:, 0])
            bias = banned if bias is None else bias + banned
        products = HeadProducts.of(head, hidden, self._chunk) if hasattr(head, "lora_A") else None
        return _BeforeHead(hidden, head.weight, bias, products)

    def _scored(self, batch: Packed, entropy_slope: bool) -> ModelOutputs:
        share = self._share(batch)
        mine = batch if share is None else share.batch
        column = None if self.teacher is None else batch.columns.get(self.teacher.column)
        some = mine.distinct if self.packs and column is None else None
        student: Callable[[], Logits]  # made for a teacher alone
        if not self.plain_head:
            logits = self._own_logits(batch, share)
            outputs = logprobs_of_logits(logits, mine.targets, mine.temperature, entropy_slope=entropy_slope)
            student = partial(_over, logits, mine.temperature)
        else:
            before = self._before_head(batch, share, some)
            student = partial(before.logits, mine.temperature)
            how, targets, temperature = _Head(self._chunk, entropy_slope, self._fused), mine.targets, mine.temperature
            if some is not None:
                targets, temperature = targets[some], None if temperature is None else temperature[some]
            outputs = before.logprobs(how, targets, temperature)
            if some is not None and mine.alike is not None:
                outputs = outputs[0].index_select(0, mine.alike), outputs[1].index_select(0, mine.alike)
        outputs = outputs if share is None else (share.whole(outputs[0]), share.whole(outputs[1]))
        whole: ModelOutputs = outputs if self.mixture is None else (*outputs, self.mixture.routed(share))
        if self.teacher is None or column is None:
            return whole
        return (*whole, self.teacher.divergences(student(), column, batch.temperature))  # type: ignore[return-value]

    def distributions(self, batch: Packed, top_k: int | None) -> tuple[Tensor, Tensor]:
        """A teacher's side: log-prob of every learned token, and what `TeacherHead` reads beside it.

        Args:
            batch: the sequences.
            top_k: of each token so many of the likeliest, [learned, 2, k]; None for hidden states, [learned, width].
        """
        with self.computing():
            if self.plain_head:
                before = self._before_head(batch, None)
                logits = before.logits(batch.temperature)
                logprobs = before.logprobs(_Head(self._chunk, False, self._fused), batch.targets, batch.temperature)[0]
                if top_k is None and before.products is not None:
                    raise ValueError(
                        "adapters of a teacher's output embedding are not in the embedding that students read: set "
                        "top_k of the divergence"
                    )
                if top_k is None:
                    return logprobs, before.hidden.float()
            else:
                raw = self._own_logits(batch, None)
                logits = _over(raw, batch.temperature)
                logprobs = logprobs_of_logits(raw, batch.targets, batch.temperature)[0]
                assert top_k is not None  # whoever asks for hidden states sees that the head is plain
            ids, top = likeliest(logits, len(batch.targets), self._chunk, top_k)
            return logprobs, torch.stack([ids.float(), top], dim=1)

    def _share(self, batch: Packed) -> Share | None:
        """This rank's part of a micro-batch; None for all of it."""
        return None if self._division is None or not self.packs else self._division.share(batch)

    def _outputs(
        self, part: Any, batch: Packed, output: str, share: Share | None, some: Tensor | None = None
    ) -> Tensor:
        """Output of `part` of the model where this rank's learned tokens are predicted, [learned, ...]; or `some` of
        them."""
        blank = self.keeps_step and self.pictures is not None and not batch.images
        batch = with_blank(batch, self.pictures) if blank and self.pictures is not None else batch
        if batch.images and self.pictures is None:
            raise ValueError(f"{type(self.model).__name__} reads no pictures, and prompts have {len(batch.images)}")
        if self.packs:
            texts = batch if share is None else share.texts
            layout = Layout.of(
                texts.lengths,
                batch.ids.device,
                self.computes_in,
                texts.places,
                stands=texts.stands,
                kernel=self.kernel,
                pieces=None if share is None else share.pieces,
                refusals=self._refusals,
            )
            mine, positions = (batch, batch.positions) if share is None else (share.batch, share.positions)
            tensors: Mapping[str, Tensor] = {}
            if self.pictures is not None:
                pictures = picture_inputs(batch, self.pictures, blank=blank)
                positions, tensors = pictures.positions, pictures.tensors
            if self.mixture is not None:
                self.mixture.begin(mine, mine.predicting())
            inputs = {
                "input_ids": mine.ids[None],
                "position_ids": positions.unsqueeze(-2),
                # without it transformers looks for sequences itself
                "attention_mask": torch.ones_like(mine.ids[None]),
                ARGUMENT: replace(layout, parts=batch.parts) if batch.parts else layout,
                **tensors,
            }
            whole: Tensor = getattr(part(**inputs, use_cache=False), output)[0]
            at = mine.predicting()
            return whole.index_select(0, at if some is None else at[some])
        ids, places = padded(batch)
        at = places.index_select(0, batch.predictors)
        if self.mixture is not None:
            self.mixture.begin(batch, at, (places, ids.numel()))
        inputs = {"input_ids": ids}
        if self.pictures is not None:
            pictures = in_rows(batch, self.pictures, places, ids.shape[1], blank=blank)
            inputs |= {"position_ids": pictures.positions, **pictures.tensors}
        whole = getattr(part(**inputs, use_cache=False), output).flatten(0, 1)
        return whole.index_select(0, at)

    @property
    def divided(self) -> bool:
        """Several ranks compute every micro-batch together."""
        return self._division is not None

    def compute_in(self, dtype: torch.dtype) -> None:
        """Compute in this dtype from weights that are whole here; what learns of them stays float32."""
        self.computes_in = dtype
        if dtype in HALF:
            self._working = WorkingCopy(self._cast_weights, dtype)

    def _cast_weights(self) -> Iterator[tuple[nn.Module, str]]:
        """Module and name of every weight that is cast to the dtype that it computes in."""
        for module in self.modules():
            yield from ((module, name) for name, _ in module.named_parameters(recurse=False))

    def computing(self) -> AbstractContextManager[None]:
        """Have all of it compute in its dtype: to be entered around a forward pass and its backward pass, in which
        checkpointed blocks are computed again."""
        return nullcontext() if self._working is None else self._working.in_place()

    def invalidate(self, *, free: bool = False, renew: bool = False) -> None:
        """Its weights have changed: what it computes with is made anew by the next pass.

        Args:
            free: give back the memory of that until then.
            renew: some came or went.
        """
        if self._working is not None:
            self._working.free() if free else self._working.renew() if renew else self._working.invalidate()

    def settle(self, ranks: DeviceMesh | None = None) -> None:
        """Find out how the model can be run; call it once, on all ranks together, when the weights are there.

        A way is taken if it works on every rank: ranks that computed in two ways might wait for each other forever.

        Args:
            ranks: all that train the model, in one dimension; None for one, or for ranks that go each their own way.

        Raises:
            ValueError: it can be run in no way that `attention` permits, or not be compiled though it must.
        """
        device = next(self.parameters()).device
        scaled = partial(length_of_text, dtype=self.computes_in)
        rows = [Row.made_up(scaled(prompt), scaled(answer), n) for n, (prompt, answer) in enumerate(_PROBE)]
        probe = pack(rows).to(device)
        vocabulary = self.model.get_input_embeddings().num_embeddings
        probe.ids.remainder_(vocabulary)
        probe.targets.remainder_(vocabulary)
        without(self.pictures, probe, vocabulary)
        refused: list[str] = []
        self._use(packs=False, plain_head=False)
        division = self._division
        if division is not None:  # cut sequences are what a model may refuse; whole ones are as without others
            self._division = replace(division, room=0)
        waits = self._compile == "auto" and self._division is None and self._may_pay(device)
        truth = self._truth(probe, learns=self._compile is True or device.type != "cpu")
        for kernel, packs, plain_head in self._ways(device):
            choice = self._at_hand(kernel, device, refused)
            if not _agreed(choice is not None, ranks, device):
                continue
            self.kernel = choice
            self._use(packs=packs, plain_head=plain_head)
            # each trial is a collective where the model lies in slices, so all ranks must go on to the next
            if not _agreed(self._agrees(probe, truth, refused), ranks, device):
                continue
            if not packs or _agreed(self._keeps_apart(probe, refused), ranks, device):
                break
        else:
            raise ValueError(_no_way(type(self.model).__name__, self._attention, device, refused))
        if self.mixture is not None:
            if (why := self.mixture.settle(self, probe, lambda mine: _agreed(mine, ranks, device))) is not None:
                refused.append(why)
            if not self.mixture.routers.understood:
                self.mixture = None
        self._division = division
        if self._division is not None and self._compile is True:
            raise WrongSetting("trainer.compile=true: a model that is split over processes (trainer.parallel) is not")
        if waits:
            what = (
                f"{type(self.model).__name__} {self.model.config.get_text_config().hidden_size} x {len(self._layers)}"
            )
            self._undecided = CompileTime(f"{what}, {self.computes_in} on {_card(device)}"), probe, ranks
        elif self._division is None and self._compile is True:
            self._compile_it(probe, truth, ranks, refused)
        self.refused = tuple(dict.fromkeys(refused))
        reshard = getattr(self, "reshard", None)
        if reshard is not None:
            reshard()  # without a backward pass the whole weights would stay, and grow old

    @staticmethod
    def _may_pay(device: torch.device) -> bool:
        """Compiling may pay on such a device."""
        return device.type == "cuda"

    def weigh_compiling(self, seconds: float, remaining: int | None = None) -> None:
        """Compile from here on, where that was left open and pays. On all ranks together, between optimizer steps.

        Args:
            seconds: that the last step computed.
            remaining: such steps to come; None: nobody knows.
        """
        if self._undecided is None:
            return
        compile_time, probe, ranks = self._undecided
        device = probe.ids.device
        if (payoff := compile_time.weigh(seconds, remaining)) is None:
            return
        if not _agreed(payoff.pays, ranks, device):
            self.payoff = f"not compiled, {payoff.words}"
            return
        self._undecided, self.payoff = None, payoff.words
        refused, packs, plain_head = [*self.refused], self.packs, self.plain_head
        self._use(packs=False, plain_head=False)
        truth = self._truth(probe, learns=True)
        self._use(packs=packs, plain_head=plain_head)
        with compile_time.measure():
            self._compile_it(probe, truth, ranks, refused)
        self.refused = tuple(refused)
        getattr(self, "reshard", lambda: None)()

    def _truth(self, probe: Packed, *, learns: bool) -> Truth:
        """Outputs of the model's own forward, and in float32; with gradients, where any of its weights learns."""
        learns &= any(parameter.requires_grad for parameter in self.parameters())
        return Truth.of(lambda: self._results(probe, learns=learns), self.model, self._layers, self.computes_in)

    def _results(self, probe: Packed, *, learns: bool) -> Results:
        """Its outputs as it is run now, with a gradient of log-probs if it learns."""
        with self.computing():
            with torch.set_grad_enabled(learns):
                outputs = self(probe)[:2]
            if learns:
                # squared, for slopes that lie as those of a loss do: others are compiled for anew
                outputs[0].square().sum().backward()  # type: ignore[no-untyped-call]
        gradient = sampled_gradient(self) if learns else None
        return Results(torch.cat([each.detach().float().reshape(len(each), -1) for each in outputs], dim=1), gradient)

    def _compile_it(self, probe: Packed, truth: Truth, ranks: DeviceMesh | None, refused: list[str]) -> None:
        """Have the blocks compiled on all ranks or on none, and the head likewise."""
        device = probe.ids.device
        self._blocks = CompiledBlocks(self._layers, self.compiler, checkpointed=self._checkpointed)
        self._fused = FusedHead.make(self.compiler)
        self._blocks.prepare()
        odd = truth.refuses(self._results(probe, learns=truth.exact.gradient is not None))
        empty = None if self._blocks.graphs else "the compiler found nothing in them that it can compile"
        reasons = {"blocks": self._blocks.refused or empty or odd, "head": self._fused.refused or odd}
        for part, why in reasons.items():
            if not _agreed(why is None, ranks, device):
                refused.append(f"{part} not compiled: {why or 'another rank could not'}")
                if self._compile is True:
                    raise WrongSetting(f"trainer.compile=true: {refused[-1]}; auto goes on uncompiled")
                if part == "blocks":
                    self._blocks.on = False
                else:
                    self._fused = None
        self._blocks.required = self._compile is True

    @property
    def words(self) -> str:
        """Words for people on how the model is run."""
        if not self.packs:
            text = "sequences padded to one length"
        else:
            text = "sequences packed, attention by " + (self.kernel.words if self.kernel else "rectangles")
        parts = {"blocks": self._blocks is not None and self._blocks.on, "head": self._fused is not None}
        compiled = " and ".join(part for part, on in parts.items() if on)
        text += f", {compiled} compiled" if compiled else ""
        return text + (f", {self.payoff}" if self.payoff else "")

    @property
    def numbers(self) -> dict[str, float]:
        """Metrics of how it is run: graphs that were compiled so far, once it is decided whether any are."""
        graphs = 0 if self._blocks is None else self._blocks.graphs
        return {} if self._blocks is None and not self.payoff else {"compile/graphs": float(graphs)}

    @property
    def way(self) -> Way:
        """`words`, and why not otherwise; usual on a CPU that packs, as nearly all models let it."""
        usual = self.packs and self._blocks is None and next(self.parameters()).device.type == "cpu"
        return Way("; ".join([self.words, *self.refused]), usual)

    def _ways(self, device: torch.device) -> Iterator[tuple[KernelName | None, bool, bool]]:
        """Kernel, whether sequences are packed, whether the head is plain; the best first, the same on all ranks."""
        wanted = self._attention
        kernels: list[KernelName | None] = ["flash"] if wanted == "flash" else [None]
        if wanted != "flash" and device.type != "cpu" and self.computes_in in HALF:
            kernels = ["varlen", None] if wanted == "packed" else ["flash", "varlen", None]
        pads = wanted in ("padded", "any") or (wanted == "auto" and device.type == "cpu")
        pads &= self._division is None  # whose tokens cannot be split
        heads = (True, False) if head_is_plain(self.model) else (False,)
        for plain_head in heads:
            if wanted != "padded":
                yield from ((kernel, True, plain_head) for kernel in kernels)
            if pads:
                yield None, False, plain_head

    def _at_hand(
        self, kernel: KernelName | None, device: torch.device, refused: list[str]
    ) -> Kernel | Literal[False] | None:
        """The kernel; False if none is meant, and None if its package is not at hand."""
        if kernel is None:
            return False
        try:
            return kernel_of(kernel, device)
        except ImportError as error:
            refused.append(f"no FlashAttention: {error}")
            return None

    def _use(self, *, packs: bool, plain_head: bool) -> None:
        self.packs, self.plain_head = packs, plain_head
        if self.tensor_ranks is not None:
            self.tensor_ranks.packed = packs
        name = NAME if packs else self._padded_attention
        # what reads pictures sees all of them at once, and keeps its own attention
        self.model.set_attn_implementation(name if self.pictures is None else {"text_config": name})

    def _tried(self, compute: Callable[[], T], refused: list[str]) -> T | None:
        """Something computed in a way that the model may refuse: then None, and the reason in `refused`."""
        self._refusals = refusals = []
        try:
            result = compute()
        except REFUSALS as error:
            if device_at_fault(error):
                raise
            refusals.append(f"{type(self.model).__name__}: {error}")
        finally:
            self._refusals = None
        refused += refusals[:1]
        return None if refusals else result

    def _agrees(self, probe: Packed, truth: Truth, refused: list[str]) -> bool:
        results = self._tried(lambda: self._results(probe, learns=truth.exact.gradient is not None), refused)
        if results is None:
            return False
        sequences = probe.sequences if routers_of(self.model) else None
        if (why := truth.refuses(results, sequences)) is not None:
            refused.append(f"{self.words}: {why}")
        return why is None

    @torch.no_grad()
    def _keeps_apart(self, probe: Packed, refused: list[str]) -> bool:
        """True if one sequence's contents, here NaN, reach no other sequence: a state that runs on over the end of a
        sequence may change the log-probs of a new model by less than rounding."""
        start = sum(probe.lengths[:_SPOILT])
        places = torch.arange(sum(probe.lengths), device=probe.ids.device) if probe.places is None else probe.places
        spoilt = torch.zeros_like(probe.ids, dtype=torch.bool)
        spoilt[places[start : start + probe.lengths[_SPOILT]]] = True
        share = self._share(probe)
        if share is not None:
            spoilt = spoilt[share.tokens]

        def spoil(module: nn.Module, inputs: Any, outputs: Tensor) -> Tensor:
            return outputs.masked_fill(spoilt[None, :, None], torch.nan)

        hook = self.model.get_input_embeddings().register_forward_hook(spoil)
        try:
            outputs = self._tried(lambda: self(probe), refused)
        finally:
            hook.remove()
        apart = outputs is not None and bool(outputs[0][probe.sequences != _SPOILT].isfinite().all())
        if outputs is not None and not apart:
            refused.append(f"{type(self.model).__name__}: a sequence changes others that lie behind it")
        return apart


def _agreed(mine: bool, ranks: DeviceMesh | None, device: torch.device) -> bool:
    """True if `mine` is true on every rank; a collective."""
    if ranks is None or ranks.size() == 1:
        return mine
    least = torch.tensor(float(mine), device=device)
    dist.all_reduce(least, dist.ReduceOp.MIN, group=ranks.get_group())
    return bool(least)


def _card(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


def _no_way(model: str, wanted: Attention, device: torch.device, refused: list[str]) -> str:
    reasons = "; ".join(dict.fromkeys(refused)) or "another rank could not"
    other = (
        "auto takes torch's own kernel"
        if wanted == "flash"
        else "padded pads sequences to one length, which computes more and needs more memory"
    )
    problem = f"trainer.attention={wanted}: {model} cannot be run so on {device.type}: {reasons}"
    return f"{problem}. {other[0].upper()}{other[1:]}"


HEAD = "score."
"""How the names of the unit's parameters begin; a policy has all the others too."""


class ValueModel(PolicyModel):
    """Values by the layers of a causal language model.

    Args:
        model: the Hugging Face model, changed in place; what it keeps has the names that it has in the policy.
        gradient_checkpointing: keep only the input of each layer, and compute the rest again for the gradient.
        more: `attention`, `compiled`, see `PolicyModel`.
    """

    def __init__(self, model: PreTrainedModel, *, gradient_checkpointing: bool = False, **more: Any):
        without_head(model)
        width, device = model.config.get_text_config().hidden_size, model.get_input_embeddings().weight.device
        model.add_module("score", nn.Linear(width, 1, device=device, dtype=torch.float32))
        super().__init__(model, gradient_checkpointing=gradient_checkpointing, **more)
        self.start_head()

    @property
    def head(self) -> nn.Linear:
        """Makes a value of a hidden state; in float32 whatever the layers compute in."""
        return cast(nn.Linear, self.model.score)

    def forward(self, batch: Packed) -> tuple[Tensor, Tensor]:  # type: ignore[override]  # it has no entropy
        """The value before each learned token.

        Returns:
            Values, float32 [learned], and the hidden states that they are read from, [learned, width];
            both differentiable.
        """
        with self.computing():
            return self._valued(batch)

    def _cast_weights(self) -> Iterator[tuple[nn.Module, str]]:
        return ((module, name) for module, name in super()._cast_weights() if module is not self.head)

    def _valued(self, batch: Packed) -> tuple[Tensor, Tensor]:
        share = self._share(batch)
        hidden = self._outputs(self.model.base_model, batch, "last_hidden_state", share)
        values = self.head(hidden.to(self.head.weight.dtype)).sum(-1)  # of one each: no view, of which FSDP would warn
        return (values, hidden) if share is None else (share.whole(values), share.whole(hidden))

    @torch.no_grad()
    def start_head(self) -> None:
        """Let every value be 0: until it has learned something, a critic should not make advantages worse."""
        for parameter in self.head.parameters():
            parameter.zero_()

    def shard_head(self, mesh: DeviceMesh) -> None:
        """Spread the head by itself, before the rest, since it stays in float32 where the rest does not."""
        fully_shard(self.head, mesh=mesh)


class ScoreModel(ValueModel):
    """Scores by a sequence classifier of one label: the reward model. What is read before a learned token is the score
    of everything up to there, so a row whose last token alone is learned has one score, of all before it.

    `AutoModelForSequenceClassification.from_pretrained` reads what it saves.

    Args:
        model: the classifier, changed in place; its head, `score`, is trained also where adapters train the rest.
        gradient_checkpointing, more: see `ValueModel`.

    Raises:
        ValueError: the classifier has no such head.
    """

    def __init__(self, model: PreTrainedModel, *, gradient_checkpointing: bool = False, **more: Any):
        if not isinstance(getattr(model, "score", None), nn.Linear):
            raise ValueError(f"{type(model).__name__} has no linear head `score`: take a decoder's classifier")
        PolicyModel.__init__(self, model, gradient_checkpointing=gradient_checkpointing, **more)
        self.head.requires_grad_(True)

    def start_head(self) -> None:
        """Leave the head as it is: it was initialised, or read, with the rest."""


def without_head(model: PreTrainedModel) -> None:
    """Take the output embedding off a causal language model, and with it [vocabulary, width] of memory, unless the
    input embedding is the same tensor."""
    head = model.get_output_embeddings()
    for path, module in list(model.named_modules()):
        if module is head:
            parent, _, name = path.rpartition(".")
            setattr(model.get_submodule(parent), name, nn.Identity())
