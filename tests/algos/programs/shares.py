"""One of several ranks with shares of different size: `python -m tests.algos.programs.shares STORE`.

Every rank adds up the gradients of its own micro-batches; the sums are all-reduced and divided once. That must be what
one process with the whole batch gets. Prints "equal" at the end.
"""

import os
import sys

import torch
import torch.distributed as dist

from rlinf.algos.advantages import reinforce_pp, whiten
from tests.algos.cases import AGGREGATIONS, CASES, batch, packed, part, tensors

SHARES = ((), (3, 0), (5, 1, 6, 2, 4))


def reduce(x):
    dist.all_reduce(x)
    return x


def gradients(rank):
    """Of every loss under every aggregation, by shares and as one."""
    for case in CASES:
        for aggregation in AGGREGATIONS:
            b = tensors(batch(3, rows=7))
            whole = case.loss(b, **aggregation).mean()
            (expected,) = torch.autograd.grad(whole, b["new"])
            own = case.loss(part(b, SHARES[rank]), **aggregation)
            if rank == 2:  # one micro-batch per row, packed
                pieces = [packed(b, [row]) for row in SHARES[rank]]
                own = sum(case.loss(flat, **aggregation, sequences=ids) for flat, ids in pieces)
            gradient, weight = torch.autograd.grad(own.total, b["new"])[0], own.weight.clone()
            torch.testing.assert_close(reduce(gradient) / reduce(weight), expected, msg=f"{case} {aggregation}")


def statistics(rank):
    """Whitening and REINFORCE++ over all shares."""
    b = tensors(batch(4, rows=7))
    share = list(SHARES[rank])
    expected = whiten(b["old"], b["mask"])
    torch.testing.assert_close(whiten(b["old"][share], b["mask"][share], reduce=reduce), expected[share])
    arguments = b["advantages"], b["mask"]
    expected = reinforce_pp(*arguments, kl=b["old"], kl_beta=0.1)
    found = reinforce_pp(*(x[share] for x in arguments), kl=b["old"][share], kl_beta=0.1, reduce=reduce)
    torch.testing.assert_close(found, expected[share])


if __name__ == "__main__":
    rank, world, store = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), sys.argv[1]
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world)
    gradients(rank)
    statistics(rank)
    dist.destroy_process_group()
    print("equal")
