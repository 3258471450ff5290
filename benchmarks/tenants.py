"""Several models on one base: what learning together costs beside learning one after the other, and their memory.

    python -m benchmarks.tenants                          # a tiny model
    python -m benchmarks.tenants --model DIRECTORY --tokens 8 32 --repeat 3
    python -m benchmarks.tenants --memory --model DIRECTORY --tenants 64 --tokens 8 --open 8
    python -m benchmarks.tenants --operators --model DIRECTORY --tokens 16

Every tenant has adapters of rank 8 on all linear layers and a datum of so many tokens; both ways compute the same data,
in turn, in one process. Before anything is timed, log-probs and the adapters after a step are compared bit for bit.
`--dtype bfloat16` takes a base in bfloat16, `--unembed` adapters of the output embedding, too; `--operators` prints by
operator, for both ways, where the processor's time goes.

Products are as a service has them; with `MKL_CBWR=AUTO` before the command they are as elsewhere.

`--memory` has one tenant after the other learn, and measures the process after each has taken a step: beside the bytes
of its adapters and of what Adam keeps of them, and beside the process with one. Of more than `--open` tenants, those
that learned first wait on the disk, as a service has them wait (`serve.max_open`).
"""

from __future__ import annotations

import argparse
import asyncio
import ctypes
import gc
import itertools
import statistics
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import psutil
import torch
from safetensors.torch import load_file
from torch import Tensor

from rlinf.actors.trainer import Trainer
from rlinf.algos.token_losses import TokenLoss
from rlinf.data.sample import Datum
from rlinf.runtime.system.system import ActorSystem
from rlinf.service.serve import steady_products
from rlinf.training.optimizer import Adam
from rlinf.training.schedule import TokenPass

TINY: dict[str, object] = {
    "model_type": "qwen2", "hidden_size": 64, "intermediate_size": 192, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2,
}  # fmt: skip
LORA = {"r": 8, "alpha": 32, "target_modules": "all-linear"}
LOSS = TokenLoss.of("cross_entropy")
CHARACTERS = {"characters": "0123456789+=?><"}


def datum(seed: int, tokens: int) -> Datum:
    ids = np.random.default_rng(seed).integers(2, 16, tokens + 1)
    return Datum(ids[:-1], ids[1:].copy(), {"weights": np.ones(tokens, np.float32)})


class Case(NamedTuple):
    """The model and its tenants."""

    model: str | dict[str, object]
    tenants: int
    lora: dict[str, object]
    dtype: str

    async def trainer(self, system: ActorSystem) -> Any:
        tokenizer = self.model if isinstance(self.model, str) else CHARACTERS
        own = {**LORA, "r": 1}
        return await system.spawn(Trainer, model=self.model, tokenizer=tokenizer, lora=own, dtype=self.dtype)


async def both(
    case: Case, lengths: Sequence[int], repeat: int, *, operators: bool = False
) -> AsyncIterator[tuple[int, bool, list[tuple[float, ...]]]]:
    """Yield, for each number of tokens, if both ways come to the same bits, and each turn's seconds by the wall and of
    the processor, first one after the other, then together."""
    tenants, data = case.tenants, list[list[Datum]]()
    async with ActorSystem.local() as system:
        trainer = await case.trainer(system)
        for number, way in itertools.product(range(tenants), ("apart", "together")):
            await trainer.open_model(f"{way}{number}", case.lora, number)

        async def apart() -> list[list[np.ndarray]]:
            return [await trainer.forward_backward(mine, LOSS, f"apart{n}") for n, mine in enumerate(data)]

        async def together() -> list[list[np.ndarray]]:
            passes = [TokenPass(mine, LOSS, f"together{n}") for n, mine in enumerate(data)]
            return await trainer.token_passes(passes)

        async def learned(way: str, directory: Path) -> list[Tensor]:
            tensors: list[Tensor] = []
            for number in range(tenants):
                await trainer.optim_step(Adam(1e-3), f"{way}{number}")
                await trainer.save_model(f"{way}{number}", str(directory / f"{way}{number}"), False)
                tensors += load_file(directory / f"{way}{number}" / "adapter_model.safetensors").values()
            return tensors

        for tokens in lengths:
            data[:] = [[datum(number, tokens)] for number in range(tenants)]
            pairs = zip(await apart(), await together(), strict=True)
            equal = all((one[0] == other[0]).all() for one, other in pairs)
            with tempfile.TemporaryDirectory() as name:
                weights = [await learned(way, Path(name)) for way in ("apart", "together")]
            equal &= all(torch.equal(one, other) for one, other in zip(*weights, strict=True))
            if operators:
                await print_operators(apart)
                await print_operators(together)
            yield tokens, bool(equal), [(*await timed(apart), *await timed(together)) for _ in range(repeat)]


async def print_operators(way: Callable[[], Awaitable[object]]) -> None:
    """Print where the time of the processor goes."""
    every = torch._C._profiler._ExperimentalConfig(profile_all_threads=True)  # models compute in one of their own
    cpu = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=cpu, experimental_config=every) as profile:
        await way()
    print(f"  {way.__name__}")
    print(profile.key_averages().table(sort_by="self_cpu_time_total", row_limit=14, max_name_column_width=40))


def resident() -> int:
    """Bytes of this process, without what its allocator would give back if it was asked."""
    gc.collect()
    if sys.platform == "linux":
        ctypes.CDLL(None).malloc_trim(0)
    return psutil.Process().memory_info().rss


def saved(directory: Path) -> int:
    """Bytes of all tensors in a directory."""
    return sum(file.stat().st_size for file in directory.glob("*.safetensors"))


async def memory(case: Case, tokens: int, most: int) -> None:
    """Print the process's memory with one tenant, and with more."""
    tenants = case.tenants
    async with ActorSystem.local() as system:
        trainer = await case.trainer(system)
        before = resident()
        with tempfile.TemporaryDirectory() as name:
            for number in range(tenants):
                if number >= most:
                    await trainer.save_model(f"t{number - most}", f"{name}/{number - most}")
                    await trainer.close_model(f"t{number - most}")
                await trainer.open_model(f"t{number}", case.lora, number)
                await trainer.forward_backward([datum(number, tokens)], LOSS, f"t{number}")
                await trainer.optim_step(Adam(1e-3), f"t{number}")
                if number == 0:
                    first = resident()
                    await trainer.save_model("t0", f"{name}/0")
                    own = saved(Path(name, "0"))
                    print(f"  without a tenant {before / 1e6:.0f} MB; adapters and optimizer of one {own / 1e6:.2f} MB")
                if (number + 1) & number == 0 or number + 1 == tenants:
                    now = resident()
                    print(f"  {number + 1:3} tenants: {now / 1e6:.0f} MB, x {now / first:.2f} of one", end="")
                    if more := min(number, most - 1):
                        each = (now - first) / more
                        print(
                            f"; each of {more} further ones in memory {each / 1e6:.2f} MB, x {each / own:.2f}", end=""
                        )
                    print(flush=True)


async def timed(way: Callable[[], Awaitable[object]]) -> tuple[float, float]:
    """Seconds of the wall and of the processor."""
    wall, processor = time.perf_counter(), time.process_time()
    await way()
    return time.perf_counter() - wall, time.process_time() - processor


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="directory of a saved model; default: a tiny new one")
    parser.add_argument("--tenants", type=int, default=16)
    parser.add_argument("--tokens", type=int, nargs="+", default=[8, 32, 128], help="of each tenant")
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--memory", action="store_true", help="measure the memory of tenants instead")
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"], help="trainer.dtype")
    parser.add_argument("--unembed", action="store_true", help="adapters of the output embedding, too")
    parser.add_argument("--operators", action="store_true", help="where the time goes")
    parser.add_argument("--open", type=int, default=64, help="tenants in memory")
    args = parser.parse_args()
    steady_products()  # as a service has them
    print(f"{args.model or 'tiny'}, {args.tenants} tenants of rank {LORA['r']}, {torch.get_num_threads()} threads")
    layers = ["all-linear", "unembed"] if args.unembed else ["all-linear"]
    case = Case(args.model or TINY, args.tenants, {**LORA, "target_modules": layers}, args.dtype)
    if args.memory:
        await memory(case, args.tokens[0], args.open)
        return
    async for tokens, equal, times in both(case, args.tokens, args.repeat, operators=args.operators):
        wall = [apart / together for apart, _, together, _ in times]
        cpu = [apart / together for _, apart, _, together in times]
        count = args.tenants * tokens
        fastest = [min(column) for column in zip(*times, strict=True)]
        print(
            f"  {tokens:4} tokens each: {count / fastest[0]:7.0f} tokens/s apart, {count / fastest[2]:7.0f} together; "
            f"in turn x {statistics.median(wall):.2f} ({min(wall):.2f} to {max(wall):.2f}) of the wall, "
            f"x {statistics.median(cpu):.2f} of the processor; {'equal' if equal else 'NOT EQUAL'} bit for bit",
            flush=True,
        )


if __name__ == "__main__":
    asyncio.run(main())
