"""A stand-in for `verifiers_worker.py`: a task's name is what happens in its episodes.

A reward, an error, silence, a flood, a death, or no reward at all.
"""

import json
import os
import socket
import sys
import threading

wanted = json.loads(sys.argv[1])
taskset = wanted["environment"]["taskset"]["id"]
if taskset == "broken":
    sys.exit("ModuleNotFoundError: taskset 'broken' not found")
NAMES = [] if taskset == "empty" else ["0.25", "error", "silence", "flood", "death", "unscored", "nan", "endless"] * 4
if len(sys.argv) < 3:
    data = dict.fromkeys(wanted["columns"], "shown")
    for at, name in enumerate(NAMES[: wanted["tasks"]]):
        print(json.dumps({**data, "prompt": f"task {at}", "name": name}), flush=True)
    sys.exit()
hung_up = threading.Semaphore(0)


def played(peer):
    lines = peer.makefile("rw")

    def tell(*, rewards=None, metrics=None, **line):
        if rewards is not None:
            line["agents"] = {"": {"rewards": rewards, "metrics": metrics, "learns": True}}
        print(json.dumps({"errors": [], **line}), file=lines, flush=True)

    if not (line := lines.readline()):
        return None
    if not (episode := json.loads(line)):
        return tell()
    what = NAMES[episode["task"]]
    if what == "death":
        print("out of memory", file=sys.stderr, flush=True)
        os._exit(3)
    if what == "error":
        return tell(errors=["ToolsetError: the tool is gone"])
    if what == "endless":
        peer.sendall(b"x" * 300_000)
        return None
    if what == "unscored":
        hung_up.acquire()
        return tell(rewards={}, metrics={"cancelled": 1.0})
    if what == "flood":
        print("x" * 200_000, file=sys.stderr, flush=True)
        return tell(rewards={"right": 0.5}, metrics={"text": 1.0, "z" * 100_000: 1.0})
    if what == "silence":
        lines.readline()
        return hung_up.release()
    return tell(rewards={"right": float(what), "style": 1.0}, metrics={"turns": 2.0})


if os.path.exists(sys.argv[2]):
    os.unlink(sys.argv[2])
server = socket.socket(socket.AF_UNIX)
server.bind(sys.argv[2])
server.listen(100)
while True:
    threading.Thread(target=played, args=(server.accept()[0],), daemon=True).start()
