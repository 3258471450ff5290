"""A module of a user's that ends the program when it is imported."""

import sys

sys.exit("leaving")


def nothing() -> None:
    """Never there."""
