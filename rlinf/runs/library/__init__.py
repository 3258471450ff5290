"""A run as a library: `rlinf.train`, and a `Session` whose steps the user's own loop takes."""
