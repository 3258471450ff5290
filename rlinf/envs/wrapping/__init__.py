"""Simulators around other simulators."""
