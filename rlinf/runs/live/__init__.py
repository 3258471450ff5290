"""The live side of a run: its feed for the page, and the page's wishes."""
