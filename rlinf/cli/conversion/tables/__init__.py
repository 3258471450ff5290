"""What keys of other frameworks mean here, a module for each kind of configuration, by the rules of `rules.py`."""

__all__: list[str] = []
