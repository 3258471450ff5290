"""What people see of a run while it lives, and what they may ask of it: the feed of the live page, and its controls.

The page's server is another process (`rlinf watch`); nothing here draws, serves HTTP, or waits for a watcher.
"""
