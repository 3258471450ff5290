"""Commands that look at runs which are there, live or over: none of them changes one."""
