"""Simulators of benchmarks that are installed apart, one file each; packages are imported when one is made."""
