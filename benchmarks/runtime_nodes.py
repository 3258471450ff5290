"""`python -m benchmarks.runtime_nodes`: a call between two machines beside bare torch RPC, in turns.

The machines are network namespaces joined by a bridge of the kernel, without delay, so what is measured is software.
Needs root and `ip`. Both contestants use TensorPipe's sockets, the only transport that it has between machines.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
from pathlib import Path

from benchmarks.runtime import show
from tests.nodes.network import PORT, Network, Torchrun, why_not

ROWS = {
    "call_p50": ("awaited call, p50", "s"),
    "call_p99": ("awaited call, p99", "s"),
    "concurrent": ("256 calls", "/s"),
}


def turn(network: Network, contestant: str, directory: Path) -> dict[str, float]:
    """Measure one contestant in fresh processes, one on each machine."""
    jobs = []
    for node in network.nodes:
        if contestant == "rlinf":
            meet = [f"--node-rank={node.number}", f"--master-addr={network.nodes[0].address}", f"--master-port={PORT}"]
            words = ["-m", "torch.distributed.run", "--nnodes=2", "--nproc-per-node=1", *meet]
            words += ["-m", "benchmarks.runtime_rlinf", "--groups", "calls"]
            more = {}
        else:
            words = ["-m", "benchmarks.peers.bare_rpc", "--groups", "calls"]
            more = {"RANK": str(node.number), "MASTER_ADDR": network.nodes[0].address, "MASTER_PORT": str(PORT)}
            more |= {"BENCH_RPC_TRANSPORT": "uv", "TP_SOCKET_IFNAME": "eth0", "GLOO_SOCKET_IFNAME": "eth0"}
        jobs.append(Torchrun(node, [sys.executable, *words], directory / f"{contestant}-{node.number}.log", more))
    codes = [job.code() for job in jobs]
    if any(codes):
        sys.exit(f"{contestant} ended with {codes}:\n" + "\n".join(job.said[-3000:] for job in jobs))
    line = next(line for line in jobs[0].said.splitlines() if line.startswith('{"name"'))
    rows: dict[str, float] = json.loads(line)["rows"]
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3, help="turns of both (default: %(default)s)")
    options = parser.parse_args()
    if reason := why_not():
        sys.exit(f"not measured: {reason}")
    found: dict[str, list[dict[str, float]]] = {"rlinf": [], "bare rpc_async": []}
    with Network() as network, tempfile.TemporaryDirectory() as directory:
        for number in range(options.rounds):
            for contestant in sorted(found, reverse=bool(number % 2)):
                found[contestant].append(turn(network, contestant, Path(directory)))
    for row, (what, unit) in ROWS.items():
        ours, theirs = ([rows[row] for rows in found[name]] for name in ("rlinf", "bare rpc_async"))
        ratios = [a / b for a, b in zip(ours, theirs, strict=True)]
        print(f"{what}: rlinf {show(ours, unit)}, bare rpc_async {show(theirs, unit)}, ", end="")
        print(f"{statistics.median(ratios):.2f} x" + (" (bar <= 1.2 x)" if row == "call_p50" else ""))
    print(f"{options.rounds} rounds; load average {os.getloadavg()[0]:.1f} after")


if __name__ == "__main__":
    main()
