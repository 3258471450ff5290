"""This process's GPU, and host memory that GPUs copy fast, for every room above."""
