"""From `torchrun` to the first answered call: two scripts that print the clock when they are of use."""
