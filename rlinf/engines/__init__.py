"""Text generation behind one protocol."""
