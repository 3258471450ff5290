"""Steps of learning that is not on-policy alone: from data without acting, and from an expert's labels."""
