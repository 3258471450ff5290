"""Kills a training service at random moments under a scripted client, and starts it again on the same directory.

    python -m tests.drills.service --kills 100 --seed 1

In: a script of requests to two models, from a seed. Out: every result, and the models at the end, which must be those
of a service that nobody killed. The client is simple: it sends requests by their numbers without waiting for results,
sends what was not answered again, and fetches every result. A kill is a SIGKILL of the real process, or, where that
takes too long, a copy of what lies on the disk at some moment, which is all that a SIGKILL leaves.
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import json
import multiprocessing
import os
import random
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path

import aiohttp
from safetensors.numpy import load_file

from rlinf.runs.rules import load_config
from rlinf.service.serve import serving, steady_products
from tests.launching import ROOT, environment
from tests.service.serving import KEY, TINY, read_sample, request

REPLAY = "serve.replay_seconds=0.05"
"""States are saved often enough for a drill to meet one."""
RANKS = (2, 0)
"""Of the two models: one is adapters, one all weights."""
PROTOBUF = {"Content-Type": "application/x-protobuf"}
PATIENCE = 1800.0
"""Seconds for what takes one or two; a start as `rlinf serve` took 300 where 25 others wanted the same two cores."""


@dataclass(frozen=True, slots=True)
class Ask:
    """A request of the script to a model."""

    path: str
    number: int
    more: dict


def script(seed: int, steps: int = 6) -> list[list[Ask]]:
    """Requests of two models, in the order of their numbers; samplers of both have ids of their own."""
    rng = random.Random(seed)
    return [[*_steps(rng, steps, model)] for model in range(2)]


def _steps(rng: random.Random, steps: int, model: int):
    number = 0

    def ask(path: str, /, **more) -> Ask:
        nonlocal number
        number += 1
        return Ask(path, number, more)

    for step in range(steps):
        for _ in range(rng.randint(1, 2)):
            tokens = [rng.randrange(3, 14) for _ in range(6)]
            weights = [1.0] * 4 + [float("nan") if rng.random() < 0.1 else 1.0]  # half a batch is no step
            yield ask("forward_backward", tokens=tokens[:-1], targets=tokens[1:], weights=weights)
        yield ask("optim_step", adam_params={"learning_rate": 0.02})
        kind = rng.random()
        if kind < 0.3:
            yield ask("save_weights", path=f"s{step}")
        elif kind < 0.5:
            yield ask("save_weights", path="again", overwrite=True)
        elif kind < 0.8:
            yield ask("save_weights_for_sampler", sampling_session_seq_id=2 * step + model)  # one of each model
        elif kind < 0.9:
            yield ask("load_weights", path="again", optimizer=True)
    yield ask("save_weights", path="end")


@dataclass(slots=True)
class Progress:
    """What a client has from its service, which must never be taken back."""

    asks: list[list[Ask]]
    session: str | None = None
    models: list[str] = field(default_factory=list)
    promises: dict[tuple[int, int], str | None] = field(default_factory=dict)
    """By model and number; None: refused."""
    results: dict[tuple[int, int], object] = field(default_factory=dict)
    events: int = 0
    """Answers that it has read."""


class Client:
    """Goes on with a script.

    Args:
        progress: where it is.
        url: of the service.
    """

    def __init__(self, progress: Progress, url: str) -> None:
        self._at, self._url = progress, url

    async def run(self) -> None:
        """Until the script is over, or the connection breaks (`aiohttp.ClientError`)."""
        timeout = aiohttp.ClientTimeout(total=PATIENCE)
        async with aiohttp.ClientSession(headers={"X-API-Key": KEY}, timeout=timeout) as self._http:
            at = self._at
            if at.session is None:
                at.session = (await self._ask("create_session", {}, 200))["session_id"]
            while len(at.models) < len(at.asks):
                lora = {"rank": RANKS[len(at.models)], "seed": len(at.models)}
                body = {"session_id": at.session, "model_seq_id": len(at.models), "base_model": "tiny"}
                promise = await self._ask("create_model", {**body, "lora_config": lora}, 200)
                at.models.append((await self._result(promise["request_id"]))["model_id"])
            async with asyncio.TaskGroup() as group:
                for model in range(len(at.models)):
                    group.create_task(self._send(model))
                    group.create_task(self._fetch(model))

    async def _ask(self, path: str, body, *statuses: int):
        headers = PROTOBUF if isinstance(body, bytes) else {}
        how = {"data": body} if isinstance(body, bytes) else {"json": body}
        async with self._http.post(f"{self._url}/api/v1/{path}", headers=headers, **how) as response:
            answer = (
                await response.read() if response.content_type == PROTOBUF["Content-Type"] else await response.json()
            )
            assert response.status in statuses, (path, body, response.status, answer)
            self._at.events += 1
            return answer if response.status == 200 else {"refused": answer["error"]}

    async def _result(self, promise: str):
        return await self._ask("retrieve_future", {"request_id": promise}, 200)

    async def _send(self, model: int) -> None:
        at = self._at
        for ask in at.asks[model]:
            key = model, ask.number
            if key in at.promises:
                continue
            body: object = {"model_id": at.models[model], "seq_id": ask.number, **ask.more}
            if ask.path == "forward_backward":
                body = request(at.models[model], ask.number, **ask.more)
            if ask.path == "load_weights":
                body = {**body, "path": f"tinker://{at.models[model]}/weights/{ask.more['path']}"}
            answer = await self._ask(ask.path, body, 200, 400, 404)
            at.promises[key] = answer.get("request_id")
            if "refused" in answer:
                at.results[key] = answer

    async def _fetch(self, model: int) -> None:
        at = self._at
        for ask in at.asks[model]:
            key = model, ask.number
            while key not in at.promises:
                await asyncio.sleep(0.002)
            if key not in at.results:
                at.results[key] = await self._result(at.promises[key])
            if ask.path == "save_weights_for_sampler" and (model, -ask.number) not in at.results:
                prompt = {"chunks": [{"type": "encoded_text", "tokens": [3, 4]}]}
                body = {"sampling_session_id": at.results[key]["sampling_session_id"], "seq_id": 0, "prompt": prompt}
                body["sampling_params"] = {"max_tokens": 4, "seed": 5, "stop": []}
                promise = await self._ask("asample", body, 200)
                at.results[model, -ask.number] = await self._result(promise["request_id"])


def normal(progress: Progress) -> dict[tuple[int, int], object]:
    """Results without what is another one's in each run: sessions' ids, and roundings of what is decoded together."""
    found = {}
    for (model, number), result in progress.results.items():
        if number < 0:
            result = read_sample(result)[0]
        elif isinstance(result, dict):
            result = json.loads(json.dumps(result).replace(progress.session, "S"))
        found[model, number] = result
    return found


def weights(directory: Path) -> dict[str, str]:
    """Sums of the tensors of the last checkpoints, adapters' and optimizers'."""
    files = sorted((directory / "tiny-service/checkpoints").glob("*/weights/end/*.safetensors"))
    found = {}
    for path in files:
        digest = hashlib.sha256()
        for name, tensor in sorted(load_file(path).items()):
            digest.update(f"{name} {tensor.shape} {tensor.dtype}".encode() + tensor.tobytes())
        found[f"{path.parts[-4].partition('-')[2]}/{path.name}"] = digest.hexdigest()
    return found


def arguments(directory: Path, port: int = 0) -> list[str]:
    """Overrides of a service there."""
    return [*TINY, f"output_dir={directory}", REPLAY, "serve.max_whole=1", f"serve.port={port}"]


# Kills --------------------------------------------------------------------------------------------------------------


async def imitated(progress: Progress, directory: Path, rng: random.Random, kills: int) -> Path:
    """Run a script over services that end at random moments, in this process; the last one's directory."""
    for kill in range(kills + 1):
        async with AsyncExitStack() as stack:
            config = load_config("configs/serve/tiny.yaml", arguments(directory), 1)
            url, *_ = await stack.enter_async_context(serving(config, lambda line: None))
            running = asyncio.create_task(Client(progress, url).run())
            stack.push_async_callback(_given_up, running)
            if kill == kills:
                await running
                return directory
            target = progress.events + rng.randint(1, 2 * sum(map(len, progress.asks)) // (kills + 1))
            while progress.events < target and not running.done():
                await asyncio.sleep(0)
            for _ in range(rng.randrange(50)):
                await asyncio.sleep(0)
            if running.done():
                running.result()
            copy = directory.with_name(f"{directory.name}.{kill}")
            _copied(directory / "tiny-service", copy / "tiny-service")
            directory = copy
    raise AssertionError


def _copied(source: Path, target: Path) -> None:
    """Copy a service's files as they are at one moment: while its loop stands still, its threads may still write."""

    def present() -> list[tuple[str, int, int]]:
        every = ((str(path), path.lstat()) for path in sorted(source.rglob("*")))
        return [(name, about.st_size, about.st_mtime_ns) for name, about in every]

    while True:
        shutil.rmtree(target, ignore_errors=True)
        with suppress(FileNotFoundError, shutil.Error):  # of what was renamed meanwhile
            before = present()
            shutil.copytree(source, target, ignore_dangling_symlinks=True)
            if present() == before:
                return


async def _given_up(task: asyncio.Task[None]) -> None:
    task.cancel()
    await asyncio.wait([task])


def _child(overrides: list[str]) -> None:
    with open(os.devnull, "w") as nowhere:
        os.dup2(nowhere.fileno(), 1)

    async def served() -> None:
        async with serving(load_config("configs/serve/tiny.yaml", overrides, 1), lambda line: None):
            await asyncio.Event().wait()

    asyncio.run(served())


class Process:
    """A service in a process of its own.

    Args:
        directory: where its results go.
        port: that it listens on.
        command: it is `rlinf serve`, and not a fork of a process that has imported everything.
    """

    def __init__(self, directory: Path, port: int, *, command: bool) -> None:
        overrides = arguments(directory, port)
        if command:
            line = [sys.executable, "-m", "rlinf", "serve", "--config", "configs/serve/tiny.yaml", *overrides]
            self._process = subprocess.Popen(line, cwd=ROOT, env=environment(), stdout=subprocess.DEVNULL)
        else:
            context = multiprocessing.get_context("forkserver")
            context.set_forkserver_preload(["tests.drills.service"])
            self._process = context.Process(target=_child, args=(overrides,), daemon=True)
            self._process.start()

    def alive(self) -> bool:
        process = self._process
        return process.poll() is None if isinstance(process, subprocess.Popen) else process.is_alive()

    def kill(self) -> None:
        """By SIGKILL."""
        self._process.kill()
        self._process.wait() if isinstance(self._process, subprocess.Popen) else self._process.join()


async def killed(progress: Progress, directory: Path, rng: random.Random, kills: int, command: float = 0.0) -> None:
    """Run a script over real processes that are killed at random moments.

    Args:
        progress: of its client.
        directory: of all of them.
        rng: of moments.
        kills: so many.
        command: share of them that are begun as `rlinf serve`.
    """
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    url = f"http://127.0.0.1:{port}"
    for kill in range(kills + 1):
        process = Process(directory, port, command=rng.random() < command)
        try:
            if kill < kills and rng.random() < 0.1:  # while it starts
                await asyncio.sleep(rng.uniform(0.0, 2.0))
                continue
            await _listens(url, process)
            running = asyncio.create_task(Client(progress, url).run())
            target = progress.events + rng.randint(1, 2 * sum(map(len, progress.asks)) // (kills + 1))
            while not running.done() and (kill == kills or progress.events < target):
                await asyncio.sleep(0.0005)
            if not running.done():
                await asyncio.sleep(rng.uniform(0.0, 0.02))
                process.kill()
                await asyncio.wait([running])
            if (error := running.exception()) is not None and not _broken(error):
                raise error
        finally:
            process.kill()


def _broken(error: BaseException) -> bool:
    """A connection broke, and nothing else."""
    parts = error.exceptions if isinstance(error, BaseExceptionGroup) else [error]
    return all(isinstance(each, aiohttp.ClientError | ConnectionError) or _group(each) for each in parts)


def _group(error: BaseException) -> bool:
    return isinstance(error, BaseExceptionGroup) and _broken(error)


async def _listens(url: str, process: Process) -> None:
    began = time.monotonic()
    async with aiohttp.ClientSession() as http:
        while time.monotonic() - began < PATIENCE and process.alive():
            try:
                async with http.get(f"{url}/api/v1/healthz"):
                    return
            except aiohttp.ClientError:
                await asyncio.sleep(0.05)
    lives = "lives" if process.alive() else "is dead"
    raise AssertionError(f"the service did not start in {time.monotonic() - began:.0f} s; its process {lives}")


async def reference(seed: int, directory: Path) -> tuple[dict, dict]:
    """Results and weights of a script that nobody disturbs."""
    progress = Progress(script(seed))
    await imitated(progress, directory, random.Random(seed), 0)
    return normal(progress), weights(directory)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--each", type=int, default=10, help="kills of a script")
    parser.add_argument(
        "--imitated", type=float, default=0.0, help="share of scripts whose kills are copies of the disk"
    )
    parser.add_argument("--command", type=float, default=0.1, help="share of services begun as `rlinf serve`")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    steady_products()  # as `rlinf serve` has them, which some services are begun as
    bad = 0
    for first in range(0, options.kills, options.each):
        seed, kills = options.seed + first, min(options.each, options.kills - first)
        with tempfile.TemporaryDirectory() as name:
            wanted = asyncio.run(reference(seed, Path(name) / "reference"))
            progress, directory = Progress(script(seed)), Path(name) / "killed"
            rng = random.Random(seed)
            real = first >= options.imitated * options.kills
            if real:
                asyncio.run(killed(progress, directory, rng, kills, options.command))
            else:
                directory = asyncio.run(imitated(progress, directory, rng, kills))
            found = normal(progress), weights(directory)
        wrong = [key for key in wanted[0] if found[0].get(key) != wanted[0][key]]
        bad += bool(wrong) or found[1] != wanted[1]
        print(
            f"seed {seed}: {kills} {'kills' if real else 'copies'}, {len(wanted[0])} results, "
            f"{len(wrong)} of them others {wrong}; "
            f"weights {'equal' if found[1] == wanted[1] else 'OTHERS'}",
            flush=True,
        )
    sys.exit(bad > 0)


if __name__ == "__main__":
    main()
