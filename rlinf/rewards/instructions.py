"""Rewards for following instructions that a program can check: the 25 kinds of IFEval (arXiv:2311.07911).

A row names the kinds of its instructions, and for each the numbers and words that it asks for. Languages are told by
langdetect and words by nltk, as its authors tell them, so both packages are needed by the kinds that ask for them.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import lru_cache
from importlib import import_module
from typing import Any, Literal, get_args

from rlinf.rewards.base import Score, after_thought

Sentences = Literal["trained", "plain"]
"""Sentences end where nltk's `punkt_tab` of English says; or where its rules alone do, which know no abbreviation."""
_OPTIONS = ("My answer is yes.", "My answer is no.", "My answer is maybe.")


def instructions(
    response: str,
    instruction_id_list: Sequence[str],
    kwargs: Sequence[Mapping[str, Any]],
    *,
    sentences: Sentences = "trained",
) -> Score:
    """1 if the response follows all instructions as it stands, IFEval's strict accuracy of a prompt; else 0.

    The parts of the score are `instructions`, the share of them that is followed, and `loose`, which is 1 if each is
    followed by the response or by one of seven others that are made of it: without its first line, its last, both, and
    each without asterisks. What stands before a last `</think>` is no part of the response.

    Args:
        response: what the model wrote.
        instruction_id_list: kinds of the instructions, such as "length_constraints:number_words".
        kwargs: what each of them asks for, such as {"relation": "at least", "num_words": 300}; None is as not there.
        sentences: where sentences end. Where it is given, the packages are looked for before the run begins.

    Raises:
        ImportError: a package is not installed by which an instruction is checked.
        ValueError: the row names an instruction that there is not, or lacks what it needs.
    """
    if isinstance(kwargs, str) or len(kwargs) != len(instruction_id_list):
        raise ValueError(f"kwargs is no list with a mapping for each of {[*instruction_id_list]}, but {kwargs!r:.100}")
    if not instruction_id_list:
        raise ValueError("instruction_id_list is empty: nothing tells what is right")
    text, strict, loose = after_thought(response), [], []
    for kind, arguments in zip(instruction_id_list, kwargs, strict=True):
        follows = _checker(kind, arguments, sentences)
        strict.append(bool(text.strip()) and follows(text))
        loose.append(strict[-1] or any(follows(each) for each in _others(text) if each.strip()))
    parts = {"instructions": sum(strict) / len(strict), "loose": float(all(loose))}
    return Score(float(all(strict)), parts)


def _ready(**args: Any) -> None:
    """See before a run begins that all kinds can be checked, where `sentences` is bound.

    Where it is not, rows may be of kinds that need no package.

    Raises:
        ImportError: a package is not installed, or has not its data.
        ValueError: `sentences` is nothing that there is.
    """
    if "sentences" in args:
        if args["sentences"] not in get_args(Sentences):
            raise ValueError(f"reward instructions: sentences is {args['sentences']!r}, none of {get_args(Sentences)}")
        import_module("langdetect")
        _splitter(args["sentences"])


vars(instructions)["__ready__"] = _ready


def _others(text: str) -> Iterator[str]:
    """The response without what models put around an answer."""
    lines = text.split("\n")
    for first, last in ((0, None), (1, None), (0, -1), (1, -1)):
        part = text if (first, last) == (0, None) else "\n".join(lines[first:last]).strip()
        yield part
        yield part.replace("*", "")


def _checker(kind: str, arguments: Mapping[str, Any], sentences: Sentences) -> Callable[[str], bool]:
    check = _CHECKS.get(kind)
    if check is None:
        raise ValueError(f"instruction_id_list has {kind!r}, which is none of {', '.join(_CHECKS)}")
    wanted = {name: value for name, value in arguments.items() if value is not None}
    wanted |= {"sentences": sentences} if kind in _TOLD_BY_SENTENCES else {}
    return lambda text: check(_Wanted(kind, wanted), text)


class _Wanted:
    """The demands of one instruction.

    Args:
        kind: of the instruction, for errors.
        arguments: by name.
    """

    def __init__(self, kind: str, arguments: Mapping[str, Any]):
        self._kind, self._arguments = kind, arguments

    def __getitem__(self, name: str) -> Any:
        if name not in self._arguments:
            raise ValueError(f"kwargs of {self._kind} has no {name}")
        value = self._arguments[name]
        return int(value) if isinstance(value, float) else value  # tables have no whole numbers beside None

    def compares(self, count: int, relation: str, bound: str) -> bool:
        """True if a count is on the right side of a bound."""
        match self[relation]:
            case "less than":
                return count < int(self[bound])
            case "at least":
                return count >= int(self[bound])
        raise ValueError(f"kwargs of {self._kind}: {relation} is {self[relation]!r}, not 'less than' or 'at least'")


def _places(pattern: str, text: str) -> int:
    """How often a pattern of the row's is in a text; one that is none is looked for as it stands."""
    try:
        return sum(1 for _ in re.finditer(pattern, text, re.IGNORECASE))
    except re.error:
        return text.lower().count(pattern.lower())


def _paragraphs(wanted: _Wanted, text: str) -> bool:
    pieces = [piece.strip() for piece in re.split(r"\s?\*\*\*\s?", text)]
    count = sum(map(bool, pieces))
    return all(pieces[1:-1]) and count == wanted["num_paragraphs"]


def _first_word(wanted: _Wanted, text: str) -> bool:
    pieces = [piece.strip() for piece in text.split("\n\n")]
    count, number = sum(map(bool, pieces)), wanted["nth_paragraph"]
    if not 0 < number <= count or not pieces[number - 1]:
        return False
    word = pieces[number - 1].split()[0].lstrip("'").lstrip('"')
    return count == wanted["num_paragraphs"] and re.split(r"[.,?!'\"]", word)[0].lower() == wanted["first_word"].lower()


def _postscript(wanted: _Wanted, text: str) -> bool:
    marker = wanted["postscript_marker"].strip()
    patterns = {"P.P.S": r"p\.\s?p\.\s?s", "P.S.": r"p\.\s?s\."}
    return re.search(patterns.get(marker, marker.lower()), text.lower()) is not None


def _highlights(wanted: _Wanted, text: str) -> bool:
    single = [each.strip("*").strip() for each in re.findall(r"\*[^\n*]*\*", text)]
    double = [each[2:-2].strip() for each in re.findall(r"\*\*[^\n*]*\*\*", text)]
    return sum(map(bool, [*single, *double])) >= wanted["num_highlights"]


def _bullets(wanted: _Wanted, text: str) -> bool:
    stars, dashes = (re.findall(pattern, text, re.MULTILINE) for pattern in (r"^\s*\*[^*].*$", r"^\s*-.*$"))
    return len(stars) + len(dashes) == wanted["num_bullets"]


def _sections(wanted: _Wanted, text: str) -> bool:
    mark = wanted["section_spliter"].strip()  # the column's own spelling
    return len(re.findall(rf"\s?{mark}\s?\d+\s?", text)) >= wanted["num_sections"]


def _json(wanted: _Wanted, text: str) -> bool:
    inside = text.strip()
    for fence in ("```json", "```Json", "```JSON", "```"):
        inside = inside.removeprefix(fence)
    try:
        json.loads(inside.removesuffix("```").strip())
    except ValueError:
        return False
    return True


def _title(wanted: _Wanted, text: str) -> bool:
    return any(each.lstrip("<").rstrip(">").strip() for each in re.findall(r"<<[^\n]+>>", text))


def _two(wanted: _Wanted, text: str) -> bool:
    pieces = [piece.strip() for piece in text.split("******")]
    answers = [piece for piece in pieces if piece]
    return all(pieces[1:-1]) and len(answers) == 2 and answers[0] != answers[1]


def _repeats(wanted: _Wanted, text: str) -> bool:
    return text.strip().lower().startswith(wanted["prompt_to_repeat"].strip().lower())


def _ends(wanted: _Wanted, text: str) -> bool:
    return text.strip().strip('"').lower().endswith(wanted["end_phrase"].strip().lower())


def _quoted(wanted: _Wanted, text: str) -> bool:
    whole = text.strip()
    return len(whole) > 1 and whole[0] == whole[-1] == '"'


def _letters(wanted: _Wanted, text: str) -> bool:
    return wanted.compares(text.lower().count(wanted["letter"].strip().lower()), "let_relation", "let_frequency")


def _language(wanted: _Wanted, text: str, language: str | None = None) -> bool:
    """A text of which no language can be told counts as right, as it does for the authors."""
    from langdetect import DetectorFactory, LangDetectException, detect

    DetectorFactory.seed = 0  # it draws; the same answer must be scored the same
    try:
        return bool(detect(text) == (language or wanted["language"]))
    except LangDetectException:
        return True


@lru_cache(maxsize=2)
def _splitter(sentences: Sentences) -> Any:
    """nltk's sentences of English."""
    import nltk
    from nltk.tokenize.punkt import PunktSentenceTokenizer, PunktTokenizer

    if sentences == "plain":
        return PunktSentenceTokenizer()
    try:
        return PunktTokenizer("english")
    except LookupError:
        raise ImportError(
            "IFEval counts sentences by nltk's punkt_tab, which is not here: `python -m nltk.downloader punkt_tab` "
            f"brings it to {nltk.data.path[0]}; or set args: {{sentences: plain}} of the benchmark, which takes rules "
            "that know no abbreviation"
        ) from None


def _sentence_count(wanted: _Wanted, text: str) -> bool:
    return wanted.compares(len(_splitter(wanted["sentences"]).tokenize(text)), "relation", "num_sentences")


def _capital_words(wanted: _Wanted, text: str) -> bool:
    from nltk.tokenize import NLTKWordTokenizer

    words = NLTKWordTokenizer()
    count = sum(
        word.isupper()
        for sentence in _splitter(wanted["sentences"]).tokenize(text)
        for word in words.tokenize(sentence)
    )
    return wanted.compares(count, "capital_relation", "capital_frequency")


_TOLD_BY_SENTENCES = ("length_constraints:number_sentences", "change_case:capital_word_frequency")
_CHECKS: Mapping[str, Callable[[_Wanted, str], bool]] = {
    "keywords:existence": lambda wanted, text: all(_places(word, text) for word in wanted["keywords"]),
    "keywords:frequency": lambda wanted, text: wanted.compares(
        _places(wanted["keyword"].strip(), text), "relation", "frequency"
    ),
    "keywords:forbidden_words": lambda wanted, text: (
        not any(_places(rf"\b{word}\b", text) for word in wanted["forbidden_words"])
    ),
    "keywords:letter_frequency": _letters,
    "language:response_language": _language,
    "length_constraints:number_sentences": _sentence_count,
    "length_constraints:number_paragraphs": _paragraphs,
    "length_constraints:number_words": lambda wanted, text: wanted.compares(
        len(re.findall(r"\w+", text)), "relation", "num_words"
    ),
    "length_constraints:nth_paragraph_first_word": _first_word,
    "detectable_content:number_placeholders": lambda wanted, text: (
        len(re.findall(r"\[.*?\]", text)) >= wanted["num_placeholders"]
    ),
    "detectable_content:postscript": _postscript,
    "detectable_format:number_bullet_lists": _bullets,
    "detectable_format:constrained_response": lambda wanted, text: any(option in text for option in _OPTIONS),
    "detectable_format:number_highlighted_sections": _highlights,
    "detectable_format:multiple_sections": _sections,
    "detectable_format:json_format": _json,
    "detectable_format:title": _title,
    "combination:two_responses": _two,
    "combination:repeat_prompt": _repeats,
    "startend:end_checker": _ends,
    "startend:quotation": _quoted,
    "change_case:capital_word_frequency": _capital_words,
    "change_case:english_capital": lambda wanted, text: text.isupper() and _language(wanted, text, "en"),
    "change_case:english_lowercase": lambda wanted, text: text.islower() and _language(wanted, text, "en"),
    "punctuation:no_comma": lambda wanted, text: "," not in text,
}
"""Functions that check an instruction, by its kind."""
