"""The page as one file: style, scripts, what it may do, and the state of runs where it carries them.

In: states, see `run_state`. Out: a page that needs nothing from outside. What a model, a data set or a configuration
wrote reaches it as JSON alone; the scripts put it there as text, the page's own policy forbids every script but these,
and even these may make no element out of text: answers are hostile until proven otherwise.
"""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

_PAGE = Path(__file__).with_name("page")
STYLES = ("page", "sections")
SCRIPTS = ("dom", "runs", "curves", "told", "lanes", "now", "answers", "live", "page")
"""In this order: each uses what stands before it."""


def static_page(title: str, states: Sequence[Mapping[str, Any]]) -> str:
    """A page that carries the states of one run or several, for a browser without a server.

    Args:
        title: of the page.
        states: of each run, see `run_state`.
    """
    return _page(title, {"live": False, "runs": states})[0]


def live_page() -> tuple[str, str]:
    """The page that asks its server for everything, and what it may do, as the value of Content-Security-Policy."""
    html, policy = _page("rlinf", {"live": True})
    return html, f"{policy}; frame-ancestors 'none'"


def _page(title: str, carried: Mapping[str, Any]) -> tuple[str, str]:
    style = "\n".join((_PAGE / f"{name}.css").read_text(encoding="utf-8") for name in STYLES)
    parts = (f"// {name}.js\n{(_PAGE / f'{name}.js').read_text(encoding='utf-8')}" for name in SCRIPTS)
    script = '"use strict";\n(() => {\n' + "\n".join(parts) + "})();\n"
    policy = "; ".join(
        (
            "default-src 'none'",
            f"script-src '{_digest(script)}'",
            f"style-src '{_digest(style)}'",
            "connect-src 'self'" if carried["live"] else "connect-src 'none'",
            "img-src 'self' file: data:",
            "media-src 'self' file:",
            "base-uri 'none'",
            "form-action 'none'",
            "require-trusted-types-for 'script'",
        )
    )
    # What is data for a script must not be able to end the element that it stands in.
    data = json.dumps(carried, separators=(",", ":"), default=str)
    data = data.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{escape(policy)}">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        '<link rel="icon" href="data:,">'
        f"<title>{escape(title)}</title><style>{style}</style></head>"
        f'<body><header></header><div class="frame"><nav aria-label="sections"></nav><main>'
        "<noscript>This page needs JavaScript.</noscript></main></div>"
        f'<script type="application/json" id="state">{data}</script>'
        f"<script>{script}</script></body></html>\n"
    ), policy


def _digest(text: str) -> str:
    return f"sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}"
