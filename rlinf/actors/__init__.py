"""The workers: what each role does with its own state."""
