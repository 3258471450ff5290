"""A daemon that answers the part of Docker's HTTP API that we use, and runs what it is asked for by namespaces.

Written from the API's description (version 1.41): paths, fields, statuses, frames of output; and, where that says
nothing, as Docker 20.10 was seen to do. It knows the images `base` and what is committed, keeps labels, and counts what
a container wrote.
"""

import asyncio
import contextlib
import itertools
import json
import tarfile
import tempfile
from dataclasses import replace

from aiohttp import web

from rlinf.sandbox.containers.namespaces import Namespaces
from rlinf.sandbox.containers.protocol import LIMITS


def _missing(what):
    return web.json_response({"message": what}, status=404)


class Daemon:
    """Args: directory: for images and the socket."""

    def __init__(self, directory):
        self.directory, self.socket = directory, str(directory / "docker.sock")
        self.images, self.containers, self.execs = {"base": (None, {})}, {}, {}
        self.calls, self.bodies = [], {}
        self.removed = asyncio.Event()
        self._numbers = itertools.count()

    @contextlib.asynccontextmanager
    async def serve(self):
        app = web.Application(client_max_size=1 << 30, middlewares=[self._recorded])
        routes = [
            ("GET", "/_ping", self._ping),
            ("GET", "/containers/json", self._listed),
            ("GET", "/images/json", self._images),
            ("DELETE", "/images/{name:.*}", self._forget),
            ("POST", "/containers/create", self._create),
            ("POST", "/commit", self._commit),
            ("POST", "/exec/{name}/start", self._exec_start),
            ("GET", "/exec/{name}/json", self._exec_state),
            ("POST", "/containers/{name}/start", self._start),
            ("GET", "/containers/{name}/json", self._inspect),
            ("POST", "/containers/{name}/exec", self._exec),
            ("PUT", "/containers/{name}/archive", self._put),
            ("GET", "/containers/{name}/archive", self._get),
            ("DELETE", "/containers/{name}", self._remove),
        ]
        for method, path, handler in routes:
            app.router.add_route(method, "/v1.41" + path, handler)
        runner = web.AppRunner(app)
        async with Namespaces(self.directory / "cache") as self.provider:
            await runner.setup()
            try:
                await web.UnixSite(runner, self.socket).start()
                yield self
            finally:
                await runner.cleanup()

    @web.middleware
    async def _recorded(self, request, handler):
        self.calls.append(f"{request.method} {request.path.removeprefix('/v1.41')}")
        name = request.match_info.get("name")
        if request.match_info.route.resource.canonical.startswith("/v1.41/containers/{") and (
            name not in self.containers
        ):
            return _missing(f"No such container: {name}")
        return await handler(request)

    async def _ping(self, request):
        return web.Response(text="OK")

    async def _listed(self, request):
        label = json.loads(request.query["filters"])["label"][0]
        rows = [(name, body["Labels"]) for name, (body, _) in self.containers.items()]
        return web.json_response([{"Id": name, "Labels": labels} for name, labels in rows if label in labels])

    async def _images(self, request):
        label = json.loads(request.query["filters"])["label"][0]
        rows = [(name, labels) for name, (_, labels) in self.images.items() if label in labels]
        return web.json_response([{"Id": name, "Labels": labels} for name, labels in rows])

    async def _forget(self, request):
        if self.images.pop(request.match_info["name"], None) is None:
            return _missing("No such image")
        return web.json_response([])

    async def _create(self, request):
        body = await request.json()
        if body["Image"] not in self.images:
            return _missing(f"No such image: {body['Image']}")
        self.bodies[request.query["name"]] = body
        self.containers[request.query["name"]] = (body, None)
        return web.json_response({"Id": request.query["name"], "Warnings": []}, status=201)

    async def _start(self, request):
        body, _ = self.containers[request.match_info["name"]]
        limits = replace(LIMITS, memory_bytes=body["HostConfig"]["Memory"], processes=body["HostConfig"]["PidsLimit"])
        limits = replace(limits, file_bytes=64 << 20, output_bytes=64 << 10, wall_seconds=60)
        env = dict(each.split("=", 1) for each in body["Env"])
        image, binds = self.images[body["Image"]][0], [each.split(":") for each in body["HostConfig"].get("Binds", ())]
        assert all(source == target for source, target in binds)  # as the containers of our own can have them
        await self.provider._serve()
        files = self.provider._base if image is None else await self.provider._image(image)
        visible = (*files.visible, *(source for source, _ in binds))
        files = replace(files, env={**files.env, **env}, visible=visible)
        box = await self.provider._begin(files, body.get("WorkingDir") or files.workdir, limits, network=False)
        self.containers[request.match_info["name"]] = (body, box)
        return web.Response(status=204)

    async def _inspect(self, request):
        _, box = self.containers[request.match_info["name"]]
        answer = {"State": {"OOMKilled": False}, "Config": {"WorkingDir": box.workdir if box else ""}}
        if request.query.get("size"):
            answer["SizeRw"] = int((await box.run("df --output=used -B1 / | tail -1")).stdout or 0)
        return web.json_response(answer)

    async def _exec(self, request):
        name = str(next(self._numbers))
        self.execs[name] = [self.containers[request.match_info["name"]][1], await request.json(), None]
        return web.json_response({"Id": name}, status=201)

    async def _exec_start(self, request):
        entry = self.execs[request.match_info["name"]]
        box, wish, _ = entry
        reply = web.StreamResponse(headers={"Content-Type": "application/vnd.docker.raw-stream"})
        await reply.prepare(request)
        env = dict(each.split("=", 1) for each in wish.get("Env", ()))
        result = await box.run(wish["Cmd"], cwd=wish.get("WorkingDir"), env=env)
        code = result.exit_code if result.exit_code is not None else 137
        entry[2] = 128 - code if code < 0 else code
        for stream, text in ((1, result.stdout), (2, result.stderr)):
            if data := text.encode():
                await reply.write(bytes([stream, 0, 0, 0]) + len(data).to_bytes(4, "big") + data)
        await reply.write_eof()
        return reply

    async def _exec_state(self, request):
        return web.json_response({"ExitCode": self.execs[request.match_info["name"]][2], "Running": False})

    async def _put(self, request):
        box = self.containers[request.match_info["name"]][1]
        with tempfile.TemporaryFile() as file:
            file.write(await request.read())
            file.seek(0)
            await box.put("upload", file)
        return web.Response()

    async def _get(self, request):
        name = request.match_info["name"]
        with tempfile.TemporaryFile() as file:
            wish = {"do": "download", "path": request.query["path"]}
            result = await self.containers[name][1]._ask(wish, file.fileno())
            if result.exit_code:
                return _missing(f"Could not find the file {request.query['path']} in container {name}")
            file.seek(0)
            with tarfile.open(fileobj=file, mode="a") as tar:
                root = tar.getmembers()[0]
                if root.isdir():  # pipes and devices are sent as they are
                    pipe = tarfile.TarInfo(f"{root.name}/pipe-of-the-daemon")
                    pipe.type = tarfile.FIFOTYPE
                    tar.addfile(pipe)
            file.seek(0)
            return web.Response(body=file.read(), content_type="application/x-tar")

    async def _remove(self, request):
        _, box = self.containers.pop(request.match_info["name"])
        self.removed.set()
        if box is not None:
            await asyncio.shield(box.end())
        return web.Response(status=204)

    async def _commit(self, request):
        if request.content_type != "application/json":
            return web.json_response({"message": "Content-Type must be 'application/json'"}, status=400)
        _, box = self.containers[request.query["container"]]
        tag = f"{request.query['repo']}:{request.query['tag']}"
        label = next(line for line in request.query["changes"].splitlines() if line.startswith("LABEL "))
        self.images[tag] = (await box.snapshot(), dict([label.removeprefix("LABEL ").split("=", 1)]))
        return web.json_response({"Id": tag}, status=201)
