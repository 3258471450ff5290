"""Child processes: supervised, restarted, killable, and calls into them. Knows no actors."""
