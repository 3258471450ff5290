"""Bytes between hosts: links of ordered frames, process groups, rendezvous. Knows no actors."""
