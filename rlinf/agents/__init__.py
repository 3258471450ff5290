"""Programs that call a model over several turns, and the samples that come of their calls.

`agent` and `llm` are what an agent is given, `configuration` makes it, `conversation` and `chat` turn messages into
tokens, `episodes` plays tasks to groups, `trajectories` and `record` keep the calls; `tools` and `endpoint` are folders
of their own.
"""

from __future__ import annotations
