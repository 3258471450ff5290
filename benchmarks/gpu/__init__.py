"""Answers by one command about a machine with a GPU: `checks` (is it right?) and `measures` (is it fast?)."""
