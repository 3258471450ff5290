"""Parts of policies: what actions are drawn from, and what is remembered."""
