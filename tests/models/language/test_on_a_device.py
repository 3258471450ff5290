"""A micro-batch on an accelerator: nothing of it is read back, and what it needs is sent in few copies."""

import json
from pathlib import Path

import pytest

from tests.actors import toys

pytestmark = [pytest.mark.torchrun]  # it starts a process, in which torch has one device more
PROGRAM = Path(__file__).parent / "programs" / "on_a_device.py"


def test_no_micro_batch_of_any_algorithm_waits_for_its_device_or_mixes_devices(zygote):
    ranks = zygote.run(PROGRAM, 0)
    assert ranks.codes(110) == [0], ranks.everything()[-4000:]
    found = [json.loads(line) for line in ranks.printed(0).splitlines()]
    halves = {f"{name} in torch.bfloat16" for name in (*toys.ALGORITHMS, "values")}
    assert {case for case, *_ in found} == halves | {f"{name} in torch.float32" for name in ("rloo", "values")}
    for case, reads, sends, added in found:
        assert reads == 0, case
        # the batch, its layout, and rectangles where no kernel is
        assert sends <= (2 if "bfloat16" in case else 3), case
        # of a layer, twelve of which add its gradients to those of the micro-batch before
        assert added is None or added <= (150 if "bfloat16" in case else 240), case
