"""Tools: schemas from signatures, arguments that are checked, and whatever happens is a text for the model."""

from __future__ import annotations

import asyncio
import contextvars
import enum
import functools
import sys
import threading
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import rlinf
from rlinf.agents.tools.formats import Parsed, ToolCall
from rlinf.agents.tools.tool import Tool, ToolFailed, Tools, output_text, tool
from rlinf.runtime.base.clock import run_virtual
from rlinf.runtime.base.errors import UserError


class Unit(enum.Enum):
    METRE = "m"
    MILE = "mi"


@dataclass
class Place:
    north: float
    east: float = 0.0


@dataclass
class Node:
    value: int
    children: list[Node]


def search(query: str, limit: int = 3) -> str:
    """Find documents.

    The best come first.

    Args:
        query: what to look
            for.
        limit: how many.

    Returns:
        Their texts.
    """
    return f"{limit} of {query}"


def call(made, **arguments):
    return asyncio.run(made.call(arguments))


def test_a_schema_is_the_signature_and_the_docstring():
    assert tool(search).schema == {
        "type": "function",
        "function": {
            "name": "search",
            "description": "Find documents.\n\nThe best come first.",
            "parameters": {
                "type": "object",
                "properties": {
                    "query": {"type": "string", "description": "what to look for."},
                    "limit": {"type": "integer", "description": "how many.", "default": 3},
                },
                "required": ["query"],
            },
        },
    }


def numpy_style(n: int) -> int:
    """Double.

    Parameters
    ----------
    n : int
        what to double
    """
    return 2 * n


def rest_style(n: int) -> int:
    """Double.

    :param n: what to double
    """
    return 2 * n


def annotated(n: Annotated[int, "what to double"]) -> int:
    """Double."""
    return 2 * n


@pytest.mark.parametrize("function", [numpy_style, rest_style, annotated])
def test_descriptions_come_from_any_style(function):
    made = tool(function)
    assert made.description == "Double."
    assert made.parameters["properties"]["n"]["description"] == "what to double"


def everything(
    schema: list[int],
    unit: Unit = Unit.METRE,
    place: Place | None = None,
    kind: Literal["a", 2] = "a",
    options: dict[str, float] | None = None,
    pair: tuple[int, str] = (1, "x"),
    json: str = "",
) -> Any:
    return [schema, unit, place, kind, options, pair, json]


def test_types_are_shown_without_references_and_made_of_json():
    made = tool(everything)
    properties = made.parameters["properties"]
    assert properties["unit"]["enum"] == ["m", "mi"]
    assert properties["place"]["anyOf"][0]["required"] == ["north"]
    assert "$ref" not in str(made.parameters)
    assert "title" not in str(made.parameters)
    given_ = {"schema": [1], "unit": "mi", "place": {"north": 1}, "kind": 2, "options": {"x": 1}, "pair": [3, "y"]}
    assert made.check(given_) == {
        "schema": [1], "unit": Unit.MILE, "place": Place(1.0), "kind": 2, "options": {"x": 1.0}, "pair": (3, "y"),
    }  # fmt: skip
    assert call(made, schema=[1], json="j") == '[[1],"m",null,"a",null,[1,"x"],"j"]'


def test_texts_are_read_as_json_where_no_text_fits():
    made = tool(everything)
    assert made.check({"schema": "[1, 2]", "place": '{"north": "1"}', "options": "null", "json": "[1]"}) == {
        "schema": [1, 2], "place": Place(1.0), "options": None, "json": "[1]",
    }  # fmt: skip
    assert made.check({"schema": ["1"], "json": 5}) == {"schema": [1], "json": "5"}


def test_an_argument_may_be_called_title_and_a_type_may_contain_itself():
    def book(title: str, properties: Node) -> str:
        return title

    made = tool(book)
    assert set(made.parameters["properties"]) == {"title", "properties"}
    assert made.parameters["$defs"]
    assert call(made, title="T", properties={"value": 1, "children": [{"value": 2, "children": []}]}) == "T"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({}, "query is missing"),
        ({"query": "x", "lmit": 3}, "lmit. The arguments are: query, limit"),
        ({"query": "x", "limit": "many"}, "limit: "),
        ({"query": None}, "query: "),
        ('{"query": "x"', "no valid JSON"),
        ("[1]", "must be a JSON object"),
        ([1], "must be a JSON object"),
        (None, "must be a JSON object"),
    ],
)
def test_wrong_arguments_are_told_to_the_model(arguments, said):
    made = tool(search)
    text = asyncio.run(made.call(arguments))
    assert text.startswith("Error: search: ")
    assert said in text
    assert made.counts == {"wrong_arguments": 1}


ANYTHING = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=5,
)


@settings(max_examples=100)
@given(st.dictionaries(st.sampled_from(["schema", "unit", "place", "kind", "options", "pair", "x"]), ANYTHING))
def test_whatever_a_model_gives_is_answered(arguments):
    made = tool(everything)
    assert call(made, **arguments)
    assert made.counts.total() == 1


def test_exceptions_are_told_and_counted():
    def fails(how: int) -> str:
        raise [ValueError("no \ud800\n such"), ToolFailed("gone"), SystemExit(2), KeyError()][how]

    async def fails_too(how: int) -> str:
        fails(how)

    for function in (fails, fails_too):
        made = tool(function)
        assert call(made, how=0) == f"Error: {function.__name__} raised ValueError: no ? such"
        assert call(made, how=1) == "Error: gone"
        assert call(made, how=2) == f"Error: {function.__name__} raised SystemExit: 2"
        assert call(made, how=3) == f"Error: {function.__name__} raised KeyError"
        assert made.counts == {"error": 4}


def test_a_coroutine_function_is_cancelled_at_its_deadline():
    ended = []

    async def slow(seconds: float) -> str:
        try:
            await asyncio.sleep(seconds)
        finally:
            ended.append(seconds)
        return "done"

    made = tool(slow, timeout=5)

    async def main():
        return [
            await made.call({"seconds": 4}),
            await made.call({"seconds": 60}),
            await made.call({"seconds": 4}, timeout=3),
        ]

    texts, seconds = run_virtual(main())
    assert texts[0] == "done"
    assert [text.split(" seconds")[0][-2:] for text in texts[1:]] == [" 5", " 3"]
    assert all(text.startswith("Error: slow ") for text in texts[1:])
    assert seconds == 12
    assert ended == [4, 60, 4]
    assert made.counts == {"ok": 1, "timeout": 2}


def test_one_that_does_not_listen_is_left_to_itself():
    async def deaf() -> str:
        for _ in range(3):
            try:
                await asyncio.sleep(100)
            except asyncio.CancelledError:
                pass
        return "late"

    text, seconds = run_virtual(tool(deaf, timeout=5).call({}))
    assert " 5 seconds" in text
    assert seconds < 400


def test_its_own_cancellation_is_an_error_and_the_callers_passes():
    async def cancelled() -> str:
        raise asyncio.CancelledError

    assert run_virtual(tool(cancelled).call({}))[0].startswith("Error: cancelled ")
    ended = asyncio.Event()

    async def waits() -> str:
        try:
            await asyncio.sleep(1000)
        finally:
            ended.set()

    async def main():
        running = asyncio.ensure_future(Tools([waits]).run(ToolCall("1", "waits", {}), timeout=500))
        await asyncio.sleep(1)
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
        assert ended.is_set()

    assert run_virtual(main())[1] == 1


def test_a_function_that_blocks_keeps_nobody_waiting():
    gate = threading.Event()

    def blocks() -> str:
        gate.wait()
        return "late"

    async def main():
        made = tool(blocks, timeout=0.05)
        other = asyncio.ensure_future(tool(search).call({"query": "x"}))
        text = await made.call({})
        assert await other == "3 of x"
        gate.set()
        return text

    assert " 0.05 seconds" in asyncio.run(main())


def test_functions_run_in_other_threads_with_the_callers_context():
    seat = contextvars.ContextVar("seat", default="none")

    def where() -> str:
        return f"{seat.get()} {threading.current_thread() is threading.main_thread()}"

    async def main():
        seat.set("mine")
        return await tool(where).call({})

    assert asyncio.run(main()) == "mine False"


def test_an_output_that_is_too_long_is_cut_and_counted():
    def long() -> str:
        return "x" * 50

    made = tool(long, longest=20)
    assert call(made).startswith("x" * 20 + "\n[cut: 30 ")
    assert made.counts == {"too_long": 1}


def test_outputs_are_texts_that_a_tokenizer_takes():
    assert output_text("é\ud800") == "é?"
    assert output_text({"a": np.arange(2), "b": Unit.MILE, "c": Place(1.0), "d": float("nan")}) == (
        '{"a":[0,1],"b":"mi","c":{"north":1.0,"east":0.0},"d":NaN}'
    )
    assert output_text(None) == "null"
    circle: list[Any] = []
    circle.append(circle)
    assert "Error: of raised" in call(tool(lambda: circle, name="of"))


def test_tools_of_partials_methods_and_objects():
    class Shop:
        def price(self, item: str) -> int:
            """What it costs."""
            return len(item)

        async def __call__(self, item: str) -> str:
            return f"sold {item}"

    assert call(tool(Shop().price), item="tea") == "3"
    assert call(tool(Shop()), item="tea") == "sold tea"
    assert tool(Shop()).name == "Shop"
    made = tool(functools.partial(search, limit=9), name="nine")
    assert call(made, query="x") == "9 of x"


@rlinf.tool(timeout=3, name="twice")
def double(n: int) -> int:
    """Double."""
    return 2 * n


def test_a_decorated_function_is_still_that_function():
    assert isinstance(double, Tool)
    assert double(4) == 8
    assert (double.name, double.timeout) == ("twice", 3)
    assert rlinf.Tools([double])["twice"] is double


def untyped(n):
    return n


def starred(*rows: int):
    return rows


def callback(hook: threading.Event):
    return hook


@pytest.mark.parametrize(
    ("function", "said"),
    [
        (untyped, r"type hint"),
        (starred, r"\*rows"),
        (callback, "no JSON schema"),
        (lambda: 1, "<lambda>"),
        (3, "3"),
    ],
)
def test_functions_that_no_model_can_call_are_the_users_error(function, said):
    with pytest.raises(UserError, match=said):
        tool(function)


def test_missing_packages_are_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "docstring_parser", None)
    with pytest.raises(UserError, match=r"pip install"):
        tool(search)


def test_several_calls_run_together_and_answer_in_order():
    async def wait(seconds: float) -> str:
        await asyncio.sleep(seconds)
        return f"{seconds:g}"

    tools = Tools([wait, tool(search)])
    parsed = Parsed(
        "",
        (ToolCall("a", "wait", {"seconds": 9}), ToolCall("b", "wait", {"seconds": 2}), ToolCall("c", "wiat", {})),
        ("no valid JSON",),
    )
    messages, seconds = run_virtual(tools.run(parsed))
    assert seconds == 9
    keys = ("role", "tool_call_id", "name", "content")
    assert [tuple(message[key] for key in keys) for message in messages[:2]] == [
        ("tool", "a", "wait", "9"),
        ("tool", "b", "wait", "2"),
    ]
    assert "wait, search" in messages[2]["content"]
    assert [*messages[3]] == ["role", "content"]
    assert messages[3]["content"].endswith("valid JSON")
    assert tools.counts == {"ok": 2, "unknown": 1, "broken": 1}
    assert [schema["function"]["name"] for schema in tools.schemas] == ["wait", "search"]


def test_names_are_unique():
    with pytest.raises(UserError, match=r"called search"):
        Tools([search, tool(search)])
