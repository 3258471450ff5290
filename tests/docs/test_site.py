"""The site that `make docs` builds: no broken link, nothing from elsewhere, every page and every public name on it."""

from __future__ import annotations

import logging
import re
from pathlib import Path

import pytest

import rlinf

pytest.importorskip("mkdocs")

from mkdocs.commands.build import build
from mkdocs.config import load_config

ROOT = Path(__file__).parents[2]
LOADED = re.compile(r"<(?:script|link|img|iframe|source|video)\b[^>]*?\b(?:src|href)=\"?([^\s\">]+)")


class Warnings(logging.Handler):
    """Keeps what mkdocs and its plugins warn of: broken links and anchors, pages outside the navigation."""

    def __init__(self):
        super().__init__(logging.WARNING)
        self.said: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.said.append(record.getMessage())


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[str]]:
    place, warnings = tmp_path_factory.mktemp("site"), Warnings()
    logging.getLogger("mkdocs").addHandler(warnings)
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("NO_MKDOCS_2_WARNING", "1")
            config = load_config(str(ROOT / "mkdocs.yml"), site_dir=str(place))
            config.plugins.on_startup(command="build", dirty=False)
            build(config)
            config.plugins.on_shutdown()
    finally:
        logging.getLogger("mkdocs").removeHandler(warnings)
    return place, warnings.said


def test_every_link_and_anchor_leads_somewhere_and_every_page_is_in_the_navigation(site):
    assert site[1] == []


def test_rows_of_tables_are_rows_and_text_is_none(site):
    for page in site[0].rglob("*.html"):
        text = page.read_text(encoding="utf-8")
        stray = re.findall(r"<p>\s*\| .{0,60}", text)
        swallowed = re.findall(r"<tr>\s*<td>(?!<strong>)(.+?)</td>(?:\s*<td[^>]*></td>)+\s*</tr>", text)
        assert (stray, swallowed) == ([], []), page


def test_nothing_is_loaded_from_elsewhere(site):
    pages = [*site[0].rglob("*.html")]
    assert len(pages) > 80
    loaded = {(page.name, address) for page in pages for address in LOADED.findall(page.read_text(encoding="utf-8"))}
    elsewhere = {(page, address) for page, address in loaded if address.startswith(("http:", "https:", "//"))}
    assert elsewhere == set()
    for style in site[0].rglob("*.css"):
        assert not re.search(r"(?:@import|url\()\s*[\"']?(?:https?:)?//", style.read_text(encoding="utf-8")), style


def test_every_public_name_is_in_the_reference(site):
    found = set()
    for page in (site[0] / "reference").glob("*.html"):
        found |= set(re.findall(r'id="(rlinf\.[\w.]+)"', page.read_text(encoding="utf-8")))
    assert {f"rlinf.{name}" for name in rlinf.__all__} <= found


def test_every_command_is_on_the_page_of_the_command_line(site):
    text = (site[0] / "reference" / "cli.html").read_text(encoding="utf-8")
    from rlinf.cli.commands import _ELSEWHERE, _HERE

    for command in (*_ELSEWHERE, *_HERE):
        assert f"usage: rlinf {command} " in text, command


def test_search_finds_words_of_every_kind_of_page(site):
    index = (site[0] / "search" / "search_index.js").read_text(encoding="utf-8")
    for location in ("config.html#rollout", "reference/training.html#rlinf.train", "quickstart.html"):
        assert f'"location":"{location}' in index
    assert "repository/" not in index, "files of the repository would crowd out pages"
