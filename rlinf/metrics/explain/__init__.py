"""One sentence per step: what its devices waited for most, and which change would help."""

__all__: list[str] = []
