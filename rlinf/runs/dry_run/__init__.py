"""Answers of `--dry-run`: models, data, memory and seconds of a run, without a process or a device."""
