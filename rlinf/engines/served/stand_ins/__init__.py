"""What SGLang lacks on a machine without a GPU: this folder is put on a server's PYTHONPATH there, and nowhere else."""
