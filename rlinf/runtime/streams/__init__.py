"""Queues with item states, channels and streams over them, and the stages that fill streams."""
