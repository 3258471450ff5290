"""This process's GPU, for every room above. No tensors of anyone's own."""
