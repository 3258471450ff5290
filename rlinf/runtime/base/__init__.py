"""Errors, the clock, calls, tasks and threads, protocols of what lies above: used by every room. No I/O."""
