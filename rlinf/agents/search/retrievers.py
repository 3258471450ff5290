"""Retrievers: what documents there are for a query.

In: a query. Out: the best documents, the best one first. `Bm25` searches a small corpus in this process;
`HttpRetriever` asks a server, and who awaits it is woken by its answer or by the deadline.
"""

from __future__ import annotations

import asyncio
import functools
import weakref
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from rlinf.config.reading import parse_json
from rlinf.runtime.base.errors import UserError

_SHOWN = 200
"""Characters of a server's complaint that an error quotes."""


@dataclass(frozen=True, slots=True)
class Document:
    """A passage of the corpus."""

    title: str
    """Of what it is from; "" for none."""
    text: str
    """What it says."""

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
        known = [word for word in words if word in self._index.vocab_dict]
        if not known:
            return []
        scores = self._index.get_scores(known)
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
            found, wrong = await self._asked({"queries": [query], "topk": topk, "return_scores": True})
            if found is not None:
                return found[:topk]
        raise UserError(f"retriever {self._url}: no documents in {self._attempts} attempts; the last one: {wrong}")

    async def _asked(self, request: Mapping[str, Any]) -> tuple[list[Document] | None, str]:
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
