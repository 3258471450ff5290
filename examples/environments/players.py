"""Programs that play in a model's place, so that it begins by imitating them: `agent.player` of `train.py`."""

import json


def bisect(task, messages):
    """Guess the middle of what the hints of textarena's GuessTheNumber leave of 1 to 20."""
    left = list(range(1, 21))
    for guess, hint in zip(messages[1::2], messages[2::2], strict=True):
        at = left.index(int(guess["content"].strip("[]")))
        left = left[at + 1 :] if "higher" in hint["content"] else left[:at]
    return f"[{left[len(left) // 2]}]"


def layout(task, messages):
    """Place the pieces as the generator of marble_v1 does, which knows a layout that scores."""
    pieces = [{**piece, "x": round(piece["x"]), "y": round(piece["y"])} for piece in task.row["solution"]]
    return json.dumps(pieces, separators=(",", ":"))
