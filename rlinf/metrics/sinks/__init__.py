"""One file per tracker, each with `open_sink(about, project) -> Sink`; imported only when its key asks for it.

Passes numbers on; names and times them nowhere.
"""
