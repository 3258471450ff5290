"""`make bench-gpu`: how fast this machine's GPU is put to use, one file per subject."""
