"""An interpreter that keeps its variables between pieces of code. Runs as a program in the sandbox; no import of ours.

In: pieces of code over the channel, as JSON after its length. Out: for each what it printed, and how it ended. The
value of a last expression is shown as in a notebook.
"""

from __future__ import annotations

import ast
import io
import json
import os
import sys
import traceback
from typing import Any

_LENGTH = 8


class _Limited(io.StringIO):
    """Keeps the first characters that are written, and counts the others."""

    def __init__(self, most: int):
        super().__init__()
        self.most, self.lost = most, 0

    def write(self, text: str) -> int:
        room = max(0, self.most - self.tell())
        super().write(text[:room])
        self.lost += len(text) - min(room, len(text))
        return len(text)


def serve(most: int) -> None:
    """Run pieces of code until the other end is closed.

    Args:
        most: characters of the output of a piece that are kept.
    """
    process = os.getpid()
    scope: dict[str, Any] = {"__name__": "__main__", "__builtins__": __builtins__}
    while True:
        code = json.loads(_exactly(int.from_bytes(_exactly(_LENGTH), "big")))
        out, err = _Limited(most), _Limited(most)
        sys.stdout, sys.stderr = out, err
        status = 0
        try:
            _run(code, scope)
        except SystemExit as error:
            status = error.code if isinstance(error.code, int) else int(error.code is not None)
        except BaseException as error:
            status = 1
            trace = error.__traceback__
            while trace is not None and trace.tb_frame.f_code.co_filename != "<code>":
                trace = trace.tb_next  # frames of this file
            err.write("".join(traceback.format_exception(type(error), error, trace)))
        if os.getpid() != process:  # a copy that the piece forked: it has no part in the conversation
            os._exit(status & 0xFF)
        text = json.dumps([status, out.getvalue(), err.getvalue(), out.lost + err.lost]).encode()
        data = len(text).to_bytes(_LENGTH, "big") + text
        while data:
            data = data[os.write(3, data) :]


def _run(code: str, scope: dict[str, Any]) -> None:
    tree = ast.parse(code, "<code>")
    last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
    exec(compile(tree, "<code>", "exec"), scope)
    if isinstance(last, ast.Expr):
        value = eval(compile(ast.Expression(last.value), "<code>", "eval"), scope)
        if value is not None:
            sys.stdout.write(f"{value!r}\n")


def _exactly(size: int) -> bytes:
    data = b""
    while len(data) < size:
        more = os.read(3, size - len(data))
        if not more:
            os._exit(0)
        data += more
    return data


if __name__ == "__main__":
    serve(int(sys.argv[1]))
