"""A run's numbers: files for programs (`files`), lines and a live view for people (`table`, `live`), TensorBoard, wandb
and SwanLab (`tracking`), and where the time of a step went (`timing`).

Names are the field's: `reward/mean`, `clip_frac`, `grad_norm`, `timing/step`; docs/metrics.md lists them.
"""

from rlinf.metrics.tables import ProgressTable
from rlinf.storage.files import MetricsFile, SamplesFile

__all__ = ["MetricsFile", "ProgressTable", "SamplesFile"]
