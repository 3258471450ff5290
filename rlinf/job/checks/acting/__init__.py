"""What `--dry-run` promises of runs in which a policy acts: the memory that its roles take."""
