"""Benchmarks whose packages are installed apart: CALVIN, RoboTwin 2, RoboCasa, SimplerEnv, Isaac Lab, Genesis.

An adapter imports its package when a simulator is made, and says the command that installs it where it is missing.
"""
