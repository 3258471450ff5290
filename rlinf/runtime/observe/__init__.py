"""Spans, data flow and stall reports: what happened when, who waits on whom. Reads what others keep."""
