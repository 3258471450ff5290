"""The first process of a machine: gives it its name, runs a command, and ends when nothing is left of it.

`machine.py NAME COMMAND ...`, in namespaces of its own. Orphans become its children, so it sees whatever stays behind.
"""

import os
import socket
import sys

socket.sethostname(sys.argv[1])
command = os.fork()
if command == 0:
    os.execvp(sys.argv[2], sys.argv[2:])
code = 0
try:
    while True:
        ended, status = os.wait()
        if ended == command:
            code = os.waitstatus_to_exitcode(status)
except ChildProcessError:
    sys.exit(code if code >= 0 else 128 - code)
