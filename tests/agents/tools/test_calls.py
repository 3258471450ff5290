"""Call formats: what models of each family write is read back, and nothing that a model writes raises."""

from __future__ import annotations

import functools
import json
import re
from types import SimpleNamespace

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from rlinf.agents.tools.beginnings import Beginnings
from rlinf.agents.tools.formats import FORMATS, MOST_CALLS, CallFormat, Malformed, Read, call_format, typed
from rlinf.runtime.base.errors import UserError
from tests.growth import in_one_pass

NAMES = st.from_regex(r"[a-z][a-z_0-9]{0,8}", fullmatch=True)
SCALARS = st.none() | st.booleans() | st.integers(-(10**12), 10**12) | st.floats(-1e6, 1e6) | st.text(max_size=12)
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=6,
)
CALLS = st.lists(st.tuples(NAMES, st.dictionaries(NAMES, VALUES, max_size=3)), min_size=1, max_size=3)
SAID = st.sampled_from(["", "I will look it up.", "Zwölf {nicht} elf"])


def tojson(value):
    return json.dumps(value, ensure_ascii=False)


def object_of(name, arguments, key="arguments"):
    return tojson({"name": name, key: arguments})


def deepseek_v3(calls):
    each = [f"function<｜tool▁sep｜>{name}\n```json\n{tojson(given)}\n```" for name, given in calls]
    parts = [f"<｜tool▁call▁begin｜>{call}<｜tool▁call▁end｜>" for call in each]
    return "<｜tool▁calls▁begin｜>" + "\n".join(parts) + "<｜tool▁calls▁end｜>"


def deepseek_v31(calls):
    parts = [f"<｜tool▁call▁begin｜>{name}<｜tool▁sep｜>{tojson(given)}<｜tool▁call▁end｜>" for name, given in calls]
    return f"<｜tool▁calls▁begin｜>{''.join(parts)}<｜tool▁calls▁end｜>"


def pythonic(calls):
    def one(name, given):
        return f"{name}({', '.join(f'{key}={value!r}' for key, value in given.items())})"

    return f"[{', '.join(one(*call) for call in calls)}]"


WRITTEN = {
    "hermes": ("hermes", lambda calls: "\n".join(f"<tool_call>\n{object_of(*call)}\n</tool_call>" for call in calls)),
    "deepseek_v3": ("deepseek_v3", deepseek_v3),
    "deepseek_v31": ("deepseek_v3", deepseek_v31),
    "mistral": ("mistral", lambda calls: "[TOOL_CALLS] [" + ", ".join(object_of(*call) for call in calls) + "]"),
    "mistral_v11": ("mistral", lambda calls: "".join(f"[TOOL_CALLS]{name}[ARGS]{tojson(a)}" for name, a in calls)),
    "llama3_json": ("llama3_json", lambda calls: "; ".join(object_of(*call, key="parameters") for call in calls)),
    "llama3_tag": (
        "llama3_json", lambda calls: "<|python_tag|>" + "; ".join(object_of(*call, key="parameters") for call in calls)
    ),
    "pythonic": ("pythonic", pythonic),
    "llama4": ("pythonic", lambda calls: f"<|python_start|>{pythonic(calls)}<|python_end|>"),
}  # fmt: skip
"""How each family writes calls, as the authors of the models publish it."""
SILENT = {"llama3_json", "pythonic"}
"""Written with nothing before."""


def plain(parsed):
    return [(call.name, call.arguments) for call in parsed.calls]


def format_named(name):
    return call_format(name, SimpleNamespace(chat_template=None))


@pytest.mark.parametrize("shape", sorted(WRITTEN))
@settings(max_examples=60)
@given(calls=CALLS, said=SAID, thinks=st.booleans(), end=st.sampled_from(["", "\n"]))
@example([("f", {"x": "</tool_call> <think> }]\" '\n\\ \u2028 𝄞 [TOOL_CALLS] ```"})], "", False, "")
@example([("f", {"x": "</think>"})], "", False, "")
@example([("f", {"x": {"a": {"b": [{"c": "}{"}, []]}}})], "", True, "")
def test_calls_are_read_as_they_were_written(shape, calls, said, thinks, end):
    name, write = WRITTEN[shape]
    if name == "deepseek_v3" and "｜" in str(calls):
        return  # its special tokens cannot be written inside a call
    before = (
        "<think>\nFirst " + write(calls) + " or not?\n</think>\n\n" if thinks and "think>" not in str(calls) else ""
    )
    before += "" if shape in SILENT else said
    parsed = format_named(name).parse(before + write(calls) + end)
    assert plain(parsed) == calls
    assert parsed.broken == ()
    assert parsed.content == before.strip()


SIGNS = st.sampled_from([*'{}[]:,"0-.eut \n', "\\", "\\n", "\\ud83d", "\\ude00", "null", "</tool_call>"])
DAMAGE = st.lists(st.tuples(st.integers(0, 400), st.sampled_from(["put", "take", "change"]), SIGNS), max_size=2)


@pytest.mark.parametrize("shape", [shape for shape, (name, _) in WRITTEN.items() if name != "pythonic"])
@given(CALLS, DAMAGE, st.integers(1, 9))
@settings(max_examples=40, deadline=None)
def test_what_is_told_of_calls_while_they_come_is_how_they_begin(shape, calls, damage, step):
    name, write = WRITTEN[shape]
    format, jiter = format_named(name), pytest.importorskip("jiter")  # openai's and anthropic's clients read with it
    if name == "deepseek_v3" and "｜" in str(calls):
        return  # its special tokens cannot be written inside a call
    letters = list(write(calls))
    for place, what, sign in damage:
        at = place % len(letters)
        letters[at : at + (what != "put")] = [] if what == "take" else [sign]
    text = "".join(letters)
    here = [place for mark in format.marks if (place := text.find(mark)) >= 0]
    behind = text[min(here, default=0) :]
    coming, before = Beginnings(format), []
    for end in [*range(0, len(behind), step), len(behind)]:
        coming.read(behind[:end])
        now = [(call.name, call.written) for call in coming.calls]
        assert [call for call, _ in now[: len(before)]] == [call for call, _ in before]
        assert all(after.startswith(told) for (_, told), (_, after) in zip(before, now, strict=False))
        before = now
    for _, written in before:
        assert written == "" or isinstance(jiter.from_json(written.encode(), partial_mode="trailing-strings"), dict)
    whole = [(call.name, call.arguments()) for call in coming.calls if call.whole]
    if not damage:
        assert whole == plain(format.parse(text)) == calls


@settings(max_examples=60)
@given(calls=CALLS, said=SAID, spaced=st.booleans())
def test_qwen3_coder_writes_values_as_texts_and_schemas_give_their_types(calls, said, spaced):
    clean = [(name, {key: value for key, value in given.items() if "<" not in str(value)}) for name, given in calls]
    clean = [(f"{name}{place}", given) for place, (name, given) in enumerate(clean)]
    line = "\n" if spaced else ""
    text, schemas = said, []
    for name, given_ in clean:
        text += f"{line}<tool_call>{line}<function={name}>{line}"
        for key, value in given_.items():
            shown = value if isinstance(value, str) else tojson(value)
            text += f"<parameter={key}>\n{shown}\n</parameter>{line}"
        text += f"</function>{line}</tool_call>"
        types = {
            key: {"type": "string"} if isinstance(value, str) else {"type": "any"} for key, value in given_.items()
        }
        schemas.append({"type": "function", "function": {"name": name, "parameters": {"properties": types}}})
    parsed = format_named("qwen3_coder").parse(text, schemas)
    assert plain(parsed) == clean
    assert parsed.content == said
    untyped = format_named("qwen3_coder").parse(text)
    assert all(isinstance(value, str) for call in untyped.calls for value in call.arguments.values())


FRAGMENTS = [
    "<tool_call>", "</tool_call>", '{"name": "f", "arguments": {"x": 1}}', '{"name": "f"', "{", "}", "[", "]", '"', "'",
    "<think>", "</think>", "<function=f>", "<parameter=x>", "</parameter>", "</function>", "<function=", "[TOOL_CALLS]",
    "[ARGS]", "f", "(", ")", "f(x=1)", "g(x=", "*", "**{}", "<|python_tag|>", "<|python_start|>", "<|python_end|>", ";",
    "<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>", "function", "<｜tool▁sep｜>", "\n```json\n", "```",
    "<｜tool▁call▁end｜>", "<｜tool▁calls▁end｜>", "\n", " ", "\\", "\\ud800", "1e999", "NaN", "0x", "9" * 5000, "\x00",
    "lambda: 0", "{1: 2}", "{**x}", "b''", "...", "1j", "-", "not ",
]  # fmt: skip


@pytest.mark.parametrize("name", sorted(FORMATS))
@settings(max_examples=250)
@given(st.lists(st.sampled_from(FRAGMENTS) | st.text(max_size=5), max_size=14).map("".join))
def test_any_text_is_read_without_an_exception(name, text):
    parsed = format_named(name).parse(text)
    assert all(isinstance(each, str) and each for each in parsed.broken)
    for call in parsed.calls:
        assert isinstance(call.name, str)
        assert call.name
        tojson(call.arguments).encode()  # a chat template can show it, and a tokenizer encode it
        assert len(call.id) == 9
    assert len({call.id for call in parsed.calls}) == len(parsed.calls)


@pytest.mark.parametrize("name", sorted(FORMATS))
def test_depth_and_length_are_survived(name):
    for opening in ("<tool_call>", "", "<|python_tag|>", "[TOOL_CALLS]", "[f(x=", "<function=f><parameter=x>"):
        for deep in ("[" * 40_000, '{"a":' * 40_000, "-" * 40_000, "(" * 40_000, '{"name": "f", "arguments": ' * 2_000):
            assert not format_named(name).parse(opening + deep).calls


REPEATED = [
    ("hermes", "<tool_call>"),
    ("hermes", "<tool_call>{}</think>"),
    ("hermes", '<tool_call>{"name": "f"}'),
    ("qwen3_coder", "<tool_call><function=a>"),
    ("qwen3_coder", "<function=a><parameter=x></think>"),
    ("mistral", "[TOOL_CALLS]{"),
    ("mistral", "[TOOL_CALLS]a[ARGS]{}"),
    ("deepseek_v3", "<｜tool▁call▁begin｜>"),
    ("deepseek_v3", "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>"),
    ("llama3_json", '{"name": "f", "parameters": {}};'),
    ("pythonic", "<|python_start|>"),
]
"""What a collapsing policy writes again and again."""


class Watched(str):
    """A text that counts the characters that are looked at in it by `find`."""

    __slots__ = ("looked",)

    def find(self, what, start=0, end=None):
        end = len(self) if end is None else end
        found = super().find(what, start, end)
        self.looked = getattr(self, "looked", 0) + max(0, (end if found < 0 else found) - start)
        return found


class WatchedPattern:
    """A pattern that counts the characters that it searches of a `Watched` text."""

    def __init__(self, pattern):
        self.pattern = pattern

    def search(self, text, at=0):
        found = self.pattern.search(text, at)
        text.looked = getattr(text, "looked", 0) + (len(text) if found is None else found.end()) - at
        return found


@pytest.mark.parametrize(("name", "mark"), REPEATED)
def test_a_mark_that_is_repeated_thousands_of_times_costs_time_in_its_length_and_few_results(name, mark, monkeypatch):
    monkeypatch.setattr("rlinf.agents.tools.formats._THINKING", WatchedPattern(re.compile("</?think>")))
    read, looked = format_named(name), []
    monkeypatch.setattr(type(read), "opens", WatchedPattern(read.opens))
    for times in (8_192, 16_384):
        text = Watched(mark * times)
        parsed = read.parse(text)
        looked.append(text.looked)
        assert len(parsed.calls) <= MOST_CALLS
        assert len(parsed.broken) <= 20
        assert sum(len(why) for why in parsed.broken) < 4_000
        assert parsed.broken or len(parsed.calls) < times
    assert looked[1] <= 2.1 * looked[0]


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("mistral", "[TOOL_CALLS]a{}"),
        ("llama3_json", '{{"name": "f", "parameters": {{}}}}{}x'),
    ],
)
def test_white_space_is_not_tried_in_every_division(name, text):
    read = format_named(name)
    assert in_one_pass(lambda size: functools.partial(read.parse, text.format(" " * size)), 5000)


def test_all_calls_up_to_the_limit_are_read_and_the_model_is_told_of_the_limit():
    one = '<tool_call>{"name": "f", "arguments": {}}</tool_call>'
    parsed = format_named("hermes").parse(one * MOST_CALLS)
    assert (len(parsed.calls), parsed.broken) == (MOST_CALLS, ())
    parsed = format_named("hermes").parse(one * (MOST_CALLS + 1))
    assert len(parsed.calls) == MOST_CALLS
    assert str(MOST_CALLS) in parsed.broken[0]
    listed = "[TOOL_CALLS]" + tojson([{"name": "f", "arguments": {}}] * 1000)
    parsed = format_named("mistral").parse(listed)
    assert len(parsed.calls) == MOST_CALLS
    assert str(MOST_CALLS) in parsed.broken[0]


BROKEN = [
    ("hermes", '<tool_call>{"name": "f", "arguments": {"x": }}</tool_call>', "Expecting value"),
    ("hermes", '<tool_call>{"arguments": {}}</tool_call>', '"name"'),
    ("hermes", '<tool_call>{"name": "f", "arguments": [1]}</tool_call>', "f must be a JSON object"),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"x": 1}}} </tool_call>', "</tool_call> must follow"),
    ("hermes", '<tool_call>{"name": "f", "arg', "Unterminated"),
    ("qwen3_coder", "<tool_call>\n<function=f>\n<parameter=x>\n1\n</tool_call>", "</parameter> is missing"),
    ("qwen3_coder", "<tool_call>\n<function=f>\nx=1\n</function></tool_call>", "must follow the parameters"),
    ("qwen3_coder", '<tool_call>{"name": "f"}</tool_call>', "<function=name>"),
    ("llama3_json", '{"name": "f", "parameters": {"x": 1}', "delimiter"),
    ("llama3_json", "<|python_tag|>print(1)", "with its name"),
    ("pythonic", "[f(1)]", "with its name"),
    ("pythonic", "[f(x=g)]", "plain value"),
    ("pythonic", "[f(x=1]", "no Python expression"),
    ("pythonic", "[import(x=1]", "no Python expression"),
    ("pythonic", "[f(from=1, x=not)]", "no Python expression"),
    ("deepseek_v3", "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function f {}<｜tool▁call▁end｜>", "<｜tool▁sep｜>"),
    ("mistral", "[TOOL_CALLS] call f", "no valid JSON"),
    ("mistral", '[TOOL_CALLS] [{"name": "f"}, 3]', '"name"'),
]  # fmt: skip


@pytest.mark.parametrize(("name", "text", "why"), BROKEN)
def test_a_malformed_call_says_why(name, text, why):
    (said,) = format_named(name).parse(text).broken
    assert why in said
    assert len(said) < 200


NAMED_BY_KEYWORDS = [
    ("pythonic", "[import(x=1)]", [("import", {"x": 1})]),
    ("pythonic", '[mail(to="a", from="b = c", class=None)]', [("mail", {"to": "a", "from": "b = c", "class": None})]),
    ("pythonic", '[f(x="is (", not=[True]),\n pass.as(\n  in = {"if": "for("})]',
     [("f", {"x": "is (", "not": [True]}), ("pass.as", {"in": {"if": "for("}})]),
    ("pythonic", "<|python_start|>return(x=1)<|python_end|>", [("return", {"x": 1})]),
    ("llama3_json", '<|python_tag|>search.call(from="é\x0c", or=-1)', [("search", {"from": "é\x0c", "or": -1})]),
]  # fmt: skip


@pytest.mark.parametrize(("name", "text", "wanted"), NAMED_BY_KEYWORDS)
def test_tools_and_arguments_may_be_called_as_keywords_of_python_are(name, text, wanted):
    read = format_named(name).parse(text)
    assert [(call.name, dict(call.arguments)) for call in read.calls] == wanted
    assert not read.broken


OTHERS = [
    ("llama3_json", '{"answer": 42}'),
    ("llama3_json", "{x} is the set"),
    ("llama3_json", 'So: {"name": "f", "parameters": {}}'),
    ("llama3_json", '{"name": "Ada", "age": 36}'),
    ("pythonic", "[1, 2, 3]"),
    ("pythonic", "See f(x=1)."),
    ("hermes", "tool_call"),
]


@pytest.mark.parametrize(("name", "text"), OTHERS)
def test_other_text_is_content_and_no_call(name, text):
    parsed = format_named(name).parse(text)
    assert (parsed.content, parsed.calls, parsed.broken) == (text, (), ())


def test_a_broken_call_does_not_hide_the_good_ones_around_it():
    good = '<tool_call>\n{"name": "f", "arguments": {"x": 1}}\n</tool_call>'
    parsed = format_named("hermes").parse(
        f"{good}\n<tool_call>\n{{'name': 'f'}}\n</tool_call>\n<tool_call>\n{{{good} end"
    )
    assert plain(parsed) == [("f", {"x": 1})] * 2
    assert len(parsed.broken) == 2
    assert parsed.content == "end"
    xml = "<tool_call><function=f><parameter=x>1</parameter></function></tool_call>"
    parsed = format_named("qwen3_coder").parse(f"<tool_call><function=f>{xml}")
    assert plain(parsed) == [("f", {"x": "1"})]
    assert len(parsed.broken) == 1


def test_thinking_that_the_prompt_began_has_no_calls_in_it():
    call = '<tool_call>{"name": "f", "arguments": {}}</tool_call>'
    parsed = format_named("hermes").parse(f"Say {call} or <tool_call> or so.</think>Now.{call}")
    assert plain(parsed) == [("f", {})]
    assert parsed.content.endswith("</think>Now.")
    assert parsed.broken == ()
    assert format_named("hermes").parse(f"<think>so {call}").calls == ()


def test_details_of_the_llamas_calls():
    assert plain(format_named("llama3_json").parse('<|python_tag|>brave_search.call(query="a b")<|eom_id|>')) == [
        ("brave_search", {"query": "a b"})
    ]
    assert plain(format_named("pythonic").parse("[a.b(x=-1, y=(1, 2), z={'k': null}, t=true)] <|eot|>")) == [
        ("a.b", {"x": -1, "y": [1, 2], "z": {"k": None}, "t": True})
    ]


def test_arguments_that_were_encoded_twice_are_decoded():
    text = '<tool_call>{"name": "f", "arguments": "{\\"x\\": 1}"}</tool_call>'
    assert plain(format_named("hermes").parse(text)) == [("f", {"x": 1})]


def test_a_call_is_a_message_that_chat_templates_read():
    (call,) = format_named("hermes").parse('<tool_call>{"name": "f", "arguments": {"x": 1}}</tool_call>').calls
    assert call.message == {"id": call.id, "type": "function", "function": {"name": "f", "arguments": {"x": 1}}}


def test_texts_are_typed_where_the_schema_wants_no_text():
    properties = {
        "n": {"type": "integer"}, "s": {"type": "string"}, "o": {"anyOf": [{"type": "integer"}, {"type": "null"}]},
        "l": {"type": ["array", "null"]}, "e": {"enum": [1, 2]}, "b": {"type": "boolean"}, "w": {"type": "integer"},
        "c": {"const": "1"}, "free": {},
    }  # fmt: skip
    given = dict.fromkeys(properties, "1") | {"o": "null", "l": "[1]", "b": "True", "w": "many", "unknown": "1"}
    assert typed(given, {"properties": properties}) == {
        "n": 1, "s": "1", "o": None, "l": [1], "e": 1, "b": True, "w": "many", "c": "1", "free": "1", "unknown": "1",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("template", "name"),
    [
        ("… <tool_call>\n{{ tool_call | tojson }}\n</tool_call>", "hermes"),
        ("<tool_call>\n<function=' + name + '>", "qwen3_coder"),
        ("<｜User｜>{{ x }}<｜tool▁calls▁begin｜>", "deepseek_v3"),
        ("[INST] … [TOOL_CALLS]", "mistral"),
        ("<|start_header_id|>{{ role }}<|end_header_id|> … <|python_tag|>", "llama3_json"),
        ("<|python_start|>[f(x=1)]", "pythonic"),
        ({"default": "plain", "tool_use": "<tool_call>"}, "hermes"),
        ("{{ messages }}", "hermes"),
        (None, "hermes"),
    ],
)
def test_the_chat_template_chooses_the_format(template, name):
    assert call_format(None, SimpleNamespace(chat_template=template)).name == name


class Brackets(CallFormat):
    """A format of one's own: `{12+3}` asks for the calculator."""

    opens = re.compile(r"\{")

    def read(self, text, match):
        end = text.find("}", match.end())
        if end < 0:
            raise Malformed("} is missing")
        return Read(end + 1, (("calculator", {"expression": text[match.end() : end]}),))


def test_a_format_of_ones_own_is_a_class():
    tokenizer = SimpleNamespace(chat_template=None)
    for given_ in (Brackets, Brackets()):
        parsed = call_format(given_, tokenizer).parse("a{12+3}b{4")
        assert plain(parsed) == [("calculator", {"expression": "12+3"})]
        assert (parsed.content, parsed.broken) == ("ab", ("} is missing",))
    assert call_format("rlinf.agents.tools.formats.Mistral", tokenizer).name == "mistral"


@pytest.mark.parametrize("name", ["hermess", "rlinf.agents.tools.formats.None_", "nowhere.at.all", "json.dumps", 3])
def test_a_format_that_there_is_not_is_the_users_error(name):
    with pytest.raises(UserError, match="call format"):
        call_format(name, SimpleNamespace(chat_template=None))
