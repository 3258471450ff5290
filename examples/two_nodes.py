"""Two nodes: a torchrun agent on each, and one program over both, in which a value goes from one node to the other.

    python examples/two_nodes.py            # half a minute on a CPU

With root the nodes are network namespaces, each with an address and a host name; else two agents share this machine.
You will see which node each process is on, and how fast tensors came from the other one.
"""

import os
import shutil
import socket
import subprocess
import sys
import time

import torch

import rlinf

SPACES = [f"rlinf-{os.getpid()}-{node}" for node in range(2)]


class Holder(rlinf.Actor):
    @rlinf.endpoint
    async def where(self) -> str:
        return f"rank {self.rank} runs on {socket.gethostname()}, in process {os.getpid()}"

    @rlinf.endpoint
    async def make(self, count: int) -> torch.Tensor:
        return torch.arange(count, dtype=torch.float32)

    @rlinf.endpoint
    async def last(self, tensor: torch.Tensor) -> float:
        return float(tensor[-1])


async def main(system: rlinf.ActorSystem):
    group = await system.spawn(Holder, hosts=[0, 1], name="holder")
    print("\n".join(await group.where()))
    for count in (1_000, 1_000_000, 8_000_000):
        start = time.perf_counter()
        last = await group[1].last(group[0].make(count))  # not awaited: it goes from node to node, and not through here
        took = time.perf_counter() - start
        print(f"{4 * count / 1e6:6.3f} MB, whose last number is {last:9,.0f}, were there after {1e3 * took:5.1f} ms")


def ip(*words):
    return shutil.which("ip") and subprocess.run(["ip", *words], stderr=subprocess.DEVNULL, check=False).returncode == 0


def linked():
    """Make two network namespaces with a cable between them; False where that may not be."""
    if not all(ip("netns", "add", space) for space in SPACES):
        return False
    made = ip("-n", SPACES[0], "link", "add", "eth0", "type", "veth", "peer", "name", "eth0", "netns", SPACES[1])
    for node, space in enumerate(SPACES):
        made &= ip("-n", space, "address", "add", f"10.79.0.{node + 1}/24", "dev", "eth0")
        made &= all(ip("-n", space, "link", "set", link, "up") for link in ("lo", "eth0"))
    return made


def start(apart):
    """An agent on each node, as processes."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        at = ["--master-port", str(free.getsockname()[1]), "--master-addr", "10.79.0.1" if apart else "127.0.0.1"]
    for node, space in enumerate(SPACES):
        agent = ["-m", "torch.distributed.run", *at, "--nnodes", "2", "--node-rank", str(node), __file__]
        named = [*f"ip netns exec {space} unshare --uts sh -c".split(), 'hostname "$0" && exec "$@"', f"node-{node}"]
        yield subprocess.Popen([*named * apart, sys.executable, *agent])


if __name__ == "__main__":
    if "RANK" in os.environ:
        sys.exit(rlinf.run(main))
    apart = linked()
    print("two network namespaces" if apart else "two agents on one machine", flush=True)
    codes = [agent.wait() for agent in [*start(apart)]]
    for space in SPACES:
        ip("netns", "delete", space)
    sys.exit(any(codes))
