"""Metrics and reports of a run: files for programs, lines and a live view for people, trackers, alarms.

`recorder` writes, `timing` says where the time of a step went, `explain` why, `alarms` what is wrong. Names are the
field's (`reward/mean`, `clip_frac`, `grad_norm`); docs/metrics.md lists them.
"""

from rlinf.metrics.tables import ProgressTable
from rlinf.storage.files import MetricsFile, SamplesFile

__all__ = ["MetricsFile", "ProgressTable", "SamplesFile"]
