"""What computes faster on an accelerator than the plain code beside which it stands, and gives the same."""
