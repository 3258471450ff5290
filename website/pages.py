"""Hooks of mkdocs: pages that are made when the site is built, and links that leave docs/.

In: the pages of docs/. Out: the same, with links to files of the repository leading to pages that show these files;
beside them the reference (`reference.py`), CONTRIBUTING.md and the gallery, which is examples/README.md.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files, InclusionLevel

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "website")]

import reference  # noqa: E402
import repository  # noqa: E402


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages that no file of docs/ holds."""
    made = {name: (text, InclusionLevel.UNDEFINED) for name, text in reference.pages().items()}
    for source, name in (("CONTRIBUTING.md", "contributing.md"), ("examples/README.md", "gallery.md")):
        text = (ROOT / source).read_text(encoding="utf-8")
        repository.note(text, source)
        text = repository.with_links(text, source, name).replace('"../docs/', '"')  # pictures are HTML
        made[name] = (text, InclusionLevel.UNDEFINED)
    for file in files.documentation_pages():
        repository.note(file.content_string, f"docs/{file.src_uri}")
    made |= {name: (text, InclusionLevel.NOT_IN_NAV) for name, text in repository.pages().items()}
    for name, (text, inclusion) in made.items():
        files.append(File.generated(config, name, content=text, inclusion=inclusion))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Turn links to files outside docs/ into links to the pages that show them."""
    if page.file.generated_by is not None:
        return markdown
    return repository.with_links(markdown, f"docs/{page.file.src_uri}", page.file.src_uri)
