"""A run's directory: files that grow, checkpoints and their checksums, the lock of the one run that writes."""
