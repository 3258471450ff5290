"""What may stand around any simulator: episodes that are dropped, tasks that are mixed, rewards of one's own."""
