"""What one command answers about a machine with a GPU: `checks` (is it right?) and `measures` (is it fast?)."""
