"""The keys of a configuration as documentation: for a terminal (`--help`) and as markdown (docs/config.md)."""

from __future__ import annotations

import inspect
import json
import textwrap
from collections.abc import Iterator

from rlinf.config.embodied import EmbodiedConfig
from rlinf.config.schema import Leaf, leaves, sections, type_name

_INTRODUCTION = """\
# Configuration

A run is described by one YAML file; `key=value` arguments after it win over it:

```bash
torchrun --nproc-per-node 2 launch.py --config configs/quickstart.yaml steps=20 optimizer.lr=1e-4
python launch.py --config configs/quickstart.yaml --dry-run
```

A key that is not listed here is an error, and so is a value of the wrong type: all mistakes are reported together,
before anything starts. `${other.key}` takes another key's value. A key whose type is str keeps the characters that are
written, in the file and on the command line, also where YAML would read `no`, `1e3` or `12:30:45` as something else;
only `null`, `~` and nothing at all are null, and quotes around a text are taken off. What a run used is saved as
`resolved.yaml` in its run directory, and that file can be given as `--config` again.

<!-- Written by `python -m rlinf config --markdown`; edit the fields in rlinf/config/text.py instead. -->
"""
_EMBODIED = """\
# Configuration of embodied runs

A file with a section `env` describes a run in which a policy acts; [config.md](config.md) has the keys of all others,
and how files, overrides and mistakes are read, which is the same here.

```bash
torchrun --nproc-per-node 2 launch.py --config configs/embodied/maniskill_pullcube_ppo.yaml steps=20
```

<!-- Written by `python -m rlinf config --embodied --markdown`; edit the fields in rlinf/config/embodied.py instead. -->
"""


def as_text(schema: type, width: int = 100) -> str:
    """Every key with type, default and meaning, for a terminal."""
    lines: list[str] = []
    for section, about, keys in _grouped(schema):
        lines += ["", f"{section}: {about}" if section else "Top level:"]
        for leaf in keys:
            lines.append(f"  {leaf.key}: {type_name(leaf.type)} = {_default(leaf)}")
            doc = leaf.doc + (f" ({limits})" if (limits := ", ".join(leaf.limits)) else "")
            lines += textwrap.wrap(doc, width, initial_indent=" " * 6, subsequent_indent=" " * 6)
    return "\n".join(lines[1:])


def as_markdown(schema: type) -> str:
    """Every key with type, default and meaning, as the page docs/config.md, or docs/config-embodied.md."""
    lines = [_EMBODIED if schema is EmbodiedConfig else _INTRODUCTION]
    for section, about, keys in _grouped(schema):
        lines += [f"## `{section}`" if section else "## Top level", "", about, ""]
        lines += ["| key | type | default | meaning |", "|---|---|---|---|"]
        for leaf in keys:
            kind = type_name(leaf.type) + (f", {limits}" if (limits := ", ".join(leaf.limits)) else "")
            cells = [f"`{leaf.key}`", kind, f"`{_default(leaf)}`", leaf.doc]
            lines.append(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |")
        lines.append("")
    return "\n".join(lines).rstrip() + "\n"


def _grouped(schema: type) -> Iterator[tuple[str, str, list[Leaf]]]:
    """(section, what it is about, its keys), the top level first."""
    owned: dict[str, list[Leaf]] = {"": []}
    about = {"": inspect.getdoc(schema) or ""}
    for section, its_schema in sections(schema):
        owned[section], about[section] = [], inspect.getdoc(its_schema) or ""
    for leaf in leaves(schema):
        owned[leaf.key.rpartition(".")[0]].append(leaf)
    for section, keys in owned.items():
        yield section, " ".join(about[section].split()), keys


def _default(leaf: Leaf) -> str:
    return json.dumps(leaf.default)
