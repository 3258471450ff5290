"""What happened when, and who waits on whom: spans, data flow, stall reports. Reads what others keep."""
