"""A run as one HTML page, and pictures of what actors and devices did over time.

Reads only files of a run directory.
"""
