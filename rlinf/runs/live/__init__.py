"""The live page's side of a run: its status, its messages, and the controls that the page may use."""
