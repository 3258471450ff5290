"""Data sets of prompts and conversations: from files, the hub and generated tasks to streams of prompts.

Reading, columns, order, and the place to go on from; rewards are in `rewards`.
"""
