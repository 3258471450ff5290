"""A stand-in for a server of OpenEnv, of one step: the seed of a session is what happens in it. Its port is argued.

0: it goes well; 1: an error; 2: silence; 3: nonsense; 4: death; 5: a flood.
"""

import os
import sys

from aiohttp import web


async def session(request):
    socket = web.WebSocketResponse()
    await socket.prepare(request)
    async for message in socket:
        wanted = message.json()
        if wanted["type"] == "close":
            break
        what = wanted["data"].get("seed", 0)
        if what == 1:
            await socket.send_json({"type": "error", "data": {"message": "the tool is gone"}})
        elif what == 3:
            await socket.send_str("[7")
        elif what == 4:
            os.write(2, b"out of memory\n")
            os._exit(3)
        elif what != 2:
            text = "x" * 300_000 if what == 5 else "?"
            done = wanted["type"] == "step"
            data = {"observation": {"text": text}, "reward": 1.0 if done else None, "done": done}
            await socket.send_json({"type": "observation", "data": data})
    await socket.close()
    return socket


async def answer(request):
    return web.json_response({"action": {"properties": {"message": {"type": "string"}}}})


application = web.Application()
application.router.add_get("/ws", session)
application.router.add_get("/{path:schema|health}", answer)
web.run_app(application, host="127.0.0.1", port=int(sys.argv[1]), print=None)
