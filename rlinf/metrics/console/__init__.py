"""What a run prints: lines, tables, the live view.

Reads what the recorder and the observer give; measures nothing.
"""
