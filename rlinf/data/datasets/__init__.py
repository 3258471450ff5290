"""From files, hub data sets and generated tasks to streams of prompts.

Reading, columns, order and cursor; rewards are `rewards`.
"""
