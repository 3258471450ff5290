"""`make test-gpu`: whether what this machine's GPU computes is right, one file per subject."""
