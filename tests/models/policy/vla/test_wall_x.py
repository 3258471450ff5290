"""Pictures and prompts of WALL-OSS. That it computes what lerobot does is held in `tests/peers`."""

import numpy
import pytest
import torch
from PIL import Image

from rlinf.models.policy.vla.wall_x_network import Prompts, scaled
from tests.models.policy.contract import wall_x_tokenizer

TOKENIZER = wall_x_tokenizer().to_str().encode()


@pytest.mark.parametrize(("old", "new"), [((40, 72), (142, 256)), ((48, 64), (19, 26)), ((5, 3), (28, 28))])
def test_pictures_are_scaled_as_pillow_does_to_the_last_bit(old, new):
    random = torch.Generator().manual_seed(0)
    picture = torch.randint(0, 256, (3, *old), dtype=torch.uint8, generator=random)
    wanted = Image.fromarray(picture.permute(1, 2, 0).contiguous().numpy()).resize(new[::-1])
    assert torch.equal(scaled(picture, new), torch.from_numpy(numpy.array(wanted)).permute(2, 0, 1))


def test_a_prompt_names_cameras_and_places_tokens_of_pictures_in_rows_and_columns():
    prompts = Prompts(TOKENIZER, ["observation.images.face_view", "observation.images.left_arm"], (2, 3), 400)
    (row,) = prompts.encode(["go"]).tolist()
    shown = f"<|vision_start|>{'<|image_pad|>' * 6}<|vision_end|>"
    words = wall_x_tokenizer().encode(f" front view: {shown} left_arm view: {shown}").ids
    begin = row.index(prompts.picture) - len(wall_x_tokenizer().encode(" front view: <|vision_start|>").ids)
    assert row[begin : begin + len(words)] == words
    told = wall_x_tokenizer().encode(" go.").ids
    assert any(row[place : place + len(told)] == told for place in range(begin, row.index(prompts.state)))
    first = row.index(prompts.picture)
    places = prompts.positions(len(row), torch.device("cpu"))
    assert places[:, :first].tolist() == [list(range(first))] * 3
    assert (places[:, first : first + 6] - first).tolist() == [[0] * 6, [0, 0, 0, 1, 1, 1], [0, 1, 2, 0, 1, 2]]
    assert places[:, first + 6].tolist() == [first + 3] * 3


def test_a_prompt_that_is_too_long_or_points_is_refused():
    prompts = Prompts(TOKENIZER, ["top"], (1, 1), 500)
    with pytest.raises(ValueError, match=r"instruction 'push.* 268 is the most"):
        prompts.encode(["push " * 60])
    with pytest.raises(ValueError, match="points at a picture"):
        prompts.encode(["push <point>3, 4</point>"])
    with pytest.raises(ValueError, match=r"no <\|propri\|>"):
        Prompts(TOKENIZER.replace(b"propri", b"unknown"), ["top"], (1, 1), 500)
