"""OpenVLA-7B and OpenVLA-OFT by the structure, tensor names and files of their published checkpoints.

The vision encoders are written here, with timm's names; the language model is transformers' Llama.
"""
