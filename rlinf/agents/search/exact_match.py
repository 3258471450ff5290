"""Exact match of answers to questions, as SQuAD and Search-R1 compute it."""

from __future__ import annotations

import re
import string

from rlinf.config.reading import parse_json

_ARTICLES = re.compile(r"\b(?:a|an|the)\b")
_SIGNS = str.maketrans("", "", string.punctuation)


def exact_match(said: str, answers: str) -> float:
    """1.0 if an answer is one of the right ones but for case, punctuation, articles and white space; else 0.0.

    Args:
        said: by the model.
        answers: the right one, or a JSON list of several, such as `["Paris", "Paris, France"]`, or a mapping whose
            `target` is one of those.
    """
    return float(normalized(said) in {normalized(each) for each in right_answers(answers)})


def normalized(text: str) -> str:
    """A text as SQuAD compares it (arXiv:1606.05250, section 6.1): in lower case, without punctuation and articles."""
    return " ".join(_ARTICLES.sub(" ", text.lower().translate(_SIGNS)).split())


def right_answers(answers: str) -> list[str]:
    """All right answers in a data set's column; see `exact_match`."""
    try:
        given = parse_json(answers)
    except ValueError:
        return [answers]
    if isinstance(given, dict):
        given = given.get("target", answers)
    return [str(each) for each in given] if isinstance(given, list) else [answers if given is None else str(given)]
