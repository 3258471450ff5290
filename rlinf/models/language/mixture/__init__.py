"""What a policy does more where its layers are mixtures of experts (`replay`)."""
