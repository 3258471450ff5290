"""Configurations of verl and RLinf as ours: `rlinf convert THEIRS.yaml OURS.yaml`, see `command.py`."""

__all__: list[str] = []
