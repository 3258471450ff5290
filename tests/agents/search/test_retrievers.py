"""Documents by BM25, and from a retrieval server that answers, fails, hangs or talks nonsense."""

from __future__ import annotations

import asyncio
import json

import pytest

from rlinf.agents.search import Bm25, Document, HttpRetriever, exact_match, retriever_of
from rlinf.runtime.base.errors import UserError

FOUND = {"result": [[{"document": {"id": "1", "contents": '"Oslen"\nA town.'}, "score": 3.5}]]}


class Server:
    """Answers requests with the statuses and bodies of a list, one after the other; a body None never comes."""

    def __init__(self, *answers):
        self.answers, self.asked, self.gone = list(answers), [], asyncio.Event()

    async def __aenter__(self):
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.url = f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}/retrieve"
        return self

    async def __aexit__(self, *_):
        self._server.close()

    async def _serve(self, reader, writer):
        try:
            while head := await reader.readuntil(b"\r\n\r\n"):
                (length,) = [
                    int(line.split(b":")[1]) for line in head.lower().splitlines() if b"content-length" in line
                ]
                self.asked.append(json.loads(await reader.readexactly(length)))
                status, body = self.answers[min(len(self.asked), len(self.answers)) - 1]
                if body is None:
                    await reader.read()
                    self.gone.set()
                    return
                said = body.encode() if isinstance(body, str) else json.dumps(body).encode()
                writer.write(b"HTTP/1.1 %d X\r\nContent-Length: %d\r\n\r\n" % (status, len(said)) + said)
                await writer.drain()
        except asyncio.IncompleteReadError:
            pass
        finally:
            writer.close()


async def test_the_request_and_the_answer_are_those_of_search_r1():
    async with Server((200, FOUND)) as server:
        found = await HttpRetriever(server.url).search("a town", topk=3)
    assert server.asked == [{"queries": ["a town"], "topk": 3, "return_scores": True}]
    assert found == [Document("Oslen", "A town.")]


async def test_documents_without_scores_are_read_too():
    async with Server((200, {"result": [[{"contents": '"Oslen"\nA town.'}] * 5]})) as server:
        assert await HttpRetriever(server.url).search("a town", topk=2) == [Document("Oslen", "A town.")] * 2


async def test_a_server_that_fails_is_asked_again():
    async with Server((503, "starting"), (500, "oh"), (200, FOUND)) as server:
        assert await HttpRetriever(server.url, pause=0.0).search("q", 1)
    assert len(server.asked) == 3


async def test_attempts_come_to_an_end_with_the_last_reason():
    async with Server((503, "still starting")) as server:
        with pytest.raises(UserError, match=r"documents.*2 attempts.*status 503:"):
            await HttpRetriever(server.url, attempts=2, pause=0.0).search("q", 1)
    assert len(server.asked) == 2


async def test_a_request_that_is_refused_is_not_repeated():
    async with Server((422, "no field queries")) as server:
        with pytest.raises(UserError, match=r"422.*no.*queries"):
            await HttpRetriever(server.url, pause=0.0).search("q", 1)
    assert len(server.asked) == 1


@pytest.mark.parametrize("body", ["<html>", "[]", {"result": []}, {"result": [[1]]}, {"result": [[{"document": {}}]]}])
async def test_nonsense_is_shown(body):
    async with Server((200, body)) as server:
        with pytest.raises(UserError, match="result"):
            await HttpRetriever(server.url).search("q", 1)


async def test_a_server_that_hangs_is_given_up_at_the_deadline():
    async with Server((200, None)) as server:
        with pytest.raises(UserError, match=r"longer.*0\.5 seconds"):
            await HttpRetriever(server.url, timeout=0.5, attempts=2, pause=0.0).search("q", 1)
    assert 1 <= len(server.asked) <= 2, "on a busy machine an attempt may end before the server has read it"


async def test_who_stops_waiting_lets_the_server_go():
    async with Server((200, None)) as server:
        searching = asyncio.create_task(HttpRetriever(server.url).search("q", 1))
        while not server.asked:
            await asyncio.sleep(0)
        searching.cancel()
        with pytest.raises(asyncio.CancelledError):
            await searching
        await asyncio.wait_for(server.gone.wait(), 60)


async def test_nobody_listens():
    async with Server() as server:
        pass
    with pytest.raises(UserError, match="ConnectError"):
        await HttpRetriever(server.url, attempts=2, pause=0.0).search("q", 1)


async def test_bm25_finds_what_shares_rare_words():
    index = Bm25(
        Document("", text) for text in ("mira lives in oslen", "tola lives in baru", "baru is a town in oslen")
    )
    (best,) = await index.search("where does mira live?", 1)
    assert best.text == "mira lives in oslen"
    assert [each.text for each in await index.search("tola baru", 5)] == [
        "tola lives in baru",
        "baru is a town in oslen",
    ]
    assert await index.search("zzz", 3) == []
    assert await index.search("", 3) == []


def test_a_corpus_that_cannot_be_read_is_said(tmp_path):
    with pytest.raises(UserError, match=r"nowhere\.jsonl.*read:"):
        retriever_of(str(tmp_path / "nowhere.jsonl"))
    corpus = tmp_path / "corpus.jsonl"
    corpus.write_text('{"contents": "one"}\n{"title": "x"}\n')
    with pytest.raises(UserError, match=r"2:.*document.*`contents`"):
        retriever_of(str(corpus))
    corpus.write_text("")
    with pytest.raises(UserError, match="no document"):
        retriever_of(str(corpus))
    with pytest.raises(UserError, match=r"timeout.*settings"):
        retriever_of(str(corpus), timeout=3.0)


@pytest.mark.parametrize(
    ("said", "answers", "right"),
    [
        (" The Eiffel-Tower. ", "eiffeltower", 1.0),
        ("Paris", '["Paris, France", "paris"]', 1.0),
        ("Paris", '{"target": ["Paris"]}', 1.0),
        ("Paris", '{"target": "London"}', 0.0),
        ("1912", "1912", 1.0),
        ("", '["x"]', 0.0),
        ("Pari", "Paris", 0.0),
    ],
)
def test_exact_match_is_that_of_squad(said, answers, right):
    assert exact_match(said, answers) == right
