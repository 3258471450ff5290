"""What any job under torchrun must do first: import torch."""

import time

import torch

if __name__ == "__main__":
    print(f"ready {time.time()} torch {torch.__version__}", flush=True)
