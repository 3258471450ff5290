"""The actor runtime: actors, promises, streams, channels and leases over asyncio and torch RPC. It knows no RL."""

import os

# Read when torch is imported. TensorPipe warns about every peer that leaves, and whoever should know is told already.
os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
