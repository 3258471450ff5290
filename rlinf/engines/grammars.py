"""Answers within a JSON schema: the form that is asked for, and the tokens that may come next, by llguidance.

Flows in: forms of requests, and the tokens that were drawn. Flows out: for each step the tokens that each answer may
have. Who wakes whom: nobody. A form is compiled once, in a thread that its request waits for; each answer has a copy of
what came of it, which the decode batch asks in its own thread. That is behind the start of the model's forward, so a
GPU computes meanwhile; on a CPU all cores are the forward's, and a thread more would only take turns with them.

llguidance was chosen among the libraries of this kind because it names every keyword that it cannot enforce, where
others leave such keywords out in silence, and because it brings no other package.
"""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property, lru_cache
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_SPACE = r"[\x20]?(\n[\x20\t]{0,24})?"
"""White space between parts of JSON: as people indent it, not without end, in which small models lose themselves."""
_COMPILED = 256
"""Forms that are kept compiled."""
MISSING = "schemas are enforced by llguidance, which is not installed: pip install 'rlinf[schemas]'"


@dataclass(frozen=True, slots=True)
class Form:
    """JSON that an answer shall be, and the marks around it."""

    schema: str
    """JSON schema, as text: properties come in its order."""
    before: str = ""
    """Text in front of the JSON, such as `<tool_call>`."""
    after: str = ""
    """Text behind it."""
    between: str | None = None
    """Text between several of these, of which there is at least one; None: there is one."""
    thought: Literal["", "may", "begun"] = ""
    """Thought that goes before: none, one in `<think>` and `</think>` or none, or the rest of one that was begun."""
    free: bool = False
    """Any text may stand around it, or in its place: the form begins where a text has what stands `before`."""

    @property
    def text(self) -> str:
        """Itself as text, which `Sampling.form` takes."""
        return json.dumps(asdict(self))

    @staticmethod
    def of(text: str) -> Form:
        """Read what `text` wrote.

        Raises:
            ValueError: it is something else.
        """
        try:
            form = Form(**json.loads(text))
            if isinstance(json.loads(form.schema), dict):
                return form
        except (TypeError, ValueError):
            pass
        raise ValueError(f"form={text[:60]!r} is no form of answers: take llm.chat(schema=…)")

    def grammar(self, specials: Mapping[str, int]) -> str:
        """The form as a grammar of llguidance, which SGLang and vLLM have, too.

        Args:
            specials: special tokens of the tokenizer, which no other tokens spell; see `specials_of`.
        """
        schema = {**json.loads(self.schema), "x-guidance": {"whitespace_pattern": _SPACE}}
        one, space = [*_literals(self.before, specials), "json", *_literals(self.after, specials)], r"/[ \n]*/"
        again = [] if self.between is None else ["(", *_literals(self.between, specials), "part", ")*"]
        lines = ["start: " + " ".join([*self._thinks(specials), "part", *again])]
        if self.free:
            mark, one[: len(_literals(self.before, specials))] = re.escape(self.before.strip()).replace("/", r"\/"), []
            lines = [f"start: plain | (free {space} part){'' if self.between is None else '+'} plain", "plain: PLAIN |"]
            lines += [rf"PLAIN: /(.|\n)*/ & ~/(.|\n)*{mark}(.|\n)*/", rf"free[lazy]: /(.|\n)*{mark}/"]
        if self.thought:
            lines += [f"rest: text {' '.join(_literals('</think>', specials))} {space}", "text[lazy]: /(.|\\n)*/"]
            if "</think>" not in specials:
                lines[-2:] = [f"rest: text {space}", 'text[suffix="</think>"]: /(.|\\n)*/']
        lines += [f"part: {' '.join(one)}", f"json: %json {json.dumps(schema)}"]
        return "\n".join(lines)

    def _thinks(self, specials: Mapping[str, int]) -> list[str]:
        if self.thought == "may":
            return ["(", *_literals("<think>", specials), "rest", ")?"]
        return ["rest"] if self.thought else []


def _literals(text: str, specials: Mapping[str, int]) -> list[str]:
    """A text as a grammar's words."""
    if not text:
        return []
    pattern = "|".join(re.escape(each) for each in sorted(specials, key=len, reverse=True))
    parts = re.split(f"({pattern})", text) if pattern else [text]
    return [
        f"<[{specials[part]}]>" if part in specials else json.dumps(part, ensure_ascii=False) for part in parts if part
    ]


def specials_of(tokenizer: Any) -> dict[str, int]:
    """The special tokens of a tokenizer, by their texts; none without one."""
    return {str(tokenizer.convert_ids_to_tokens(id)): id for id in getattr(tokenizer, "all_special_ids", ())}


def missing() -> str | None:
    """A line about the library that enforces forms; None: it is installed."""
    return None if find_spec("llguidance") is not None else MISSING


@lru_cache(_COMPILED)
def unenforceable(form: Form) -> str | None:
    """Why no engine of ours can keep answers within a form, by the schema's keyword; None: it can. Blocking."""
    if (problem := missing()) is not None:
        return problem
    from llguidance import LLMatcher

    return _shortened(LLMatcher.validate_grammar(LLMatcher.grammar_from_lark(form.grammar({}))))


def _shortened(error: str) -> str | None:
    """A sentence of llguidance's error; None for none."""
    if not error or error.startswith("WARNING"):
        return None
    if (named := re.search(r"Unimplemented keys: \[(.*?)\]", error)) is not None:
        return f"{named.group(1)} cannot be enforced while decoding: leave it out of the schema"
    lines = [line.strip() for line in error.split("Error in JSON schema")[-1].splitlines() if line.strip(" ^")]
    return f"the schema cannot be enforced while decoding: {' '.join(lines)[:300]}"


class Constraint:
    """One answer's place in its grammar.

    Args:
        matcher: a copy of the compiled grammar.
        ends: tokens that end the answer.
    """

    def __init__(self, matcher: Any, ends: Sequence[int]) -> None:
        self.log_mass: list[float] = []
        """For each token, the log of the probability that the grammar left of the whole softmax, nats."""
        self.problem: str | None = None
        """Why the grammar cannot go on; None: it can."""
        self.matcher, self._ends = matcher, list(ends)

    def take(self, token: int, log_mass: float) -> None:
        """Go on by a token."""
        self.log_mass.append(log_mass)
        if self.problem is None and token not in self._ends:
            self.matcher.consume_token(token)
            self._look()

    def finish(self, allowed: np.ndarray) -> None:
        """Amend the tokens that the grammar allows, bool [vocabulary]: those that end the answer may come where it is
        complete, and all may come where the grammar fails, for the answer ends there."""
        self._look()
        allowed[self._ends] = self.problem is None and self.matcher.is_accepting()
        if self.problem is None and not allowed.any():
            self.problem = "the model has no token that the schema allows here"
        if self.problem is not None:
            allowed[:] = True

    def _look(self) -> None:
        if self.matcher.is_error():
            self.problem = self.matcher.get_error().partition("\n")[0]


class Grammars:
    """The compiled forms of an engine, and the masks of its answers.

    Args:
        tokenizer: the model's.
        vocabulary: tokens of the model's head.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, vocabulary: int) -> None:
        self._hf, self._vocabulary = tokenizer, vocabulary
        self._compiled: dict[str, Any] = {}  # a matcher, or the sentence why there is none
        self._compiling = threading.Lock()

    def problem(self, form: str) -> str | None:
        """Compile a form, if it is not; returns why it cannot be. Blocking, from any thread."""
        compiled = self._of(form)
        return compiled if isinstance(compiled, str) else None

    def constraint(
        self, form: str, ends: Sequence[int], tokens: Iterable[int], log_mass: Iterable[float]
    ) -> Constraint:
        """The place of an answer in a form that `problem` knows, after the tokens that were begun elsewhere."""
        constraint = Constraint(self._of(form).deep_copy(), ends)
        for token, mass in zip(tokens, log_mass, strict=True):
            constraint.take(token, mass)
        return constraint

    def allowed(self, constraints: Sequence[Constraint]) -> np.ndarray:
        """Compute which tokens may come next in each, bool [constraints, vocabulary]."""
        words = -(-self._vocabulary // 32)
        bits = np.zeros((len(constraints), words), np.int32)
        for row, each in zip(bits, constraints, strict=True):
            each.matcher.unsafe_compute_mask_ptr(row.ctypes.data, row.nbytes)
        allowed = np.unpackbits(bits.view(np.uint8), axis=1, bitorder="little", count=self._vocabulary).view(bool)
        allowed[:, self._tokenizer.eos_tokens] = False
        for row, each in zip(allowed, constraints, strict=True):
            each.finish(row)
        return allowed

    def _of(self, form: str) -> Any:
        if (compiled := self._compiled.get(form)) is not None:  # the event loop never waits for another's
            return compiled
        with self._compiling:
            if (compiled := self._compiled.get(form)) is None:
                compiled = self._compiled[form] = self._compile(form)
                if len(self._compiled) > _COMPILED:
                    del self._compiled[next(iter(self._compiled))]
            return compiled

    def _compile(self, form: str) -> Any:
        if (problem := missing()) is not None:
            return problem
        from llguidance import LLMatcher

        grammar = LLMatcher.grammar_from_lark(Form.of(form).grammar(specials_of(self._hf)))
        matcher = LLMatcher(self._tokenizer, grammar, log_level=0)
        if not matcher.is_error():
            matcher.compute_bitmask()  # what the first step needs, once for all answers
        return _shortened(matcher.get_error()) if matcher.is_error() else matcher

    @cached_property
    def _tokenizer(self) -> Any:
        """The tokens as llguidance has them; takes a second for 50,000."""
        from llguidance import LLTokenizer, TokenizerWrapper
        from llguidance.hf import from_tokenizer
        from transformers import PreTrainedTokenizerFast

        if isinstance(self._hf, PreTrainedTokenizerFast):
            try:
                return from_tokenizer(self._hf, n_vocab=self._vocabulary)
            except ValueError:  # a decoder that it does not know
                pass
        return LLTokenizer(TokenizerWrapper(_Tokens(self._hf)), n_vocab=self._vocabulary)


class _Tokens:
    """A tokenizer as llguidance reads any: by the bytes of its tokens."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._hf = tokenizer
        self.eos_token_id, self.bos_token_id = tokenizer.eos_token_id, tokenizer.bos_token_id
        self.special_token_ids = [*tokenizer.all_special_ids]
        self.tokens = [str(tokenizer.decode([id])).encode() for id in range(len(tokenizer))]

    def __call__(self, text: str) -> list[int]:
        return list(self._hf.encode(text, add_special_tokens=False))
