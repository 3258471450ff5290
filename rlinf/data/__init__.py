"""What travels between the roles, and where it comes from: prompts, samples, weights, tasks, tokenizers."""
