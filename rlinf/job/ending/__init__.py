"""A run that is asked to end before its last step."""
