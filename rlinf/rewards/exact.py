"""Rewards by comparison with the one right answer: letter by letter, by its words, or by the grade of a model."""

from __future__ import annotations

import os
import re
import string
from typing import Any

from rlinf.rewards.base import Score, after_thought, trusted

_PLAIN = str.maketrans("", "", string.punctuation)
_ASKED = """Compare an answer to a question with the answer that is known to be right, and grade it.

A, correct: it holds all that the right answer says about what was asked, and nothing that contradicts it. Wording,
capitals, order, typing errors in names and words of doubt do not matter. A number is to be right to the last digit that
the right answer gives. What the question does not ask for, or says itself, may be missing.
B, incorrect: something in it contradicts the right answer, whether it is said with doubt or not.
C, not attempted: what is asked for is missing in part or in whole, and nothing contradicts the right answer.

Question: {question}
Right answer: {answer}
Answer to be graded: {response}

Reply with the letter alone: A, B or C."""
_GRADES = {"A": "correct", "B": "incorrect", "C": "not_attempted"}


@trusted
def exact(response: str, answer: str) -> float:
    """1.0 if the response is the answer, character for character; else 0.0."""
    return 1.0 if response == answer else 0.0


async def facts(
    response: str, answer: str, prompt: str, problem: str = "", *, url: str = "", model: str = "", key: str = ""
) -> Score:
    """1 if the response says the answer; else 0.

    With `url`, a model that judges gives one of SimpleQA's three grades, which are parts of the score: `correct`,
    `incorrect`, `not_attempted`. Without, it is compared as texts: without capitals, punctuation and articles, the
    words of the answer must stand in the response one after the other. Nobody then tells a refusal from an error, and
    an answer in other words is wrong.

    Args:
        response: what the model wrote; what stands before a last `</think>` does not count.
        answer: the right one.
        prompt: the question, as it was asked.
        problem: the question itself; "" takes the prompt.
        url: of an endpoint as OpenAI's, such as "http://10.0.0.7:8000/v1".
        model: that judges, as the endpoint calls it.
        key: name of the environment's variable that has the endpoint's key.

    Raises:
        ValueError: the endpoint refuses, or its model gives no grade.
    """
    text = after_thought(response)
    if not url:
        words, right = _words(text), _words(answer)
        return Score(float(bool(right) and f" {right} " in f" {words} "))
    grade = _GRADES[
        _grade(await _judged(url, model, key, _ASKED.format(question=problem or prompt, answer=answer, response=text)))
    ]
    return Score(float(grade == "correct"), {each: float(each == grade) for each in _GRADES.values()})


def _words(text: str) -> str:
    return " ".join(re.sub(r"\b(a|an|the)\b", " ", text.lower().translate(_PLAIN)).split())


def _grade(text: str) -> str:
    match = re.search(r"\b[ABC]\b", after_thought(text))
    if match is None:
        raise ValueError(f"the judge gave no grade of A, B or C, but {text!r:.200}")
    return match[0]


async def _judged(url: str, model: str, key: str, text: str) -> str:
    """The answer of a model to a text."""
    import aiohttp  # here: what is compared as texts needs none

    if key and key not in os.environ:
        raise ValueError(f"args.key: the environment has no variable {key}")
    headers = {"Authorization": f"Bearer {os.environ[key]}"} if key else {}
    request: dict[str, Any] = {"model": model, "messages": [{"role": "user", "content": text}], "temperature": 0}
    async with (
        aiohttp.ClientSession() as session,
        session.post(f"{url.rstrip('/')}/chat/completions", json=request, headers=headers) as reply,
    ):
        if reply.status != 200:
            raise ValueError(f"the judge at {url} answers {reply.status}: {(await reply.text())[:200]}")
        content = await reply.json()
    try:
        return str(content["choices"][0]["message"]["content"])
    except (LookupError, TypeError):
        raise ValueError(f"the judge at {url} answers no completion of a chat: {content!r:.200}") from None
