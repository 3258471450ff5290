"""Machines for tests: namespaces, each with an address, a host name and processes of its own, on one switch.

A host's name stands for 127.0.0.1 there, as on many clusters and laptops. The switch is a bridge of the kernel, at
1 Gbit/s if asked; or, to delay what passes, a process that copies frames (`wire.py`): not every kernel can (netem).
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import struct
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from tests.runtime.programs.jobs import until

ROOT = Path(__file__).parents[2]
SUBNET = "10.77.0"
PORT = 29500
"""Of the rendezvous; each network is a world of its own, so it is always free."""
WIRE = Path(__file__).with_name("wire.py")
MACHINE = Path(__file__).with_name("machine.py")


def ip(*words: object) -> str:
    """Run `ip`; its output."""
    done = subprocess.run(["ip", *map(str, words)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"ip {' '.join(map(str, words))}: {done.stderr}"
    return done.stdout


def why_not() -> str | None:
    """Why there can be no namespaces here."""
    if sys.platform != "linux" or shutil.which("ip") is None or shutil.which("unshare") is None:
        return "needs Linux with `ip` (iproute2) and `unshare`"
    if os.geteuid() != 0:
        return "needs root, to make network namespaces"
    name = f"rlinf-try-{os.getpid()}"
    tried = subprocess.run(["ip", "netns", "add", name], capture_output=True, text=True, check=False)
    if tried.returncode != 0:
        return f"network namespaces cannot be made here: {tried.stderr.strip()}"
    ip("netns", "del", name)
    return None


class Node:
    """One machine.

    Attributes:
        address: its IPv4 address, on its interface eth0.
        name: its host name.
    """

    def __init__(self, network: Network, number: int):
        self.number = number
        self.name = f"machine-{number}"
        self.address = f"{SUBNET}.{number + 1}"
        self.space = f"{network.prefix}-{number}"
        self._port = f"port{number}"
        self._switch = network.switch
        self._wired = network.wired
        etc = Path("/etc/netns") / self.space
        etc.mkdir(parents=True)
        others = [f"{SUBNET}.{other + 1} machine-{other}" for other in range(network.machines) if other != number]
        (etc / "hosts").write_text("\n".join(["127.0.0.1 localhost", f"127.0.0.1 {self.name}", *others, ""]))
        ip("netns", "add", self.space)
        ip("-n", self.space, "link", "set", "lo", "up")
        ip("-n", self.space, "link", "add", "eth0", "type", "veth", "peer", "name", self._port, "netns", self._switch)
        ip("-n", self.space, "address", "add", f"{self.address}/24", "dev", "eth0")
        ip("-n", self.space, "link", "set", "eth0", "up")
        ip("-n", self._switch, "link", "set", self._port, "up")
        if not self._wired:
            ip("-n", self._switch, "link", "set", self._port, "master", "bridge")

    def command(self, *words: object) -> list[str]:
        """The command line that runs something on this machine, where it sees none of the others' processes."""
        own = ["unshare", "--uts", "--pid", "--fork", "--kill-child", "--mount-proc"]
        return ["ip", "netns", "exec", self.space, *own, sys.executable, str(MACHINE), self.name, *map(str, words)]

    def slow_down(self) -> None:
        """Have its interface send 1 Gbit/s at most."""
        limit = ["rate", "1gbit", "burst", "256kb", "latency", "50ms"]
        done = subprocess.run(
            ["tc", "-n", self.space, "qdisc", "add", "dev", "eth0", "root", "tbf", *limit], check=False
        )
        if done.returncode != 0:
            pytest.skip("this kernel has no token bucket (tc … tbf)")

    def cut(self) -> None:
        """Lose every packet from and to it, as a broken switch does: its interface notices nothing."""
        ip("-n", self._switch, "link", "set", self._port, "nomaster")

    def heal(self) -> None:
        """Undo `cut`."""
        ip("-n", self._switch, "link", "set", self._port, "master", "bridge")

    def pids(self) -> list[int]:
        """The processes that run on it."""
        return [int(word) for word in ip("netns", "pids", self.space).split()]

    def ranks(self) -> list[int]:
        """The processes that torchrun has started on it."""
        command = {pid: Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0") for pid in self.pids()}
        return [pid for pid, words in command.items() if b"-u" in words[:2]]

    def kill(self) -> None:
        """End everything on it at once."""
        for pid in self.pids():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def ports(self) -> list[str]:
        """All addresses and ports on which TCP is listened on here, as `address:port`."""
        found = subprocess.run(self.command("cat", "/proc/self/net/tcp", "/proc/self/net/tcp6"), capture_output=True)
        places = []
        for line in found.stdout.decode().splitlines():
            words = line.split()
            if words[3] == "0A":
                where, port = words[1].split(":")
                here = socket.inet_ntoa(struct.pack("=I", int(where, 16))) if len(where) == 8 else "0.0.0.0"
                places.append(f"{self.address if here == '0.0.0.0' else here}:{int(port, 16)}")
        return places

    def sent(self) -> int:
        """Bytes that left its interface."""
        found = subprocess.run(self.command("cat", "/sys/class/net/eth0/statistics/tx_bytes"), capture_output=True)
        return int(found.stdout)

    def close(self) -> None:
        self.kill()
        until(lambda: not self.pids(), lambda: f"the end of {self.pids()} on {self.name}")
        ip("netns", "del", self.space)
        shutil.rmtree(Path("/etc/netns") / self.space)


class Network:
    """Some machines on a switch.

    Args:
        machines: how many.
        delay: seconds that a frame takes from one machine to the other; only for two.
    """

    def __init__(self, machines: int = 2, *, delay: float = 0.0):
        self.prefix = f"rlinf-{os.getpid()}"
        self.nodes: list[Node] = []
        self._wire: subprocess.Popen[str] | None = None
        self.switch = f"{self.prefix}-switch"
        self.wired = delay > 0
        self._delay = delay
        self.machines = machines

    def __enter__(self) -> Network:
        try:
            self._open()
        except BaseException:
            self.__exit__()
            raise
        return self

    def _open(self) -> None:
        ip("netns", "add", self.switch)
        if not self.wired:
            ip("-n", self.switch, "link", "add", "bridge", "type", "bridge")
            ip("-n", self.switch, "link", "set", "bridge", "up")
        for number in range(self.machines):
            self.nodes.append(Node(self, number))
        if self.wired:
            for node in self.nodes:  # what a process copies must be complete, not left to a network card to complete
                subprocess.run(node.command(sys.executable, WIRE, "eth0"), check=True)
            inside = ["ip", "netns", "exec", self.switch, sys.executable, str(WIRE)]
            self._wire = subprocess.Popen(
                [*inside, str(self._delay), "port0", "port1"], stdout=subprocess.PIPE, text=True
            )
            assert self._wire.stdout is not None
            assert self._wire.stdout.readline() == "ready\n"

    def __exit__(self, *_: object) -> None:
        if self._wire is not None:
            self._wire.kill()
            self._wire.communicate()
        for node in self.nodes:
            node.close()
        ip("netns", "del", self.switch)


class Torchrun:
    """torchrun on one machine, in a job over several.

    Args:
        node: the machine.
        command: its command line.
        log: where all goes that it and its processes write.
        more: for their environment.
    """

    def __init__(self, node: Node, command: list[str], log: Path, more: Mapping[str, str]):
        self.node = node
        self._log = log
        with log.open("w") as file:
            environment = {
                **os.environ,
                "OMP_NUM_THREADS": "1",
                "PYTHONPATH": str(ROOT),
                "PYTHONUNBUFFERED": "1",
                **more,
            }
            self._process = subprocess.Popen(
                node.command(*command), cwd=ROOT, env=environment, stdout=file, stderr=subprocess.STDOUT
            )

    @property
    def said(self) -> str:
        return self._log.read_text()

    def running(self) -> bool:
        return self._process.poll() is None

    def code(self, seconds: float = 150.0) -> int:
        """Wait for its end."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            return self._process.wait(seconds)
        raise AssertionError(f"{self.node.name} goes on after {seconds:.0f} s:\n{self.said[-4000:]}")
