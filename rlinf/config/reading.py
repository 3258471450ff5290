"""Files and texts that anybody may have written: regular files alone, JSON and YAML of any depth and size.

In: a path or a text. Out: plain values, or a `ValueError` or `OSError` that says what is wrong; never a hang, a
`RecursionError` or a memory that fills up. Run directories, data sets and messages are read
through here.
"""

from __future__ import annotations

import errno
import json
import os
import stat
from pathlib import Path
from typing import Any, BinaryIO

import yaml

MOST_BYTES = 1 << 26
"""Of a file that is read as a whole: a configuration or a description has kilobytes."""
DEEPEST, LARGEST = 50, 100_000
"""Levels and values of a YAML text, aliases written out: ours have 5 and 100, and a few lines of aliases can stand for
more than any memory holds."""


def open_regular(path: Path, *, links: bool = True) -> BinaryIO:
    """Open a regular file for reading; whatever else stands there (a pipe without a writer, a device) is refused.

    Args:
        path: of it.
        links: follow a symbolic link in its last part. A run writes none, and one in a run of somebody else would put
            the text of another file into a report.

    Raises:
        OSError: it is no regular file, a link, or cannot be opened.
    """
    handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | (0 if links else os.O_NOFOLLOW))
    if not stat.S_ISREG(os.fstat(handle).st_mode):
        os.close(handle)
        raise OSError(errno.EINVAL, "it is no regular file", str(path))
    return os.fdopen(handle, "rb")


def read_bytes(path: Path, *, links: bool = True, most: int = MOST_BYTES) -> bytes:
    """All of a regular file.

    Raises:
        OSError: see `open_regular`; or it has more than `most` bytes.
    """
    with open_regular(path, links=links) as file:
        content = file.read(most + 1)
    if len(content) > most:
        raise OSError(errno.EFBIG, f"it has more than {most >> 20} MB", str(path))
    return content


def parse_json(text: str | bytes | bytearray) -> Any:
    """`json.loads` of a text that anybody may have written.

    Raises:
        ValueError: it is no JSON, no UTF-8, or nested more deeply than the interpreter can follow.
    """
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("nested too deeply to be read") from None


def parse_yaml(text: str) -> Any:
    """`yaml.safe_load` of a text that anybody may have written.

    Raises:
        ValueError: it is no YAML, nested too deeply, or too large once its aliases are written out.
    """
    try:
        tree = yaml.compose(text, Loader=yaml.SafeLoader)
        if tree is not None:
            measure(tree)
        return yaml.safe_load(text)
    except RecursionError:
        raise ValueError("nested too deeply to be read") from None
    except (yaml.YAMLError, OverflowError, TypeError, KeyError, AssertionError) as error:  # a 13th month, among others
        raise ValueError(" ".join(str(error).split())) from None


def measure(node: yaml.Node) -> int:
    """Count the values of a YAML tree with all its aliases written out.

    Raises:
        ValueError: there are more than `LARGEST`, or more than `DEEPEST` levels, as in a node that holds itself.
    """
    return _measured(node, {}, 0)


def _measured(node: yaml.Node, sizes: dict[int, int], depth: int) -> int:
    if depth > DEEPEST:
        raise ValueError(f"nested more than {DEEPEST} levels deep, at line {node.start_mark.line + 1}")
    if id(node) not in sizes:
        pairs = isinstance(node, yaml.MappingNode)
        inner = [each for pair in node.value for each in pair] if pairs else node.value
        each = (_measured(child, sizes, depth + 1) for child in inner) if isinstance(inner, list) else ()
        sizes[id(node)] = 1 + sum(each)
    if sizes[id(node)] > LARGEST:
        raise ValueError(
            f"more than {LARGEST:,} values with its aliases written out, at line {node.start_mark.line + 1}"
        )
    return sizes[id(node)]
