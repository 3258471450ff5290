"""Files of the repository that pages link to, each as a page of the site.

In: Markdown of the pages. Out: `pages`, one for each file or folder outside docs/ that some page links to, and
`with_links`, the Markdown with links that lead there. So the links of docs/ work where the repository is read, and on
the site.
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).parents[1]
LINK = re.compile(r"(?<=\]\()(?![a-z]+:|#)([^)\s#]+)(#[^)\s]*)?(?=\))")
FENCE = re.compile(r"^( *)(```+|~~~+).*?^\1\2", re.MULTILINE | re.DOTALL)
LANGUAGES = {".py": "python", ".yaml": "yaml", ".yml": "yaml", ".toml": "toml", ".jsonl": "json", ".json": "json"}
MOST = 200_000
"""Characters of a file that a page shows; a longer one is data, and nobody reads it on a site."""

_linked: set[str] = set()
"""What pages link to, by its path in the repository."""


def outside_fences(text: str, change: Callable[[str], str]) -> str:
    """Apply a change to what is no block of code.

    Args:
        text: Markdown.
        change: from a part of it to what stands in its place.
    """
    parts, end = [], 0
    for fence in FENCE.finditer(text):
        parts += [change(text[end : fence.start()]), fence[0]]
        end = fence.end()
    return "".join([*parts, change(text[end:])])


def target(link: str, source: str) -> str:
    """The path in the repository that a link leads to.

    Args:
        link: as written, without anchor.
        source: path in the repository of the page that has it.
    """
    return posixpath.normpath(posixpath.join(posixpath.dirname(source), link))


def note(text: str, source: str) -> None:
    """Remember the files of the repository that a page links to.

    Args:
        text: its Markdown.
        source: its path in the repository.
    """

    def find(part: str) -> str:
        for link in LINK.finditer(part):
            path = target(link[1], source)
            if not path.startswith(("docs/", "..")) and path not in _ON_SITE and (ROOT / path).exists():
                _linked.add(path)
        return part

    outside_fences(text, find)


def pages() -> dict[str, str]:
    """A page for each linked file and folder, and for the files in these folders: name on the site to Markdown."""
    found: dict[str, str] = {}
    todo = sorted(_linked)
    while todo:
        path = todo.pop()
        name = _page(path)
        if name in found:
            continue
        if (ROOT / path).is_dir():
            inside = [each for each in sorted((ROOT / path).iterdir()) if _shown(each)]
            found[name] = _folder(path, inside)
            todo += [each.relative_to(ROOT).as_posix() for each in inside]
        else:
            found[name] = _file(path)
    return found


def with_links(text: str, source: str, name: str) -> str:
    """Markdown whose links to files outside docs/ lead to their pages.

    Args:
        text: the Markdown.
        source: its path in the repository; "" is a page of the top.
        name: its path on the site.
    """

    def lead(link: re.Match[str]) -> str:
        path, anchor = target(link[1], source), link[2] or ""
        if path.startswith(".."):
            return link[0]
        if path.startswith("docs/"):
            there = path.removeprefix("docs/")
        elif path in _ON_SITE:
            there = _ON_SITE[path]
        elif (ROOT / path).exists():
            there, anchor = _page(path), ""
        else:
            return link[0]
        return posixpath.relpath(there, posixpath.dirname(name) or ".") + anchor

    return outside_fences(text, lambda part: LINK.sub(lead, part))


_ON_SITE = {"CONTRIBUTING.md": "contributing.md", "README.md": "index.md", "examples/README.md": "gallery.md"}
"""Files of the top that the site has under names of its own."""


def _page(path: str) -> str:
    return f"repository/{path}/index.md" if (ROOT / path).is_dir() else f"repository/{path}.md"


def _shown(path: Path) -> bool:
    if path.name.startswith((".", "__")):
        return False
    return path.is_dir() or path.suffix in {*LANGUAGES, ".md", ".txt"}


def _folder(path: str, inside: list[Path]) -> str:
    lines = [f"- [{each.name}{'/' * each.is_dir()}]({_from(path, each)})" for each in inside]
    return f"{_HEAD}# {path}/\n\nA folder of the repository.\n\n" + "\n".join(lines) + "\n"


def _from(path: str, inside: Path) -> str:
    there = _page(inside.relative_to(ROOT).as_posix())
    return posixpath.relpath(there, f"repository/{path}")


def _file(path: str) -> str:
    text = (ROOT / path).read_text(encoding="utf-8", errors="replace")
    if path.endswith(".md"):
        return _HEAD + with_links(text, path, _page(path))
    fence = "`" * max(3, 1 + max((len(run) for run in re.findall(r"`{3,}", text)), default=0))
    language = LANGUAGES.get(Path(path).suffix, "make" if path == "Makefile" else "text")
    shown = text if len(text) <= MOST else text[:MOST] + "\n…\n"
    return f"{_HEAD}# {path}\n\n{fence}{language}\n{shown.rstrip()}\n{fence}\n"


_HEAD = "---\nsearch: {exclude: true}\nhide: [navigation]\n---\n\n"
