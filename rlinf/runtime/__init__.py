"""The actor runtime: actors, promises, streams, channels and leases over asyncio and torch RPC. It knows no RL."""
