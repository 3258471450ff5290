"""Roles that only take time: what a rehearsal puts in the place of those that compute."""
