"""Tools in chat templates of real shapes: described once, answered turn by turn, and no token is encoded twice."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlinf.agents.chat import ChatFormat
from rlinf.agents.tools.formats import ToolCall, call_format
from rlinf.runtime.base.errors import UserError
from tests.agents.speaking import STYLES, Style, tokenizer_of

# Each has what is peculiar to its family: where tools are described, how calls are written, who says what tools say,
# and what consecutive messages of tools become.
_QWEN_HEAD = (
    "{% if tools %}<|im_start|>system\n{% if messages[0].role == 'system' %}{{ messages[0].content }}\n\n{% endif %}"
    "<tools>{% for tool in tools %}{{ '\n' }}{{ tool | tojson }}{% endfor %}"
    "\n</tools> <tool_call></tool_call><|im_end|>\n"
    "{% elif messages[0].role == 'system' %}<|im_start|>system\n{{ messages[0].content }}<|im_end|>\n{% endif %}"
)
_QWEN_CALLS = (
    "{% for call in message.tool_calls %}{% if content or not loop.first %}{{ '\n' }}{% endif %}<tool_call>\n"
    '{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}\n</tool_call>'
    "{% endfor %}"
)
_QWEN_TOOL = (
    "{% if loop.first or messages[loop.index0 - 1].role != 'tool' %}<|im_start|>user{% endif %}"
    "{{ '\n<tool_response>\n' + message.content + '\n</tool_response>' }}"
    "{% if loop.last or messages[loop.index0 + 1].role != 'tool' %}<|im_end|>\n{% endif %}"
)
QWEN25 = (
    _QWEN_HEAD + "{% for message in messages %}{% set content = message.content %}"
    "{% if message.role == 'user' or (message.role == 'assistant' and not message.tool_calls) %}"
    "<|im_start|>{{ message.role }}\n{{ content }}<|im_end|>\n"
    "{% elif message.role == 'assistant' %}<|im_start|>assistant\n{{ content }}" + _QWEN_CALLS + "<|im_end|>\n"
    "{% elif message.role == 'tool' %}" + _QWEN_TOOL + "{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
QWEN3 = (  # thoughts are left out of all answers before the last question
    _QWEN_HEAD + "{% set ns = namespace(last=0) %}"
    "{% for message in messages %}{% if message.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}{% endfor %}"
    "{% for message in messages %}{% set content = message.content %}"
    "{% if message.role == 'user' %}<|im_start|>user\n{{ content }}<|im_end|>\n"
    "{% elif message.role == 'assistant' %}"
    "{% if '</think>' in content and loop.index0 < ns.last %}"
    "{% set content = content.split('</think>')[-1] %}{% endif %}"
    "<|im_start|>assistant\n{{ content.lstrip('\n') }}" + _QWEN_CALLS + "<|im_end|>\n"
    "{% elif message.role == 'tool' %}" + _QWEN_TOOL + "{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
LLAMA31 = (  # one call in an answer, which has no other text; tools are described to the first user
    "<s>{% set ns = namespace(told=false) %}{% for message in messages %}"
    "{% if message.tool_calls %}{% if message.tool_calls | length != 1 %}"
    "{{ raise_exception('This model only supports single tool-calls at once!') }}{% endif %}"
    "{% set call = message.tool_calls[0].function %}<|start|>assistant<|end|>\n\n"
    '{"name": "{{ call.name }}", "parameters": {{ call.arguments | tojson }}}<|eot|>'
    "{% elif message.role == 'tool' %}<|start|>ipython<|end|>\n\n{{ message.content | tojson }}<|eot|>"
    "{% else %}<|start|>{{ message.role }}<|end|>\n\n"
    "{% if message.role == 'user' and tools and not ns.told %}{% set ns.told = true %}"
    "{% for tool in tools %}{{ tool | tojson(indent=4) }}\n\n{% endfor %}{% endif %}"
    "{{ message.content | trim }}<|eot|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant<|end|>\n\n{% endif %}"
)
DEEPSEEK = (  # what tools say stands together, and the model goes on behind it without a mark of its own
    "<s>{% set ns = namespace(tool=false, first=true) %}{% for tool in tools or [] %}{{ tool | tojson }}\n{% endfor %}"
    "{% for message in messages %}{% if message.role != 'tool' and ns.tool %}<outputs_end>{% set ns.tool = false %}"
    "{% set ns.first = true %}{% endif %}"
    "{% if message.role == 'system' %}{{ message.content }}"
    "{% elif message.role == 'user' %}<|start|>{{ message.content }}"
    "{% elif message.role == 'assistant' %}{% if messages[loop.index0 - 1].role != 'tool' %}<|end|>{% endif %}"
    "{{ message.content }}{% if message.tool_calls %}<calls_begin>{% for call in message.tool_calls %}"
    "<call_begin>function"
    "<sep>{{ call.function.name }}\n```json\n{{ call.function.arguments | tojson }}\n```<call_end>"
    "{% endfor %}<calls_end>{% endif %}</s>"
    "{% elif message.role == 'tool' %}{% set ns.tool = true %}{% if ns.first %}<outputs_begin>"
    "{% set ns.first = false %}"
    "{% endif %}<output_begin>{{ message.content }}<output_end>{% endif %}{% endfor %}"
    "{% if ns.tool %}<outputs_end>{% elif add_generation_prompt %}<|end|>{% endif %}"
)
MISTRAL = (  # calls and users take turns, and each call has an id of nine characters
    "<s>{% for tool in tools or [] %}{{ tool | tojson }}{% endfor %}{% set ns = namespace(n=0) %}"
    "{% for message in messages %}{% if message.role == 'user' or "
    "(message.role == 'assistant' and not message.tool_calls) %}"
    "{% if (message.role == 'user') != (ns.n % 2 == 0) %}{{ raise_exception('roles must alternate') }}{% endif %}"
    "{% set ns.n = ns.n + 1 %}{% endif %}"
    "{% if message.role == 'user' %}[INST] {{ message.content }}[/INST]"
    "{% elif message.role == 'tool' %}{% if message.tool_call_id | length != 9 %}"
    "{{ raise_exception('Tool call IDs should be alphanumeric strings with length 9!') }}{% endif %}"
    '[TOOL_RESULTS] {"content": {{ message.content }}, "call_id": "{{ message.tool_call_id }}"}[/TOOL_RESULTS]'
    "{% elif message.tool_calls %}[TOOL_CALLS] [{% for call in message.tool_calls %}"
    '{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}, "id": "{{ call.id }}"}'
    "{% if not loop.last %}, {% endif %}{% endfor %}]</s>"
    "{% else %} {{ message.content }}</s>{% endif %}{% endfor %}"
)
SHAPES = {
    "qwen25": Style(QWEN25, "<|im_end|>"),
    "qwen3": Style(QWEN3, "<|im_end|>"),
    "llama31": Style(LLAMA31, "<|eot|>"),
    "deepseek": Style(DEEPSEEK, "</s>"),
    "mistral": Style(MISTRAL, "</s>"),
}
SPEAKS = {"qwen25", "qwen3", "deepseek"}
"""Answers may have text beside their calls."""
TOOLS = [
    {"type": "function", "function": {"name": name, "description": "Look.", "parameters": {"type": "object"}}}
    for name in ("search", "weather")
]


def encode(tokenizer, text):
    return tokenizer(text, add_special_tokens=False)["input_ids"]


def calls_of(given_):
    return [ToolCall(f"call{place:05}", name, {"x": value}) for place, (name, value) in enumerate(given_)]


TEXT = st.text("ab {}", max_size=5).map(lambda text: f"a{text}b")
CALLED = st.lists(st.tuples(st.sampled_from(["search", "weather"]), st.integers(0, 9) | TEXT), max_size=3)
TURNS = st.lists(st.tuples(TEXT, CALLED), min_size=1, max_size=4)


@pytest.mark.parametrize("shape", sorted(SHAPES))
@settings(max_examples=40)
@given(turns=TURNS, system=st.none() | TEXT, thinks=st.booleans())
def test_turns_with_tools_are_the_templates_rendering_of_all_that_was_said(shape, turns, system, thinks):
    style, one_turn = SHAPES[shape], shape == "llama31"
    tokenizer = tokenizer_of(style)
    chat = ChatFormat(tokenizer).with_arguments(tools=TOOLS)
    end = tokenizer.eos_token_id
    told = [{"role": "user", "content": "ask ab"}]
    if system is not None and shape not in ("mistral",):
        told.insert(0, {"role": "system", "content": system})
    rendered = tokenizer.apply_chat_template(told, tools=TOOLS, tokenize=False, add_generation_prompt=True)
    ids = list(chat.opening(told))
    assert ids == encode(tokenizer, rendered)
    for said, called in turns:
        calls = calls_of(called[:1] if one_turn else called)
        content = said if shape in SPEAKS or not calls else ""
        if thinks and shape == "qwen3":
            content = f"<think>ab</think>{content}"
        answer = {
            "role": "assistant",
            "content": content,
            **({"tool_calls": [c.message for c in calls]} if calls else {}),
        }
        whole = tokenizer.apply_chat_template([*told, answer], tools=TOOLS, tokenize=False)
        if not whole.startswith(rendered):
            return  # the template took thoughts back; what was generated stays, so there is nothing to compare with
        written = whole[len(rendered) :].removesuffix("\n")
        assert written.endswith(style.end)
        new = [{"role": "tool", "tool_call_id": c.id, "name": c.name, "content": f"{c.name} ab"} for c in calls]
        new = new or [{"role": "user", "content": "and ba"}]
        ids += encode(tokenizer, written)
        ids += list(chat.following([*told, answer], new, ended_by=end))
        told += [answer, *new]
        rendered = tokenizer.apply_chat_template(told, tools=TOOLS, tokenize=False, add_generation_prompt=True)
        if thinks and shape == "qwen3" and new[0]["role"] == "user":
            return
        assert ids == encode(tokenizer, rendered)


@pytest.mark.parametrize("shape", ["qwen25", "qwen3", "llama31", "mistral"])
def test_what_a_template_writes_its_format_reads(shape):
    tokenizer = tokenizer_of(SHAPES[shape])
    calls = calls_of([("search", 1), ("weather", "a 'b' \"c\" {")])[: 1 if shape == "llama31" else 2]
    before = [{"role": "user", "content": "a"}]
    answer = {"role": "assistant", "content": "", "tool_calls": [call.message for call in calls]}
    begun = tokenizer.apply_chat_template(before, tokenize=False, add_generation_prompt=True)
    written = tokenizer.apply_chat_template([*before, answer], tokenize=False)[len(begun) :]
    name = "llama3_json" if shape == "llama31" else None
    parsed = call_format(name, tokenizer).parse(written.removesuffix("\n").removesuffix(SHAPES[shape].end))
    assert [(call.name, call.arguments) for call in parsed.calls] == [(call.name, call.arguments) for call in calls]
    assert (parsed.content, parsed.broken) == ("", ())


def test_an_answer_that_was_cut_is_ended_by_the_template_before_the_tools_speak():
    tokenizer = tokenizer_of(SHAPES["qwen25"])
    chat = ChatFormat(tokenizer, {"tools": TOOLS})
    before = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    new = [{"role": "tool", "content": text} for text in ("1", "2")]
    tail = "\n<|im_start|>user\n<tool_response>\n1\n</tool_response>\n<tool_response>\n2\n</tool_response><|im_end|>\n"
    tail += "<|im_start|>assistant\n"
    assert list(chat.following(before, new)) == encode(tokenizer, "<|im_end|>" + tail)
    assert list(chat.following(before, new, ended_by=tokenizer.eos_token_id)) == encode(tokenizer, tail)


def test_a_template_that_hides_the_tools_is_the_users_error():
    tokenizer = tokenizer_of(STYLES["chatml"])
    said = [{"role": "user", "content": "a"}]
    with pytest.raises(UserError, match=r"model.*search.*data\.chat_template"):
        ChatFormat(tokenizer).with_arguments(tools=TOOLS).opening(said)
    assert len(ChatFormat(tokenizer).with_arguments(tools=[]).opening(said))


WITHOUT_TOOL = (  # as many templates have it: a role that it does not know is nothing
    "{% for tool in tools or [] %}{{ tool | tojson }}{% endfor %}{% for message in messages %}"
    "{% if message.role in ('user', 'assistant') %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n"
    "{% endif %}{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def test_a_template_that_swallows_a_role_is_refused_before_the_model_is_asked():
    chat = ChatFormat(tokenizer_of(Style(WITHOUT_TOOL, "<|im_end|>")))
    ask, answer = {"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}
    for role in ("tool", "system", "developer"):
        with pytest.raises(UserError, match=rf"role {role}.*data\.chat_template"):
            chat.following([ask, answer], [{"role": role, "content": "a"}])
    with pytest.raises(UserError, match="role system"):
        chat.opening([{"role": "system", "content": "a"}, ask])
    with pytest.raises(UserError, match="role tool"):  # before a tool is called
        chat.with_arguments(tools=TOOLS).opening([ask])
    assert len(chat.following([ask, answer], [ask, answer, {"role": "user", "content": ""}]))


@pytest.mark.parametrize("text", ["\u2402rlinf\u2403", "rlinf", "<|im_start|>"])
def test_no_text_stands_for_a_mark_of_ours(text):
    tokenizer = tokenizer_of(SHAPES["qwen25"])
    said = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    (*_, found) = [ChatFormat(tokenizer).following(said, [{"role": "tool", "content": f"x{text}y"}], ended_by=None)]
    head = "<|im_end|>\n<|im_start|>user\n<tool_response>\nx"
    assert found[: len(encode(tokenizer, head))].tolist() == encode(tokenizer, head)


def test_calls_that_an_agent_writes_as_the_api_does_are_read_as_objects():
    chat = ChatFormat(tokenizer_of(SHAPES["qwen25"]))

    def ids(arguments):
        call = {"id": "1", "type": "function", "function": {"name": "add", "arguments": arguments}}
        asks = {"role": "assistant", "content": "", "tool_calls": [call]}
        return chat.opening([{"role": "user", "content": "hi"}, asks, {"role": "tool", "content": "3"}]).tolist()

    assert ids('{"a": 1, "b": null}') == ids({"a": 1, "b": None})


def test_half_a_character_is_the_users_error_whoever_says_it():
    chat = ChatFormat(tokenizer_of(SHAPES["qwen25"]))
    for encode in (lambda: chat.ids("a\ud83d"), lambda: chat.opening([{"role": "user", "content": "a\ud83d"}])):
        with pytest.raises(UserError, match=r"\\ud83d.*character"):
            encode()


def test_without_a_template_the_run_is_told_once_that_nothing_describes_the_tools():
    told = []
    chat = ChatFormat(tokenizer_of(Style(None, "</s>")), say=told.append)
    chat.opening([{"role": "user", "content": "a"}])
    with_tools = chat.with_arguments(tools=TOOLS)
    names = " ".join(tool["function"]["name"] for tool in TOOLS)
    with_tools.opening([{"role": "system", "content": f"Call {names}."}, {"role": "user", "content": "a"}])
    assert not told, "a message tells the model of all tools"
    for again in (with_tools, chat.with_arguments(tools=[sorted])):
        again.opening([{"role": "user", "content": "a"}])
    (said,) = told
    assert said.startswith("warning: ")
    assert "such as search" in said
    assert "data.chat_template" in said


def test_no_tools_are_none():
    tokenizer = tokenizer_of(
        replace(SHAPES["qwen25"], template="{% if tools is not none %}tools{% endif %}{{ messages[0].content }}")
    )
    plain = ChatFormat(tokenizer).opening([{"role": "user", "content": "a"}])
    assert np.array_equal(plain, ChatFormat(tokenizer, {"tools": []}).opening([{"role": "user", "content": "a"}]))
    assert list(plain) == encode(tokenizer, "a")


def test_calls_cannot_be_written_without_a_template():
    chat = ChatFormat(tokenizer_of(Style(None, "</s>")))
    answer = {"role": "assistant", "content": "", "tool_calls": [calls_of([("search", 1)])[0].message]}
    with pytest.raises(UserError, match=r"tool_calls needs.*template"):
        chat.opening([{"role": "user", "content": "a"}, answer])
    tail = chat.following([{"role": "user", "content": "a"}, answer], [{"role": "tool", "content": json.dumps("b")}])
    assert list(tail) == encode(chat.tokenizer, '"b"')
