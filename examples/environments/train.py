"""A model learns where others keep score: `python train.py tiny|DIRECTORY STEPS SEED [environment …]`."""

import sys

from sizes import MODEL, MORE, REAL, TINY

import rlinf

ECHO = ".venv-environments/bin/uvicorn server.app:app --app-dir echo --host {host} --port {port} --ws-ping-timeout 600"
MARBLE = {"environment": "marble_v1", "size": 300, "columns": ["solution"]}
EASY = {"letter_counting": {"max_words": 5}, "leg_counting": {"min_animals": 1, "max_animals": 1}}
EASY |= {"chain_sum": {"max_terms": 2, "max_digits": 1}}
ENVIRONMENTS = {  # arguments, who plays first; warm-up steps and tokens of an answer, tiny and real
    "verifiers": (MARBLE, "players.layout", (240, 64), (12, 48)),
    "openenv": ({"server": {"command": ECHO.split(), "starting": 600}, "turns": 2}, None, (0, 8), (0, 8)),
    "reasoning_gym": ({"generators": EASY, "instructions": "Answer with a number alone."}, None, (150, 4), (12, 4)),
    "textarena": ({"games": "GuessTheNumber-v0", "turns": 4}, "players.bisect", (40, 8), (12, 8)),
}
(model, steps, seed), real = sys.argv[1:4], sys.argv[1] != "tiny"
for name in sys.argv[4:] or ENVIRONMENTS:
    args, player, *sizes = ENVIRONMENTS[name]
    own = {**(REAL if real else TINY), **MORE.get((name, real), {})}
    own |= {"agent": {"function": name, "args": args, "player": player}, "data.chat": True, "steps": int(steps)}
    own |= {"sft.steps": sizes[real][0], "max_new_tokens": sizes[real][1], "run_dir": f"outputs/{name}-{seed}"}
    rlinf.train(model if real else MODEL, seed=int(seed), **own)
