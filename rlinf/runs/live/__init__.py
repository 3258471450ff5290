"""What a run tells the page while it goes on, and what the page may ask of it."""
