"""What lies in a run's directory: files that grow, checkpoints and their checksums, the lock of who writes."""
