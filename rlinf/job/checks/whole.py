"""Are the parts of checkpoints that a configuration names, such as `model.path=…/step_000100/hf`, what was written?

In: a configuration. Out: a `Problem` for each that is damaged. Every file of such a part is read; blocking.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

from rlinf.config.loading import ConfigError, Problem
from rlinf.metrics.durable.manifest import Damaged, verify_part


def check_parts(config: Any) -> None:
    """See that what a configuration names of checkpoints with a manifest is whole.

    Raises:
        ConfigError: something is not; the text names the key and the file.
    """
    problems = []
    for key, path in _paths(config):
        try:
            verify_part(Path(path))
        except Damaged as damage:
            problems.append(Problem("configuration", key, path, str(damage)))
        except (OSError, ValueError, RuntimeError):
            pass  # no path at all: what reads it says so
    if problems:
        raise ConfigError(problems)


def _paths(tree: Any, prefix: str = "") -> Iterator[tuple[str, str]]:
    """Keys called `path` or `tokenizer` whose values are texts."""
    if is_dataclass(tree):
        children: Mapping[str, Any] = {field.name: getattr(tree, field.name) for field in fields(tree)}
    elif isinstance(tree, Mapping):
        children = tree
    else:
        return
    for name, value in children.items():
        if name in ("path", "tokenizer") and isinstance(value, str):
            yield f"{prefix}{name}", value
        else:
            yield from _paths(value, f"{prefix}{name}.")
