"""What a run directory is worth after a crash: who holds it, and whether what lies there is what was written."""
