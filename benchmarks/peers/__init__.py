"""The opponents: each a script of its own that measures one system and prints one line of JSON."""
