"""A stand-in for `verifiers_worker.py`: a task's name is what happens in its episodes.

A reward, an error, silence, a flood, a death, or no reward at all.
"""

import json
import os
import socket
import sys

wanted = json.loads(sys.argv[1])
taskset = wanted["environment"]["taskset"]["id"]
if taskset == "broken":
    sys.exit("ModuleNotFoundError: taskset 'broken' not found")
NAMES = [] if taskset == "empty" else ["0.25", "error", "silence", "flood", "death", "unscored", "nan", "endless"] * 4
if len(sys.argv) < 3:
    data = dict.fromkeys(wanted["columns"], "shown")
    rows = [{**data, "prompt": f"task {at}", "name": name} for at, name in enumerate(NAMES[: wanted["tasks"]])]
    sys.exit(print(json.dumps({"tasks": rows})))
if os.path.exists(sys.argv[2]):
    os.unlink(sys.argv[2])
server = socket.socket(socket.AF_UNIX)
server.bind(sys.argv[2])
server.listen()
peer = server.accept()[0]
out = peer.makefile("w")


def tell(*, rewards=None, metrics=None, **line):
    if rewards is not None:
        line["agents"] = {"": {"rewards": rewards, "metrics": metrics, "learns": True}}
    print(json.dumps({"errors": [], **line}), file=out, flush=True)


cancelled = []
for line in peer.makefile("r"):
    episode = json.loads(line)
    if "cancel" in episode:
        cancelled.append(episode["cancel"])
        continue
    what, number = NAMES[episode["task"]], episode["episode"]
    if what == "death":
        print("out of memory", file=sys.stderr, flush=True)
        os._exit(3)
    elif what == "error":
        tell(episode=number, errors=["ToolsetError: the tool is gone"])
    elif what == "endless":
        out.write("x" * 300_000)
        out.flush()
    elif what == "unscored":
        tell(episode=number, rewards={}, metrics={"cancelled": len(cancelled)})
    elif what == "flood":
        print("x" * 200_000, file=sys.stderr, flush=True)
        tell(episode=number, rewards={"right": 0.5}, metrics={"text": 1.0, "z" * 100_000: 1.0})
    elif what != "silence":
        tell(episode=number, rewards={"right": float(what), "style": 1.0}, metrics={"turns": 2.0})
