"""Reading the files of a run while it writes them.

What is read is read once: lines that were added, not the file again. Nothing here knows of pages or servers.
"""
