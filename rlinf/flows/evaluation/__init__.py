"""How good a policy is: answers to held-out problems, and trials in environments."""
