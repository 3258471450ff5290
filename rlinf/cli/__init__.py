"""The command line, `rlinf COMMAND`: parsing, printing, and exit codes; a run itself is in `runs`.

`commands` finds the command, `main` is `rlinf train`; others are a file each.
"""
