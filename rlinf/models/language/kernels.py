"""Kernels: variable-length causal attention, functions made faster by `torch.compile`, and the fused output head.

Attention over sequences laid end to end is computed by torch's own kernel or FlashAttention's package, from query, key
and value of all tokens and the bounds of each sequence, with nothing padded. Releases differ in what they take, so
arguments follow from a function's signature and not from a trial: what a kernel raises on a device is a fault of the
device, and no question of the version.

A compiled function gives the same results as the plain one; where it cannot be compiled it goes on uncompiled, and says
why. Compiling begins with the first call, in the thread that calls, and counts as that call's time.

The fused head is two functions of elements that follow the output embedding's product, which a compiler fuses. Forward:
from the logits of a chunk of tokens, the log-prob of each target, the entropy and the logarithm of the sum. Backward:
the slope of the logits, in their own dtype. Inside all is float32. Both read the logits once or twice and keep nothing
of their size beside the slope itself; one after the other, torch's own operations read and write them a dozen times.
`policy_model.py` has the same without a compiler.
"""

from __future__ import annotations

import inspect
import json
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from statistics import median
from typing import Any, Literal, NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from rlinf.algos.loss_sum import wide
from rlinf.config.gguf import CACHE
from rlinf.storage.files import replace_text

HALF = (torch.bfloat16, torch.float16)
"""Dtypes that the kernels compute in."""
KernelName = Literal["flash", "varlen"]
_FAULTS = ("CUDA error", "CUBLAS_STATUS", "CUDNN_STATUS", "NCCL", "can't allocate memory")
"""In texts of plain `RuntimeError`s that torch raises when a device, and no argument, is at fault."""


T = TypeVar("T")
Pair = tuple[T, T]
"""One value for queries, and one for keys."""


@dataclass(frozen=True, slots=True, eq=False)
class Kernel:
    """A kernel for sequences of several lengths."""

    words: str
    """Name of the kernel, for people."""
    attend: Callable[[Tensor, Tensor, Tensor, Pair[Tensor], Pair[int], float, int], Tensor]
    """Attention [tokens, heads, size] from query [tokens, heads, size], key and value [seen tokens, key heads, size];
    where the queries of each sequence begin and the end of the last, int32 [sequences + 1], and likewise of its keys;
    the most queries and the most keys of a sequence; the scale of the scores; and how many tokens before itself a token
    sees at most (-1 for all). A sequence with fewer queries than keys has its last tokens for queries."""


def kernel_of(name: KernelName, device: torch.device) -> Kernel:
    """A kernel by its name.

    Args:
        name: "varlen", torch's own; or "flash", that of `flash_attn_interface` (FlashAttention 3) on Hopper cards where
            it is installed, else that of `flash_attn` (FlashAttention 2).
        device: on which it runs.

    Raises:
        ImportError: FlashAttention's package is not installed, or does not fit this torch.
    """
    return _torch_kernel() if name == "varlen" else _flash_kernel(_hopper(device))


def device_at_fault(error: BaseException) -> bool:
    """True if an error comes from memory that ran out, from a device or from a process group: no other way to compute
    would mend it."""
    kinds = (torch.OutOfMemoryError, torch.AcceleratorError, dist.DistError, MemoryError)
    return isinstance(error, kinds) or any(words in str(error) for words in _FAULTS)


def _hopper(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.is_available() and torch.cuda.get_device_capability(device)[0] == 9


@cache
def _torch_kernel() -> Kernel:
    from torch.nn.attention.varlen import varlen_attn  # takes time to import, and few runs need it

    # torch 2.11 checks nothing and says nothing of fewer heads of keys; from 2.12 on it has to be told
    shares_heads = "enable_gqa" in inspect.signature(varlen_attn).parameters

    def attend(
        query: Tensor, key: Tensor, value: Tensor, bounds: Pair[Tensor], longest: Pair[int], scale: float, lookback: int
    ) -> Tensor:
        more: dict[str, Any] = {}
        if query.shape[1] != key.shape[1]:
            if shares_heads:
                more["enable_gqa"] = True
            else:
                key, value = (part.repeat_interleave(query.shape[1] // key.shape[1], dim=1) for part in (key, value))
        return varlen_attn(  # type: ignore[return-value]  # no extras were asked for
            query.contiguous(),
            key.contiguous(),
            value.contiguous(),
            *bounds,
            *longest,
            scale=scale,
            window_size=(lookback, 0),
            **more,
        )

    return Kernel(f"the variable-length kernel of torch {torch.__version__}", attend)


@cache
def _flash_kernel(hopper: bool) -> Kernel:
    interface = None
    for package in ("flash_attn_interface", "flash_attn") if hopper else ("flash_attn",):
        try:
            interface = import_module(package)
            break
        except ImportError as error:
            why = error
    if interface is None:
        raise why
    function = interface.flash_attn_varlen_func

    def attend(
        query: Tensor, key: Tensor, value: Tensor, bounds: Pair[Tensor], longest: Pair[int], scale: float, lookback: int
    ) -> Tensor:
        out = function(
            query,
            key,
            value,
            cu_seqlens_q=bounds[0],
            cu_seqlens_k=bounds[1],
            max_seqlen_q=longest[0],
            max_seqlen_k=longest[1],
            softmax_scale=scale,
            causal=True,
            window_size=(lookback, 0 if lookback >= 0 else -1),
        )
        return out[0] if isinstance(out, tuple) else out  # early releases for Hopper give the scores' norms, too

    version = getattr(interface, "__version__", "")
    return Kernel(f"FlashAttention {version}".strip() + f" ({interface.__name__})", attend)


class Compiled:
    """A function that is compiled when it is first called.

    Args:
        function: of tensors whose first dimension may have any length; it is compiled once for all of them.
        backend: of `torch.compile`.
        required: what keeps it from being compiled is an error, and no reason to go on without.
    """

    def __init__(self, function: Callable[..., Any], backend: str = "inductor", *, required: bool = False):
        self.refused: str | None = None
        """Why it is not compiled; None while nothing spoke against it."""
        self.function, self._required = function, required
        self._compiled = torch.compile(function, backend=backend)

    def __call__(self, *arguments: Any) -> Any:
        if self.refused is None:
            try:
                for each in arguments:
                    if isinstance(each, torch.Tensor) and each.dim():
                        torch._dynamo.maybe_mark_dynamic(each, 0)
                return self._compiled(*arguments)
            except Exception as error:
                if self._required or device_at_fault(cause_of(error)):
                    raise
                self.refused = first_line(error)
        return self.function(*arguments)


class Payoff(NamedTuple):
    """Decision for or against compiling, once some steps have run without."""

    pays: bool
    """It saves more seconds than it takes."""
    words: str
    """Why, for people."""


_SAVED = 0.2
"""Share of the seconds of a step that compiled blocks are taken to save. No card has shown it yet: it is the lower end
of what others report of fusing what lies between products."""
_USUAL = 40.0
"""Seconds that compiling takes on a machine that has compiled no such model: what an H100's machine took."""
_WARM_UP = 1
"""Steps that say nothing of those after them."""
_FIRST = 4
"""Steps after which it is decided for the first time, then after twice as many each time."""


class CompileTime:
    """Weighs the seconds that compiling takes against those that it saves in the steps that are left of a run.

    Args:
        what: is compiled, and on what; models of which this is the same take as long.
    """

    def __init__(self, what: str):
        self._what, self._seconds = what, list[float]()

    def weigh(self, seconds: float, remaining: int | None) -> Payoff | None:
        """Take in one more step, and decide; None: there is nothing to decide yet.

        Args:
            seconds: that the step computed, uncompiled.
            remaining: such steps to come; None: nobody knows, and as many are expected as there were.
        """
        self._seconds.append(seconds)
        count = len(self._seconds)
        if count < _FIRST or count & (count - 1):
            return None
        remaining = count if remaining is None else remaining
        saved, takes = _SAVED * median(self._seconds[_WARM_UP:]) * remaining, _known_times().get(self._what, _USUAL)
        pays = saved > takes
        verb = "as it saves" if pays else "as it would save"
        return Payoff(pays, f"{verb} about {saved:.0f} s in {remaining:,} steps and takes {takes:.0f} s")

    @contextmanager
    def measure(self) -> Iterator[None]:
        """Remember for later runs how long it takes to compile what is compiled inside."""
        began = time.perf_counter()
        yield
        times = _known_times() | {self._what: round(time.perf_counter() - began, 1)}
        with suppress(OSError):  # a home that cannot be written to costs later runs their knowledge
            _TIMES.expanduser().parent.mkdir(parents=True, exist_ok=True)
            replace_text(_TIMES.expanduser(), json.dumps(times, indent=1))


_TIMES = CACHE / "compiling.json"
"""Seconds that compiling took, by what was compiled."""


def _known_times() -> dict[str, float]:
    try:
        times: dict[str, float] = json.loads(_TIMES.expanduser().read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return times


def keep_compiled() -> None:
    """Have torch keep what it compiles in the user's cache, for later runs, unless the user says where."""
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str((CACHE / "inductor").expanduser()))


def cause_of(error: BaseException) -> BaseException:
    """Return the innermost cause of a compiler's error, which raises errors about errors."""
    while (inner := getattr(error, "inner_exception", None) or error.__cause__) is not None:
        error = inner
    return error


def first_line(error: BaseException) -> str:
    """The type and the first line of a compiler error's innermost cause."""
    cause = cause_of(error)
    text = next((line for line in str(cause).splitlines() if line.strip()), "")
    return f"{type(cause).__name__}: {text.strip()}"


def scores(logits: Tensor, targets: Tensor, temperature: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """Log-prob of each target, entropy, and log sum exp of the logits, [tokens] each, at least in float32.

    Args:
        logits: [tokens, vocabulary]
        targets: int64 [tokens]
        temperature: float32 [tokens]; None for 1.
    """
    logits = wide(logits)
    if temperature is not None:
        logits = logits / temperature[:, None]
    norms = torch.logsumexp(logits, dim=-1)
    logp = logits - norms[:, None]
    entropy = -torch.where(logp == -torch.inf, 0.0, logp.exp() * logp).sum(dim=-1)
    return logits.gather(1, targets[:, None]).squeeze(1) - norms, entropy, norms


def slopes(
    logits: Tensor,
    targets: Tensor,
    temperature: Tensor | None,
    norms: Tensor,
    grad: Tensor,
    grad_entropy: Tensor | None,
    entropy: Tensor | None,
) -> Tensor:
    """d loss / d logits, [tokens, vocabulary], at least float32; see `logprob_head._TokenLogprobs` for the formula.

    Args:
        logits, targets, temperature: as for `scores`.
        norms: what `scores` gave.
        grad: d loss / d log-prob of the target, [tokens].
        grad_entropy, entropy: d loss / d entropy, and the entropy, [tokens]; None if it is not differentiated.
    """
    logits = wide(logits)
    if temperature is not None:
        logits = logits / temperature[:, None]
    logp = logits - norms[:, None]
    weighted = grad[:, None]
    if grad_entropy is not None and entropy is not None:
        finite = torch.where(logp == -torch.inf, 0.0, logp)
        weighted = weighted + grad_entropy[:, None] * (finite + entropy[:, None])
    is_target = torch.arange(logits.shape[1], device=logits.device) == targets[:, None]
    slope = torch.where(is_target, grad[:, None], 0.0) - logp.exp() * weighted
    return slope if temperature is None else slope / temperature[:, None]


def slopes_alone(logits: Tensor, *others: Tensor | None) -> Tensor:
    """`slopes` in the dtype of the logits."""
    return slopes(logits, *others).to(logits.dtype)  # type: ignore[arg-type]


def slopes_and_bias(logits: Tensor, *others: Tensor | None) -> tuple[Tensor, Tensor]:
    """`slopes` in the dtype of the logits; and, of the unrounded ones, the sum over tokens, [vocabulary]."""
    slope = slopes(logits, *others)  # type: ignore[arg-type]
    return slope.to(logits.dtype), slope.sum(dim=0)


@dataclass(frozen=True, slots=True)
class FusedHead:
    """The compiled functions."""

    scores: Compiled
    slopes: Compiled
    slopes_and_bias: Compiled

    @staticmethod
    def make(backend: str = "inductor", *, required: bool = False) -> FusedHead:
        """Functions that compile at their first calls; see `Compiled`."""
        keep_compiled()
        functions = (scores, slopes_alone, slopes_and_bias)
        return FusedHead(*(Compiled(function, backend, required=required) for function in functions))

    @property
    def refused(self) -> str | None:
        """Why it is not compiled."""
        return self.scores.refused or self.slopes.refused or self.slopes_and_bias.refused
