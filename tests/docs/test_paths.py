"""What documents and configurations name is there: files, pages, processes, keys of a simulator."""

from __future__ import annotations

import re
from dataclasses import fields
from pathlib import Path

import pytest
import yaml

from rlinf.config.embodied import EmbodiedConfig
from rlinf.config.schema import leaves
from rlinf.envs.maniskill import Task
from rlinf.placement.seats import CONTROL, TEXT, place
from rlinf.runs.rules import load_any

ROOT = Path(__file__).parents[2]
CONFIGS = sorted((ROOT / "configs").rglob("*.yaml"))
PAGES = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "benchmarks").glob("*.md")]
DOCUMENTS = [*sorted(PAGES), *CONFIGS, ROOT / "Makefile"]
SOURCES = sorted((ROOT / "rlinf").rglob("*.py"))
PATH = re.compile(r"(?<![\w/.~$<>{}*-])(?:rlinf|tests|docs|configs|examples|benchmarks|\.ci)/[\w./-]*\w")
LINK = re.compile(r"\]\(([^)\s]+)\)")
COMMAND = re.compile(r"# +torchrun (?:--nnodes (\d+) )?--nproc-per-node (\d+) ")


def name(path: Path) -> str:
    return str(path.relative_to(ROOT))


@pytest.mark.parametrize("page", DOCUMENTS, ids=name)
def test_every_path_that_a_document_names_exists(page):
    text = page.read_text()
    assert not [path for path in PATH.findall(text) if not (ROOT / path).exists()]
    links = (link.partition("#")[0] for link in LINK.findall(text) if "://" not in link)
    assert not [link for link in links if link and not (page.parent / link).exists()]


def test_every_path_that_a_docstring_names_exists():
    named = {path for source in SOURCES for path in PATH.findall(source.read_text())}
    assert not [path for path in sorted(named) if not (ROOT / path).exists()]


@pytest.mark.parametrize("page", [page for page in DOCUMENTS if page.suffix == ".md"], ids=name)
def test_every_anchor_of_a_link_is_a_heading(page):
    for link in LINK.findall(page.read_text()):
        file, _, anchor = link.partition("#")
        target = page if not file else page.parent / file
        if anchor and "://" not in link and target.suffix == ".md":
            headings = re.findall(r"^#+ (.*)$", target.read_text(), re.MULTILINE)
            assert anchor in {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}, link


@pytest.mark.parametrize("path", [path for path in CONFIGS if COMMAND.search(path.read_text())], ids=name)
def test_the_command_of_a_configuration_starts_as_many_processes_as_it_uses(path, monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / ".cache/rlinf/SmolLM2-135M-Instruct").mkdir(parents=True)  # what `make smollm2` brings
    nodes, each = COMMAND.search(path.read_text()).groups()
    hosts = int(nodes or 1) * int(each)
    config = load_any(str(path), (), hosts)
    kinds = (
        CONTROL
        if isinstance(config, EmbodiedConfig)
        else [kind for kind in TEXT if kind.name in config.placement.__dict__]
    )
    placed = place(config.placement, kinds, hosts)
    used = {host for seat in placed.seats.values() for host in (*seat.hosts, *frozenset().union(*seat.devices))}
    assert used == set(range(hosts))


def test_options_of_a_simulator_in_the_documentation_are_those_of_its_adapter():
    (text,) = [leaf.doc for leaf in leaves(EmbodiedConfig) if leaf.key == "env.options"]
    example = yaml.safe_load(re.search(r"\{.*?\}", text)[0])
    assert "ManiSkill" in text
    assert example.keys() <= {field.name for field in fields(Task)}


def test_a_page_that_a_configuration_of_a_simulator_points_at_mentions_the_simulator():
    for path in CONFIGS:
        simulator = re.search(r"simulator: rlinf\.envs\.(?:maniskill\.)?(\w+)", path.read_text())
        for page in re.findall(r"docs/embodied\.md", path.read_text()) if simulator else ():
            assert simulator[1].lower() in (ROOT / page).read_text().lower(), (path, page)
