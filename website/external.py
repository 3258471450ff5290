"""Lists the links that lead out of the repository, with the pages that have them. Nothing is fetched.

python website/external.py
"""

from __future__ import annotations

import re
from collections import defaultdict
from pathlib import Path

ROOT = Path(__file__).parents[1]
ADDRESS = re.compile(r"https?://[^\s<>()\"'`\]|]*[^\s<>()\"'`\]|.,;:]")


def main() -> None:
    """Print an address a line, in alphabetical order, and behind it who links there."""
    found: dict[str, list[str]] = defaultdict(list)
    for page in sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "examples").glob("*.md")]):
        for address in sorted(set(ADDRESS.findall(page.read_text(encoding="utf-8")))):
            found[address].append(page.relative_to(ROOT).as_posix())
    for address, pages in sorted(found.items()):
        print(f"{address}  {', '.join(pages)}")


if __name__ == "__main__":
    main()
