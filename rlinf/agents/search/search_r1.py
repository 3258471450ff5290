"""Search-R1 (arXiv:2503.09516): a model that reasons, searches between its thoughts, and answers.

In: a question, and a retriever. Out: 1.0 for an exact match. The model writes `<search>query</search>`, reads
`<information>…</information>`, which is not learned from, and goes on; `<answer>…</answer>` ends it. Who wakes whom:
the retriever's documents wake the agent.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from rlinf.agents.llm import ContextFull
from rlinf.agents.search.exact_match import exact_match
from rlinf.agents.search.retrievers import Document, retriever_of

_STOPS = ["</search>", "</answer>"]
_BEGINS = re.compile(r"<(search|answer)>")
INVALID = (
    "\nMy previous action is invalid. If I want to search, I should put the query between <search> and </search>. If I "
    "want to give the final answer, I should put the answer between <answer> and </answer>. Let me try again.\n"
)
"""What the model reads behind an answer in which it neither searched nor answered, as in the paper's code."""


async def search_r1(
    task: Any,
    llm: Any,
    *,
    retriever: str,
    topk: int = 3,
    turns: int = 4,
    documents: str = "Doc {number}(Title: {title}) {text}\n",
    information: str = "\n\n<information>{documents}</information>\n\n",
    invalid: str = INVALID,
    settings: Mapping[str, Any] | None = None,
) -> float:
    """Work on a question by the protocol of the paper, on tokens: the model goes on behind what it has written.

    Args:
        task: a prompt that explains the protocol; `answer` is a right answer, or a JSON list of them.
        llm: the model.
        retriever: `http://…/retrieve`, or a corpus in JSON lines.
        topk: documents per search.
        turns: searches at most; in the turn after the last one the model can only answer.
        documents: how a document is shown; of `{number}`, `{title}` and `{text}`.
        information: what the model reads behind a search; of `{documents}`.
        invalid: what it reads where it neither searched nor answered.
        settings: of the retriever: `timeout`, `attempts`, `pause`, `at_once`.

    Returns:
        1.0 if the answer is a right one; see `exact_match`.

    Raises:
        UserError: the retriever failed, or the question does not fit; the attempt then counts as not drawn.
    """
    searching = retriever_of(retriever, **(settings or {}))
    chat = llm.trajectories.chat
    ids = task.token_ids
    for turn in range(turns + 1):
        try:
            reply = await llm.generate(ids, stop=_STOPS)
        except ContextFull:
            if not turn:
                raise  # the question alone is too long
            return 0.0
        action = action_of(reply.text)
        if action is not None and action[0] == "answer":
            return exact_match(action[1], task.answer)
        if turn == turns:
            break
        if action is None:
            read = invalid
        else:
            found = await searching.search(action[1].strip(), topk)
            read = information.format(documents=shown(found, documents))
        ids = np.concatenate([ids, reply.ids, chat.ids(read)])
    return 0.0


def action_of(text: str) -> tuple[str, str] | None:
    """The first action in an answer: `search` or `answer`, and the words inside its tags; None: there is none.

    Args:
        text: the answer. Tags that are begun thousands of times and never closed cost no more than its length.
    """
    last = {kind: text.rfind(f"</{kind}>") for kind in ("search", "answer")}
    for match in _BEGINS.finditer(text):
        if match.end() <= last[kind := match[1]]:
            return kind, text[match.end() : text.find(f"</{kind}>", match.end())]
    return None


def shown(found: Sequence[Document], form: str = "Doc {number}(Title: {title}) {text}\n") -> str:
    """Documents as the model reads them, numbered from 1."""
    return "".join(form.format(number=number, title=each.title, text=each.text) for number, each in enumerate(found, 1))
