"""Runs that have something for every section of the page, and a server that stands in for the one of a live run."""

from __future__ import annotations

import asyncio
import io
import itertools
import json
import math
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

from aiohttp import web
from PIL import Image

from rlinf.dashboard.events import CONTROLS
from rlinf.dashboard.report import live_page
from rlinf.dashboard.state import run_state
from tests.metrics.html.test_report import answer, run_directory

ROLES = ("rollout", "judge", "trainer", "reference")


def rich_run(path: Path, steps: int = 40, hostile: str = "") -> Path:
    """A finished run with sentences, alarms, tokens, trials and their videos, and a bound."""
    run_directory(path, steps, hostile)
    rows = [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()]
    for row in rows:
        step = row["step"]
        row |= {
            "evaluation/episodes": 20, "evaluation/success_once": 0.2 + 0.5 * step / steps,
            "evaluation/reward/mean": 1.5, "evaluation/success_once/low": 0.1, "evaluation/success_once/high": 0.8,
        } if step in (0, steps) else {}  # fmt: skip
        row |= {
            "staleness/mean": 0.5 + math.sin(step) / 4, "staleness/max": 2.0, "bound/seconds": 0.3, "bound/area": 0.3,
            "bound/devices": 2.0, "lost/imbalance": 0.15, "lost/overhead": 0.05,
        } if step else {}  # fmt: skip
    (path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    told = "".join(json.dumps(told_by_token(step, hostile)) + "\n" for step in range(1, steps + 1))
    (path / "samples.jsonl").write_text(told + (path / "samples.jsonl").read_text())
    explained = [
        {
            "step": step, "cause": ("tail", "reward")[step % 4 == 0], "seconds": 0.1 + step / 1000, "saves": 0.05,
            "text": f"devices idled 0.1 s for the last 2 of 64{hostile}; set `staleness.max=1`, which would save 9 %",
            "change": "set `staleness.max=1`",
        }
        for step in range(1, steps + 1)
    ]  # fmt: skip
    (path / "explained.jsonl").write_text("".join(json.dumps(row) + "\n" for row in explained))
    alarm = {"step": 7, "text": f"step 7: engine and trainer disagree{hostile}", "do": "set `rollout.dtype`"}
    (path / "alarms.jsonl").write_text(json.dumps(alarm) + "\n")
    for name in ("step_000000/env0000-episode0000-failure", f"step_{steps:06d}/ood/env0001-episode0000-success"):
        video = path / "videos" / f"{name}.webp"
        video.parent.mkdir(parents=True, exist_ok=True)
        video.write_bytes(film())
    return path


def told_by_token(step: int, hostile: str = "") -> dict[str, Any]:
    """A row of samples.jsonl with tokens: some learned, some read, of three versions."""
    texts = ["Let", " me", " look", " it", " up", ".", f" [tool: 42{hostile}]", " So", " it", " is", " 42", "."]
    mask = [0 if "tool" in text else 1 for text in texts]
    logprobs = [-(n * 37 % 83) / 10 if learned else None for n, learned in enumerate(mask)]
    versions = [step - 2 + n // 5 if learned else -1 for n, learned in enumerate(mask)]
    tokens = {"texts": texts, "logprobs": logprobs, "mask": mask, "versions": versions, "cut": 3}
    asked = "How many?\n\nuser: and why?"
    more = {
        "advantage": 0.5,
        "versions": [step - 2, step],
        "tokens": tokens,
        "read": [[len("".join(texts[:6])), len("".join(texts[:7]))]],
        "outcome": "truncated",
        "group": 8,
        "scores": {"form": 1},
        "turns": [
            {
                "read": "",
                "said": "Let me look it up.",
                "tokens": [0, 6],
                "finish": "stop",
                "calls": [{"name": "search", "arguments": {"query": f"6 x 7{hostile}"}}, {"broken": "no valid JSON"}],
                "reward": 0.0,
            },
            {
                "read": f"[tool: 42{hostile}]",
                "said": "So it is 42.",
                "tokens": [1, 5],
                "finish": "length",
                "reward": 1.0,
            },
        ],
        "times": [[0.1, 1.25], [2.0, 0.5]],
    }
    return answer(step, asked, "".join(texts), 1.0, **more)


def film() -> bytes:
    """A short one, animated WebP."""
    pictures = [Image.new("RGB", (32, 32), (n * 60, 120, 200 - n * 40)) for n in range(4)]
    file = io.BytesIO()
    pictures[0].save(file, "webp", save_all=True, append_images=pictures[1:], duration=200)
    return file.getvalue()


class StandIn:
    """Says what a server of live runs says, when it is told to.

    Args:
        runs: directories, by id.
    """

    def __init__(self, runs: dict[str, Path]) -> None:
        self.runs = runs
        self.status = dict.fromkeys(runs, "running")
        self.asked: list[tuple[str, str, dict[str, str]]] = []
        """(run, what, headers) of every control."""
        self.connected = asyncio.Event()
        self._listening: list[asyncio.Queue[str | None]] = []

    def say(self, run: str | None, kind: str, **more: Any) -> None:
        """An event, to all pages."""
        for queue in self._listening:
            queue.put_nowait(json.dumps({"run": run, "kind": kind, **more}))

    def hang_up(self) -> None:
        """The streams of events break off."""
        for queue in self._listening:
            queue.put_nowait(None)

    def listed(self) -> list[dict[str, Any]]:
        """The runs, as GET /api/runs tells them."""
        return [
            {"id": run, "name": run, "directory": str(path), "status": self.status[run], "step": 1, "steps": 40}
            for run, path in self.runs.items()
        ]

    @asynccontextmanager
    async def serving(self) -> AsyncIterator[str]:
        """Its address."""
        app = web.Application()
        app.router.add_get("/", self._page)
        app.router.add_get("/api/runs", self._runs)
        app.router.add_get("/api/events", self._events)
        app.router.add_get("/api/runs/{run}/{what:state|answers|lanes}", self._read)
        app.router.add_get("/api/runs/{run}/video/{name:.+}", self._video)
        app.router.add_post("/api/runs/{run}/do", self._do)
        runner = web.AppRunner(app, shutdown_timeout=0.1)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        try:
            yield f"http://127.0.0.1:{runner.addresses[0][1]}/"
        finally:
            self.hang_up()
            await runner.cleanup()

    async def _page(self, request: web.Request) -> web.Response:
        html, policy = live_page()
        return web.Response(text=html, content_type="text/html", headers={"Content-Security-Policy": policy})

    async def _runs(self, request: web.Request) -> web.Response:
        return web.json_response(self.listed())

    async def _read(self, request: web.Request) -> web.Response:
        run, what = request.match_info["run"], request.match_info["what"]
        state = await asyncio.to_thread(run_state, self.runs[run], traced=what == "lanes")
        if what == "answers":
            return web.json_response([{**told_by_token(int(request.query["step"])), "prompt": "fetched"}])
        controls = [{"what": name, **asdict(control)} for name, control in CONTROLS.items()]
        more = {"status": self.status[run], "controls": controls}
        return web.json_response(state["lanes"] if what == "lanes" else state | more)

    async def _video(self, request: web.Request) -> web.FileResponse:
        path = self.runs[request.match_info["run"]] / "videos" / request.match_info["name"]
        return web.FileResponse(path, headers={"Content-Type": "image/webp"})

    async def _do(self, request: web.Request) -> web.Response:
        what = (await request.json())["what"]
        self.asked.append((request.match_info["run"], what, dict(request.headers)))
        return web.json_response({"ok": True, "said": f"{what}: after this step"})

    async def _events(self, request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        queue: asyncio.Queue[str | None] = asyncio.Queue()
        self._listening.append(queue)
        self.connected.set()
        try:
            while (event := await queue.get()) is not None:
                await response.write(f"data: {event}\n\n".encode())
        finally:
            self._listening.remove(queue)
        return response


def moment(time: float, roles: int = 4, *, hostile: str = "") -> dict[str, Any]:
    """What so many roles do, and what their queues and devices hold."""
    doing = ("generate", "score", "train", None)
    names = [(f"{ROLES[n % 4]}{hostile}[{n // 4}]", n // 4, doing[(n + int(time)) % 4]) for n in range(roles)]
    return {
        "time": time,
        "actors": [{"actor": name, "host": host, "doing": what, "since": 0.4} for name, host, what in names],
        "queues": [
            {
                "host": 0, "name": f"rollout.generate{hostile} → judge.score", "ready": int(time) % 5,
                "taken": 10, "put": 12, "capacity": 4, "waiting_to_take": ["judge[0]"],
                "waiting_to_put": [f"rollout[{n}]" for n in range(6)],
            },
            {"host": 0, "name": "judge.score → trainer.train", "ready": 3, "taken": 7, "put": 10, "capacity": None,
             "waiting_to_take": [], "waiting_to_put": []},
        ],
        "memory": [{"host": 0, "device": "cuda:0", "used": 60e9 + time * 1e8, "total": 80e9},
                   {"host": 1, "device": "cpu", "used": 3e9, "total": None}],
    }  # fmt: skip


def second(end: float, roles: int = 4, parts: int = 4) -> dict[str, Any]:
    """What so many roles did in the second before `end`."""
    activities = ("generation", "waiting", "scoring", "training", "sync", "loading")
    lanes = []
    for n in range(roles):
        edges = [end - 1 + part / parts for part in range(parts + 1)]
        stretches = [
            (activities[(n + part + int(end)) % len(activities)], start, stop)
            for part, (start, stop) in enumerate(itertools.pairwise(edges))
        ]
        lanes.append({"host": n // 4, "actor": f"{ROLES[n % 4]}[{n // 4}]", "stretches": stretches})
    return {"start": end - 1, "end": end, "lanes": lanes}


def places(roles: int = 4) -> dict[str, Any]:
    """Where the roles are."""
    hosts = list(range(max(1, roles // 4)))
    return {
        "mode": "disaggregated", "roles": [{"role": role, "hosts": hosts} for role in ROLES], "step": 12, "steps": 40,
        "machines": {str(host): f"node-{host // 8}" for host in hosts},
    }  # fmt: skip
