"""First work of any job under torchrun: import torch."""

import time

import torch

if __name__ == "__main__":
    print(f"ready {time.time()} torch {torch.__version__}", flush=True)
