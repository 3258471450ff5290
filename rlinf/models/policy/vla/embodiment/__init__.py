"""What connects a vision-language-action model to a robot: pictures, statistics of numbers, grippers, and a table.

Tensor functions and constants, shared by all such models; no network, no file.
"""
