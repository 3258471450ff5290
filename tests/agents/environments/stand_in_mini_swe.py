"""Speaks as mini_swe_worker.py does, with an agent whose whole answer is its command."""

import json
import os
import socket
import sys
import threading
import urllib.request


def asked(url, key, messages):
    body = json.dumps({"model": "policy", "messages": messages}).encode()
    head = {"Authorization": f"Bearer {key}", "Content-Type": "application/json"}
    with urllib.request.urlopen(urllib.request.Request(f"{url}/chat/completions", body, head)) as answer:
        return json.load(answer)["choices"][0]["message"]


def played(connection):
    lines = connection.makefile("rw")
    first = lines.readline()
    if not first:
        return
    episode = json.loads(first)
    messages = [{"role": "user", "content": episode["task"]}]

    def write(**message):
        lines.write(json.dumps(message) + "\n")
        lines.flush()

    while True:
        messages.append(asked(episode["url"], episode["key"], messages))
        command = messages[-1]["content"]
        if command == "submit":
            write(ended="Submitted")
        elif command == "raise":
            write(ended="ValueError", error="ValueError: no")
        elif command == "die":
            connection.shutdown(socket.SHUT_RDWR)
        else:
            write(command=command, seconds=5, cwd=None, env={"PAGER": "cat"})
            messages.append({"role": "user", "content": lines.readline()})
            continue
        return


listening = socket.socket(socket.AF_UNIX)
if os.path.exists(sys.argv[-1]):
    os.unlink(sys.argv[-1])
listening.bind(sys.argv[-1])
listening.listen()
while True:
    threading.Thread(target=played, args=(listening.accept()[0],), daemon=True).start()
