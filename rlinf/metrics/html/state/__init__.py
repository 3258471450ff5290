"""All that a page shows of a run, read from its directory as JSON knows it."""
