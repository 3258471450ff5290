"""A page that shows no more than that the server is there, until the page of a run takes its place."""

from __future__ import annotations


def page() -> tuple[str, str]:
    """(HTML, its Content-Security-Policy)."""
    policy = "default-src 'none'; frame-ancestors 'none'; base-uri 'none'; form-action 'none'"
    return "<!doctype html><title>rlinf</title><p>rlinf watch", policy
