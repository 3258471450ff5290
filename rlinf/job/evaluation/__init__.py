"""Evaluation of language models around the flow: held-out problems, benchmarks by name, and answers that are kept."""
