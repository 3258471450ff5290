"""Pictures in prompts: from a cell of a data set to what a model reads.

Flows in: what a column holds. Flows out: references with digests (`images.py`), and pixels (`processor.py`).
"""
