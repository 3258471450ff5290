"""Live side of a run: the feed for its page, and the controls that the page sends."""
