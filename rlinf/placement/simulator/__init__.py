"""The real flow on modelled actors in virtual time.

A model of time and memory only; no real work is done here.
"""
