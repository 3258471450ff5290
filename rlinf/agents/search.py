"""Question answering with search: exact match as in SQuAD and Search-R1, retrievers, and two agents that search.

Retrievers return the best documents for a query, the best one first: `Bm25` searches a small corpus in this process,
`HttpRetriever` asks a server, whose answer or the deadline wakes the caller.

The agent of Search-R1 (arXiv:2503.09516) reasons, searches between its thoughts, and answers. The model writes
`<search>query</search>`, reads `<information>…</information>`, which is not learned from, and goes on;
`<answer>…</answer>` ends it. The other agent searches by calls of a tool, for models that were trained on tools. Both
get a question and a retriever, and return 1.0 for an exact match.
"""

from __future__ import annotations

import asyncio
import functools
import re
import string
import weakref
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from rlinf.agents.llm import ContextFull
from rlinf.agents.tools.tool import offers_tools, tool
from rlinf.config.reading import parse_json
from rlinf.runtime.base.errors import UserError

_ARTICLES = re.compile(r"\b(?:a|an|the)\b")
_SIGNS = str.maketrans("", "", string.punctuation)


def exact_match(text: str, answers: str) -> float:
    """1.0 if an answer is one of the right ones but for case, punctuation, articles and white space; else 0.0.

    Args:
        text: by the model.
        answers: the right one, or a JSON list of several, such as `["Paris", "Paris, France"]`, or a mapping whose
            `target` is one of those.
    """
    return float(normalized(text) in {normalized(each) for each in right_answers(answers)})


def normalized(text: str) -> str:
    """A text as SQuAD compares it (arXiv:1606.05250, section 6.1): in lower case, without punctuation and articles."""
    return " ".join(_ARTICLES.sub(" ", text.lower().translate(_SIGNS)).split())


def right_answers(answers: str) -> list[str]:
    """All right answers in a data set's column; see `exact_match`."""
    try:
        value = parse_json(answers)
    except ValueError:
        return [answers]
    if isinstance(value, dict):
        value = value.get("target", answers)
    return [str(each) for each in value] if isinstance(value, list) else [answers if value is None else str(value)]


_SHOWN = 200
"""Characters of a server's complaint that an error quotes."""


@dataclass(frozen=True, slots=True)
class Document:
    """A passage of the corpus."""

    title: str
    """Title of the page or article that the passage is from; "" for none."""
    text: str
    """Words of the passage."""

    @staticmethod
    def of(row: Mapping[str, Any]) -> Document:
        """A row of a corpus as Search-R1 publishes them: `contents` is the title in quotes, a line end, and the text.

        Raises:
            UserError: the row has neither `contents` nor `text`.
        """
        if isinstance(row.get("text"), str):
            return Document(str(row.get("title", "")), row["text"])
        if not isinstance(row.get("contents"), str):
            raise UserError(f"a document needs `contents`, or `title` and `text`; there are {sorted(row)}")
        title, line_end, text = row["contents"].partition("\n")
        return Document(title.strip('"'), text) if line_end else Document("", title)


class Retriever(Protocol):
    """Finds documents."""

    async def search(self, query: str, topk: int) -> list[Document]:
        """The best documents for a query, at most `topk`, the best one first."""


class Bm25:
    """BM25 over a corpus in memory, by the `bm25s` package; for thousands of documents, not for millions.

    Args:
        documents: all there are.

    Raises:
        UserError: there is none, or bm25s is not installed.
    """

    def __init__(self, documents: Iterable[Document]) -> None:
        try:
            import bm25s
        except ImportError:
            raise UserError("BM25 needs the package bm25s: pip install 'rlinf[search]'") from None
        self._documents = list(documents)
        if not self._documents:
            raise UserError("BM25: the corpus holds no document")
        self._tokens = functools.partial(bm25s.tokenize, stopwords=None, show_progress=False)
        self._index = bm25s.BM25()
        self._index.index(self._tokens([f"{each.title} {each.text}" for each in self._documents]), show_progress=False)

    @staticmethod
    def of_file(path: str | Path) -> Bm25:
        """The index of a corpus in JSON lines; see `Document.of`.

        Raises:
            UserError: it cannot be read.
        """
        try:
            lines = Path(path).read_text(encoding="utf-8").splitlines()
        except OSError as error:
            raise UserError(f"the corpus {path} cannot be read: {error.strerror or error}") from None
        documents = []
        for number, line in enumerate(lines, 1):
            try:
                documents.append(Document.of(parse_json(line)))
            except (ValueError, AttributeError, UserError) as error:
                raise UserError(f"the corpus {path}, line {number}: {error}") from None
        return Bm25(documents)

    async def search(self, query: str, topk: int) -> list[Document]:
        """The documents with the highest scores above 0; of equal ones, the first in the corpus."""
        words = self._tokens(query, return_ids=False)[0]
        indexed = [word for word in words if word in self._index.vocab_dict]
        if not indexed:
            return []
        scores = self._index.get_scores(indexed)
        best = (-scores).argsort(kind="stable")[:topk]
        return [self._documents[each] for each in best.tolist() if scores[each] > 0]


class HttpRetriever:
    """A retrieval server as Search-R1 publishes it: `POST {queries, topk, return_scores}`.

    A server that cannot be reached, is too slow or fails by itself (status 5xx, 429) is asked again.

    Args:
        url: of the endpoint, such as http://127.0.0.1:8000/retrieve.
        timeout: seconds of one attempt.
        attempts: how often it is asked at most.
        pause: seconds before the second attempt; twice as long before each further one.
        at_once: requests that are under way at the same time.
    """

    def __init__(
        self, url: str, *, timeout: float = 30.0, attempts: int = 4, pause: float = 0.5, at_once: int = 256
    ) -> None:
        if attempts < 1 or timeout <= 0 or pause < 0 or at_once < 1:
            raise UserError(f"retriever {url}: attempts, timeout and at_once must be above 0, and pause not below 0")
        self._url, self._timeout, self._attempts, self._pause = url, timeout, attempts, pause
        self._at_once = at_once
        self._clients: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, Any] = weakref.WeakKeyDictionary()

    async def search(self, query: str, topk: int) -> list[Document]:
        """The documents that the server has for a query.

        Raises:
            UserError: it gave no documents in all attempts, or refused the request.
        """
        wrong = ""
        for attempt in range(self._attempts):
            if attempt:
                await asyncio.sleep(self._pause * 2 ** (attempt - 1))
            documents, wrong = await self._request({"queries": [query], "topk": topk, "return_scores": True})
            if documents is not None:
                return documents[:topk]
        raise UserError(f"retriever {self._url}: no documents in {self._attempts} attempts; the last one: {wrong}")

    async def _request(self, request: Mapping[str, Any]) -> tuple[list[Document] | None, str]:
        """Documents; or None, and why there are none yet."""
        import httpx2

        try:
            async with asyncio.timeout(self._timeout):
                reply = await self._client().post(self._url, json=request)
        except (TimeoutError, httpx2.TimeoutException):
            return None, f"it took longer than {self._timeout:g} seconds"
        except httpx2.TransportError as error:
            return None, f"{type(error).__name__}: {error}"
        except httpx2.InvalidURL as error:
            raise UserError(f"retriever {self._url}: {error}") from None
        if reply.status_code >= 500 or reply.status_code == 429:
            return None, f"status {reply.status_code}: {reply.text[:_SHOWN]}"
        if reply.status_code != 200:
            raise UserError(
                f"retriever {self._url}: status {reply.status_code} for {{queries, topk, return_scores}}: "
                f"{reply.text[:_SHOWN]}"
            )
        try:
            return [Document.of(each.get("document", each)) for each in reply.json()["result"][0]], ""
        except (ValueError, KeyError, IndexError, TypeError, AttributeError, UserError):
            raise UserError(
                f"retriever {self._url}: the answer is not {{'result': [[{{'document': {{'contents': …}}}}, …]]}} but "
                f"{reply.text[:_SHOWN]}"
            ) from None

    def _client(self) -> Any:
        """The connections of the running event loop."""
        import httpx2

        loop = asyncio.get_running_loop()
        if (client := self._clients.get(loop)) is None:
            limits = httpx2.Limits(max_connections=self._at_once, max_keepalive_connections=self._at_once)
            client = self._clients[loop] = httpx2.AsyncClient(timeout=None, limits=limits, trust_env=False)
        return client


@functools.cache
def retriever_of(source: str, **settings: Any) -> Retriever:
    """The retriever that a configuration names; the same one each time.

    Args:
        source: `http://…` or `https://…`, or a corpus in JSON lines.
        settings: of `HttpRetriever`.

    Raises:
        UserError: there is none.
    """
    if source.startswith(("http://", "https://")):
        return HttpRetriever(source, **settings)
    if settings:
        raise UserError(f"retriever {source}: {', '.join(sorted(settings))} are settings of servers, not of a corpus")
    return Bm25.of_file(source)


_STOPS = ["</search>", "</answer>"]
_BEGINS = re.compile(r"<(search|answer)>")
INVALID = (
    "\nMy previous action is invalid. If I want to search, I should put the query between <search> and </search>. If I "
    "want to give the final answer, I should put the answer between <answer> and </answer>. Let me try again.\n"
)
"""Text that the model reads behind an answer in which it neither searched nor answered, as in the paper's code."""


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
            text = invalid
        else:
            results = await searching.search(action[1].strip(), topk)
            text = information.format(documents=shown(results, documents))
        ids = np.concatenate([ids, reply.ids, chat.ids(text)])
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


def shown(documents: Sequence[Document], form: str = "Doc {number}(Title: {title}) {text}\n") -> str:
    """Documents as the model reads them, numbered from 1."""
    return "".join(
        form.format(number=number, title=each.title, text=each.text) for number, each in enumerate(documents, 1)
    )


@offers_tools
async def search_by_tool(
    task: Any,
    llm: Any,
    *,
    retriever: str,
    topk: int = 3,
    turns: int = 4,
    settings: Mapping[str, Any] | None = None,
) -> float:
    """Work on a question by calls of a tool `search`, for models that were trained on tools.

    Args:
        task: a chat, or a text that the user says; `answer` is a right answer, or a JSON list of them.
        llm: the model.
        retriever: as of `search_r1`.
        topk: documents per search.
        turns: answers of the model that may call the tool; in the one after the last it can only answer.
        settings: of the retriever.

    Returns:
        1.0 if what it says at last is a right answer, inside `<answer>…</answer>` where it writes that.

    Raises:
        UserError: the retriever failed, or the chat template refuses the messages; the attempt then counts as not
            drawn.
    """
    searching = retriever_of(retriever, **(settings or {}))

    async def search(query: str) -> str:
        """Search an encyclopedia.

        Args:
            query: a few words.
        """
        try:
            return shown(await searching.search(query, topk)) or "Nothing was found."
        except UserError as error:
            failed.append(error)
            raise

    failed: list[UserError] = []
    offered = tool(search)
    messages = list(task.row.get("messages") or [{"role": "user", "content": task.text}])
    for turn in range(turns + 1):
        answer = await llm.chat(messages, tools=[offered])
        if turn == turns or not (answer.calls or answer.broken):
            answers = re.findall(r"<answer>(.*?)</answer>", answer.content or answer.text, re.DOTALL)
            return exact_match(answers[-1] if answers else answer.content or answer.text, task.answer)
        messages += [answer.message, *await answer.results()]
        if failed:
            raise failed[0]
    return 0.0
