"""The judge of programs: forms of rows, what counts as right, and cheats."""

import asyncio
import base64
import json
import pickle
import re
import zlib

import pytest

from benchmarks import code_judge
from rlinf.rewards.base import Reward, Scorer, uncounted
from rlinf.rewards.code import judge
from rlinf.rewards.code.judge import Assertions, Call, Script, code, extracted, same_output, same_value
from rlinf.rewards.code.values import decode, encode
from rlinf.sandbox import sandbox
from rlinf.sandbox.limits import SandboxError
from rlinf.sandbox.sandbox import shared

SUM = "a, b = map(int, input().split())\nprint(a + b)"
ADD = "def add(a, b):\n    return a + b"
SOLUTION = "class Solution:\n    def add(self, a: int, b: int) -> List[int]:\n        return a + b"
STDIN = {"inputs": ["1 2\n", "3 4\n"], "outputs": ["3\n", "7\n"]}
LCB = [{"input": "1\n2", "output": "3", "testtype": "functional"}]
PACKED = base64.b64encode(zlib.compress(pickle.dumps(json.dumps(LCB)))).decode()
HUMANEVAL = {
    "prompt": 'def helper(x):\n    return x * 2\n\ndef add(a, b):\n    """Add."""\n',
    "entry_point": "add",
    "test": "METADATA = {}\n\ndef check(candidate):\n    for x in range(9):\n"
    "        assert candidate(x, helper(x)) == 3 * x\n    assert candidate([1], [2]) == [1, 2]\n",
}
MBPP = {"test_list": ["assert add(1, 2) == 3", "assert add((1,), (2,)) == (1, 2)"], "test_setup_code": "import math"}
PYTEST = {
    "test": "from solution import add\nimport math\n\ndef test_one():\n    assert add(1, 2) == 3\n\n"
    "def test_two():\n    try:\n        add(1, 'x')\n    except TypeError:\n        return\n    assert False\n"
}
ROWS = {
    "APPS": ({"input_output": json.dumps(STDIN)}, SUM),
    "APPS, a function": (
        {"input_output": json.dumps({"fn_name": "add", "inputs": [[1, 2], [3, 4]], "outputs": [[3], 7]})},
        ADD,
    ),
    "TACO": ({"input_output": {"inputs": [["1 2"], "3 4"], "outputs": [["3"], "7"]}}, SUM),
    "DeepCoder": ({"tests": json.dumps([{"input": "1 2", "output": "3", "type": "stdin_stdout"}])}, SUM),
    "DeepCoder, a function": (
        {"tests": json.dumps([{"input": [1, 2], "output": 3, "type": "function_call", "fn_name": "add"}])},
        SOLUTION,
    ),
    "LiveCodeBench": (
        {"public_test_cases": json.dumps([{"input": "1 2", "output": "3", "testtype": "stdin"}])},
        SUM,
    ),
    "LiveCodeBench, a function": (
        {
            "public_test_cases": json.dumps(LCB),
            "private_test_cases": PACKED,
            "metadata": json.dumps({"func_name": "add"}),
        },
        SOLUTION,
    ),
    "CodeContests": ({"public_tests": {"input": ["1 2"], "output": ["3"]}, "private_tests": STDIN}, SUM),
    "verl": ({"reward_model": {"ground_truth": json.dumps(STDIN)}}, SUM),
    "the answer itself": ({"answer": json.dumps(STDIN)}, SUM),
    "HumanEval": (HUMANEVAL, ADD),
    "MBPP": (MBPP, ADD),
    "sanitized MBPP": ({"test_list": MBPP["test_list"], "test_imports": ["import math"]}, ADD),
    "AceCode": ({"test_cases": MBPP["test_list"]}, ADD),
    "KodCode": (PYTEST, ADD),
    "assertions as text": ({"answer": "x = 1\nassert add(x, 2) == 3\nassert add(2, 2) == 4"}, ADD),
}


@pytest.fixture(scope="module")
def loop():
    with asyncio.Runner() as runner:

        async def ready():
            await shared().isolation()

        try:
            runner.run(ready())
        except SandboxError as error:
            pytest.skip(str(error))
        yield runner
        runner.run(_closed())


async def _closed():
    await shared().close()


def scored(loop, program, row, **args):
    async def score():
        return await code(f"So:\n```python\n{program}\n```\n", **{"seconds_per_test": 2.0, **args}, **row)

    return loop.run(score())


@pytest.mark.parametrize("form", ROWS)
def test_published_rows_are_judged(loop, form):
    row, right = ROWS[form]
    assert scored(loop, right, row).value == 1.0
    wrong = right.replace("a + b", "a + b if a != 1 else a")
    found = scored(loop, wrong, row, award="share")
    assert found.value < 1.0
    assert scored(loop, wrong, row).value == 0.0
    assert scored(loop, "def", row).value == 0.0


STATEFUL = """
class Stack:
    def __init__(self): self.items = []
    def push(self, x): self.items.append(x); return self
    def __len__(self): return len(self.items)
def words(): return (w for w in "ab")
def apply(x): return {x: {1, 2}, None: b"x"}
"""
USES = [
    "s = Stack()\ns.push(1).push(2)\nassert len(s) == 2 and s.items == [1, 2]",
    "assert list(words()) == ['a', 'b']",
    "assert sorted(map(apply, [1]), key=str)[0] == {1: {1, 2}, None: b'x'}",
    "assert Stack() != Stack()",
]


def test_assertions_may_use_objects_of_the_answer(loop):
    assert scored(loop, STATEFUL, {"test_list": USES}, award="share").value == 1.0


ALWAYS = "class Always(int):\n    def __eq__(self, other): return True\n    def __ne__(self, other): return False\n"
CHEATS = {
    "exits before the tests": "import os\nos._exit(0)",
    "exits politely": "import sys\nsys.exit(0)",
    "exits when called": "def add(*_):\n    import os\n    os._exit(0)",
    "raises SystemExit when called": "def add(*_):\n    raise SystemExit(0)",
    "returns something equal to everything": ALWAYS + "    __hash__ = int.__hash__\ndef add(*_): return Always()",
    "returns an object equal to everything": ALWAYS.replace("(int)", "") + "def add(*_): return Always()",
    "redefines comparison for all": "import builtins, operator\noperator.eq = lambda *_: True\n"
    "class int(int):\n    __eq__ = lambda *_: True\nbuiltins.int = int\ndef add(*_): return int(0)",
    "prints a verdict": "print('passed', 'ok', 1.0, '[\"passed\"]')\ndef add(*_): print('[\"passed\"]')",
    "writes verdicts into the channel": "import json, os\nfor m in (['passed'], ['value', None]) * 50:\n"
    "    t = json.dumps(m).encode()\n    os.write(3, len(t).to_bytes(8, 'big') + t)\ndef add(*_): return 0",
    "writes verdicts when called": "import json, os\ndef add(*_):\n    for m in (['passed'], ['value', True]) * 50:\n"
    "        t = json.dumps(m).encode()\n        os.write(3, len(t).to_bytes(8, 'big') + t)\n    return 0",
    "patches the harness": "import sys, builtins\nmain = sys.modules['__main__']\n"
    "for name in ('encode', 'decode', 'tests', 'candidate'):\n    setattr(main, name, lambda *_: True)\n"
    "builtins.AssertionError = type('E', (Exception,), {})\ndef add(*_): return True",
    "patches the assertion": "import builtins\nbuiltins.compile = builtins.exec = lambda *_, **__: None\n"
    "def add(*_): return 1",
    "looks for the expected value in frames": "import sys, gc\ndef add(a, b):\n    f = sys._getframe()\n"
    "    while f:\n        for v in f.f_locals.values():\n"
    "            if isinstance(v, dict) and 'pieces' in v: return 3\n"
    "        f = f.f_back\n    return -1",
    "reads the tests from files": "import glob\ndef add(*_): return eval(open('tests.py').read())",
    "never ends": "def add(*_):\n    while True: pass\nwhile True: pass",
    "never ends when called": "def add(*_):\n    while True: pass",
    "floods": "def add(*_):\n    while True: print('3')",
    "sends a bomb": "def add(*_): return 'x' * (1 << 28)",
    "nests deeply": "def add(*_):\n    x = []\n    for _ in range(10**5): x = [x]\n    return x",
    "sends nonsense": "import os\ndef add(*_):\n    os.write(3, (5).to_bytes(8, 'big') + b'[' * 5)",
    "tries all values": "def add(*_): return range(1000)",
    "lies about its length": "class L:\n    def __len__(self): return 3\n    def __iter__(self): return iter([3])\n"
    "def add(*_): return L()",
}


ALWAYS_RIGHT = """class add:
    def __init__(self, *_): pass
    __eq__ = __lt__ = __gt__ = __le__ = __ge__ = __contains__ = __bool__ = lambda *_: True
    __ne__ = lambda *_: False
    __sub__ = __rsub__ = __add__ = __mul__ = __neg__ = lambda self, *_: self
    __abs__ = __float__ = __int__ = __round__ = lambda *_: 0
    __len__ = lambda self: 1
    __iter__ = lambda self: iter([0])
    __hash__ = lambda self: 0
class Add(add): pass
"""
NEAR = ["assert abs(add(1, 2) - 3) < 1e-6", "assert -1e-6 < add(1, 2) - 3 < 1e-6", "assert add(1, 2) == 3",
        "assert not add(1, 2) != 3", "assert 3 == add(1, 2)", "assert 2 < add(1, 2) < 4", "assert 3 in [add(1, 2)]",
        "assert [add(1, 2)] == [3] and {1: add(1, 2)} == {1: 3}", "import math\nassert math.isclose(add(1, 2), 3)",
        "assert round(add(1, 2) - 3, 2) == 0", "assert float(add(1, 2) - 3) == 0.0", "assert add(1, 2) in (3, 4)",
        "assert not (add(1, 2) - 3)", "assert add(1, 2) == 3.0 and isinstance(add(1, 2), int)",
        "import numpy as np\nassert np.allclose(add(1, 2), [3, 3])",
        "import numpy as np\nassert (add(1, 2) == np.array([3])).all()",
        "from solution import Add\nassert Add(1, 2) == 3", "assert abs(Add(1, 2) - 3) < 1e-6",
        "assert Add(1, 2) - 3 < 1"]  # fmt: skip


@pytest.mark.parametrize("program", [ALWAYS_RIGHT, ALWAYS_RIGHT.replace("class add:", "class add(dict):"),
                                     ALWAYS_RIGHT + "made = add\ndef add(*_): return made()"])  # fmt: skip
def test_what_an_object_says_of_itself_counts_for_nothing_beside_a_value_of_the_tests(loop, program):
    assert scored(loop, ADD + "\nAdd = add", {"test_list": NEAR[:-2]}, award="share").value >= 14 / 17
    found = scored(loop, program, {"test_list": NEAR}, award="share", seconds_in_all=20.0)
    assert found.value == 0.0


def test_what_is_expected_never_reaches_the_answer(loop):
    program = """
seen = []
class Spy:
    def __getattr__(self, name): raise AttributeError(name)
for name in "eq ne lt gt sub rsub add radd mul rmul contains getitem abs round float call".split():
    setattr(Spy, f"__{name}__", lambda self, *a: (seen.extend(a), Spy())[1])
def spy(*_): return Spy()
def look(): return [each for each in seen if type(each) is int and each > 2]
"""
    lines = [f"try:\n    {each}\nexcept Exception:\n    pass\nassert look() == []" for each in (
        "spy(1) == 77", "77 == spy(1)", "abs(spy(1) - 77) < 1", "77 - spy(1)", "spy(1) < 77", "77 in [spy(1)]",
        "spy(1) in (76, 77)", "spy(1) * 77", "[spy(1)] == [77]", "round(spy(1), 2) == 77")]  # fmt: skip
    assert scored(loop, program, {"test_list": lines}, award="share").value == 1.0


ENDINGS = ["import unittest\nraise unittest.SkipTest('x')", "from unittest.case import _ShouldStop\nraise _ShouldStop",
           "import sys\nsys.exit(0)", "raise StopIteration", "raise GeneratorExit", "raise KeyboardInterrupt",
           "import asyncio\nraise asyncio.CancelledError", "import pytest\npytest.skip('x')", "raise AssertionError",
           "raise BaseException", "import os\nos.fork()\nreturn 0"]  # fmt: skip
HARNESSES = {
    "mocks": "from unittest.mock import Mock, patch\nfrom solution import add\n"
    "@patch('builtins.input', return_value='x')\ndef test_it(mock):\n    act = Mock(return_value=1)\n"
    "    assert add(act(), 2) == 3\n    act.assert_called_once()\n",
    "pytest": "import pytest\nfrom solution import add\n@pytest.mark.parametrize('x', [1])\n"
    "def test_it(x):\n    assert add(x, 2) == 3\nasync def test_later():\n    assert add(1, 2) == 3\n",
    "unittest": "import unittest\nfrom solution import add\nclass Sums(unittest.TestCase):\n    def test_it(self):\n"
    "        with self.subTest(x=1):\n            self.assertEqual(add(1, 2), 3)\n",
    "by map": "from solution import add\ndef test_it():\n    assert all(map(lambda x: add(x, 2) == x + 2, [1, 2]))\n",
}


HALVES = [
    pytest.param(form, half, marks=[pytest.mark.repeated] * ((number + half) % 2), id=f"{form}-{half}")
    for number, form in enumerate(HARNESSES)
    for half in range(2)
]
"""Each half of the endings by two of the harnesses; by all of them in the drills."""


@pytest.mark.parametrize(("form", "half"), HALVES)
def test_no_exception_ends_a_test_as_passed(loop, form, half):
    row = {"test": HARNESSES[form]}
    assert scored(loop, ADD, row).value == 1.0
    for ending in ENDINGS[half::2]:
        program = "def add(a, b):\n" + "\n".join(f"    {line}" for line in ending.split("\n"))
        assert scored(loop, program, row, award="share").value == 0.0, ending


FORGED = """
import json, os
def add(*_):
    text = json.dumps({message}).encode()
    os.write(3, len(text).to_bytes(8, "big") + text)
    return 0
"""
MESSAGES = [["passed"], ["value", ["y", 1], [], ""], ["value", ["T", "builtins", "eval"], [], ""],
            ["value", ["T", "unittest.mock", "_ANY"], [], ""], ["value", 0, [[0, [3]], [99, []]], ""],
            ["do", 0, "input", ["l", "x"], ["d"]],
            ["get", 1, "__globals__", ["l"], ["d"]], ["call", 1, "", ["l"], ["d"]],
            ["set", 1, "__code__", ["l", 0], ["d"]], ["raised", ["E", [0, "builtins", "print"], ["t"], "", 1], [], ""],
            ["value", ["n", "O", [1], ["l", 3]], [], ""], ["do", 1, "eq", ["l", 1], ["d"]], [], 3, None]  # fmt: skip


@pytest.mark.parametrize("message", MESSAGES)
def test_a_forged_message_is_worth_nothing(loop, message):
    row = {"test_list": ["assert add(lambda: 3, [2]) == 3", "assert add(1, 2) == 3"]}
    found = scored(loop, FORGED.replace("{message}", repr(message)), row, award="share", seconds_per_test=0.7)
    assert found.value == 0.0


def test_an_answer_reaches_of_the_tests_what_it_was_handed_and_no_more(loop):
    program = """
def tries(*things):
    found = []
    for thing in things:
        for name in ("__globals__", "__class__", "__dict__", "__self__", "gi_frame", "__code__", "f_globals", "func"):
            try:
                if "_handed" in repr(getattr(thing, name)) or name == "gi_frame": found.append(name)
            except Exception: pass
    return [each for each in found if each not in ("__dict__", "__code__")]
"""
    test = ("class Own:\n    hidden = 77\n    def act(self): return 1\nimport io\n"
            "assert tries(lambda: 1, Own().act, (v for v in [1]), io.StringIO('x')) == []")  # fmt: skip
    assert scored(loop, program, {"test_list": [test]}).value == 1.0


@pytest.mark.parametrize("form", code_judge.FORMS)
def test_the_judge_judges_as_python_does(loop, form):
    """A sample of `benchmarks/code_judge.py`: every template once, and a mutant that Python says is wrong."""
    for case in code_judge.made(form, len(code_judge.FORMS[form])):
        assert scored(loop, case.program, case.row).value == 1.0, case
        wrong = re.sub(
            r"\breturn (?=\S)|\bprint\(", lambda found: found[0] + ("" if "(" in found[0] else "0, "), case.program
        )
        wrong = wrong if wrong != case.program else "pass"
        assert scored(loop, wrong, case.row).value == 0.0, (wrong, case)


@pytest.mark.parametrize(
    ("test", "reason"),
    [
        ("def test_it(mocker):\n    assert f", ".*'mocker'"),
        ("from solution import A\nclass B(A): pass\ndef test_it(): B()", "class B .* A"),
        (
            "from unittest.mock import patch\ndef test_it():\n    with patch('solution.time'):\n        f()",
            "a call of patch",
        ),
    ],
)
def test_tests_that_cannot_be_judged_say_so_and_are_no_zeros(test, reason):
    with pytest.raises(ValueError, match=f"judged: {reason}"):
        judge.tests_of("", {"test": test})


def test_a_row_whose_setup_fails_by_the_answer_is_that_answers(loop):
    row = {"test_list": ["assert made.n == 1"], "test_setup_code": "made = Made()"}
    assert scored(loop, "class Made:\n    n = 1", row).value == 1.0
    assert scored(loop, "class Made:\n    def __init__(self): raise ImportError", row).value == 0.0
    assert scored(loop, "pass", row).value == 0.0
    with pytest.raises(ValueError, match=r"module named 'not_there'"):
        scored(loop, "class Made: pass", {**row, "test_setup_code": "made = Made()\nimport not_there"})


def test_integers_of_any_length_are_read_and_compared(loop):
    digits = "9" * 5000
    row = {"input_output": f'{{"fn_name": "f", "inputs": [[{digits}]], "outputs": [{digits}]}}'}
    assert scored(loop, "def f(x): return x", row, most_tests=1).value == 1.0
    assert scored(loop, "def f(x): return x + 1", row).value == 0.0


@pytest.mark.parametrize(
    "form",
    ["APPS, a function", "MBPP", *(pytest.param(form, marks=pytest.mark.repeated) for form in ("APPS", "HumanEval"))],
)
@pytest.mark.parametrize("cheat", CHEATS)
def test_cheats_have_no_reward(loop, cheat, form):
    found = scored(loop, CHEATS[cheat], ROWS[form][0], award="share", seconds_per_test=0.7, seconds_in_all=1.5)
    assert found.value == 0.0


def test_a_share_counts_what_passes_around_a_test_that_hangs(loop):
    hangs = "import time\ndef add(a, b):\n    if a == 2: time.sleep(1e6)\n    return a + b"
    pieces = ["assert add(1, 1) == 2", "assert add(2, 1) == 3", "assert add(3, 1) == 4", "assert add(4, 1) == 0"]
    assert scored(loop, hangs, {"test_list": pieces}, award="share", seconds_per_test=3.0).value == 0.5
    cases = json.dumps({"fn_name": "add", "inputs": [[1, 1], [2, 1], [3, 1]], "outputs": [2, 3, 4]})
    assert scored(loop, hangs, {"input_output": cases}, award="share", seconds_per_test=3.0).value == 2 / 3


def test_rows_without_tests_are_errors_that_say_so(loop):
    with pytest.raises(ValueError, match=r"programs.*row.*nor.*'42'"):
        scored(loop, ADD, {"level": 3, "answer": "42"})
    with pytest.raises(ValueError, match=r"tests.*row.*NameError"):
        scored(loop, ADD, {"test_list": ["assert add(1, 2) == 3"], "test_setup_code": "raise NameError"})
    with pytest.raises(ValueError, match="cannot be unpacked"):
        judge.tests_of("", {"private_test_cases": base64.b64encode(zlib.compress(pickle.dumps(print))).decode()})


def test_waiting_for_a_place_does_not_count_against_the_reward(loop):
    async def slow(response):
        with uncounted():
            await asyncio.sleep(0.3)
        if response == "hang":
            await asyncio.sleep(10)
        return 1.0

    async def both():
        return await Scorer(slow).together([{"response": "x"}, {"response": "hang"}], 0.2)

    assert [verdict.outcome for verdict in loop.run(both())] == ["ok", "timeout"]


def test_it_is_named_by_its_path_and_takes_whole_rows():
    reward = Reward.of("rlinf.rewards.code", {"award": "share", "most_tests": 3})
    assert (reward.trusted, reward.is_async, reward.wanted) == (True, True, None)
    reward.check({"response", "answer", "prompt", "truncated"})


def test_a_machine_without_isolation_is_found_before_the_run(monkeypatch):
    def refused(weak, preload, reason):
        raise SandboxError("no namespaces")

    Reward.of("rlinf.rewards.exact").ready()
    monkeypatch.setattr(sandbox, "_spawn", refused)
    with pytest.raises(SandboxError, match="no namespaces"):
        Reward.of({"right": {"function": "rlinf.rewards.code", "args": {"award": "share"}}}).ready()


@pytest.mark.parametrize(
    ("args", "told"),
    [
        ({"alow_weak": True}, r"\['alow_weak'\].*takes \['award'"),
        ({"award": "half"}, r"award.*'half'"),
        ({"seconds_per_test": 0}, "seconds_per_test is 0"),
        ({"memory_mb": "much"}, "memory_mb is 'much'"),
    ],
)
def test_wrong_arguments_are_found_before_the_run(args, told):
    with pytest.raises(ValueError, match=told):
        Reward.of("rlinf.rewards.code", args).ready()


@pytest.mark.parametrize(
    ("response", "program"),
    [
        ("```python\nx\n```", "x\n"),
        ("```\na\n```\nthen\n```py\nb\n```\nruns with\n```bash\nc\n```", "b\n"),
        ("<think>```python\na\n```</think>\n```python\nb\n```", "b\n"),
        ("print(1)", "print(1)"),
        ("```python\nnever closed", None),
        ("```bash\nls\n```", None),
        ("  ", None),
        ("```python\nprint(1)\n```\nIt prints\n```\n1\n```", "print(1)\n"),
        ("```\ndef f(): pass\n```\ngives\n```\nTrue\n```", "def f(): pass\n"),
        ("```\nx = 1\nprint(x)\n```\nor\n```\nprint(1)\n```\nOutput:\n```\n1\n```", "print(1)\n"),
        ("```\nf(\n```", "f(\n"),
    ],
)
def test_the_last_block_is_the_program(response, program):
    assert extracted(response) == program


def test_forms_are_read_as_they_are_meant():
    assert judge.tests_of("", ROWS["TACO"][0]) == (Script("1 2", "3"), Script("3 4", "7"))
    assert judge.tests_of("", ROWS["LiveCodeBench, a function"][0]) == (Call("add", (1, 2), (3,)),) * 2
    assert judge.tests_of("", ROWS["APPS, a function"][0])[0] == Call("add", (1, 2), ([3], 3))
    assert judge.tests_of("x = 1\nassert f(x)\nassert g", {}) == Assertions(("x = 1\nassert f(x)", "assert g"))


@pytest.mark.parametrize(
    ("found", "expected", "same"),
    [
        ("3\n", "3", True),
        ("3 \n4\n\n", "3\n4", True),
        ("3\n4", "3 4", False),
        ("0.30000000000000004", "0.3", True),
        ("0.3001", "0.3", False),
        ("10000000001", "10000000000", False),
        ("nan", "1.0", False),
        ("", "0", False),
        ("YES", "yes", False),
    ],
)
def test_outputs_are_compared_by_words_and_lines(found, expected, same):
    assert same_output(found, expected) is same


@pytest.mark.parametrize(
    ("found", "expected", "same"),
    [
        ((1, 2), [1, 2], True),
        ({1: "a"}, {"1": "a"}, True),
        (0.1 + 0.2, 0.3, True),
        (1, 2, False),
        (10**400, 1.0, False),
        ("1", 1, False),
        ({1, 2}, [2, 1], True),
        (None, 0, False),
    ],
)
def test_values_are_compared_as_json_has_them(found, expected, same):
    assert same_value(found, expected) is same


@pytest.mark.parametrize(
    "value", [None, True, 2**70, 1.5, "é", [1, (2,)], {(1, 2): {3}}, frozenset([1]), b"x", 1j, float("inf")]
)
def test_plain_data_travel_as_they_are(value):
    found = decode(json.loads(json.dumps(encode(value))))
    assert (type(found), found) == (type(value), value)
