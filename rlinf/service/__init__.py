"""A training service: programs of anybody's own the loop, and this process model, optimizer and engine.

It speaks the Tinker API over HTTP and is a thin face over `rlinf.Session`: nothing here computes.
"""
