"""A session on the processes of a job: the trainer on both, rollout and judge on the first. `connected.py DIRECTORY`"""

import sys
from pathlib import Path

import rlinf
from tests.runs.library.small import MODEL, TOKENIZER, playing

DIRECTORY = Path(sys.argv[1])


async def main(system):
    placement = {"rollout": "0-1", "judge": 0, "trainer": "0-1"}
    async with rlinf.Session.connect(
        system, model=MODEL, tokenizer=TOKENIZER, placement=placement, run_dir=DIRECTORY / "run", lr=1e-2
    ) as s:
        groups = await s.gather_groups(range(4), playing(s), n=4)
        spread = len(s.rollout), len(s.trainer)
        metrics = await s.train(groups)
        print("told", spread, metrics["episodes"], metrics["staleness/max"], (await s.complete("1")).versions[0])


rlinf.run(main)
