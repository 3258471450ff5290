"""Placeholders, pixels and positions of pictures."""

import base64
import io

import numpy as np
import pytest
import torch
from PIL import Image
from transformers.image_transforms import convert_to_rgb
from transformers.image_utils import load_image

from rlinf.data.datasets.load import load_data
from rlinf.data.datasets.source import DataError, ListRows, fingerprint
from rlinf.data.images import GRID, PIXELS, image_refs, opened
from rlinf.data.tokenizer import load_tokenizer
from rlinf.models.language.build import build_model, pictures_of
from tests.pictured import MODELS, TOKENIZER, pictures

CHAT = "{% for m in messages %}{{ m.role[:1] }}:{{ m.content }}{% endfor %}{% if add_generation_prompt %}a:{% endif %}"


@pytest.fixture(scope="module")
def tokenizer():
    return load_tokenizer(TOKENIZER)


def png(picture):
    kept = io.BytesIO()
    picture.save(kept, format="PNG")
    return kept.getvalue()


@pytest.fixture
def cat():
    return Image.fromarray(np.random.default_rng(0).integers(0, 255, (16, 24, 3), dtype=np.uint8))


def read(tokenizer, *rows, kind="qwen2_5_vl", **options):
    shows = None if kind is None else lambda given: pictures_of(MODELS[kind], given)
    return load_data(tokenizer, train=list(rows), pictures=shows, shuffle=False, **options).train.take(len(rows))


def test_every_form_of_a_picture_is_the_same_picture(cat, tmp_path):
    content = png(cat)
    (tmp_path / "cat.png").write_bytes(content)
    url = "data:image/png;base64," + base64.b64encode(content).decode()
    forms = [cat, content, {"bytes": content, "path": None}, str(tmp_path / "cat.png"), url]
    found = [image for form in forms for image in image_refs(form, "here")]
    assert len({image.digest for image in found}) == 1
    assert all(np.array_equal(np.asarray(opened(image)), np.asarray(cat)) for image in found)
    assert [bool(image.content) for image in found] == [True, True, True, False, True]  # a file stays where it is
    assert image_refs(None, "here") == ()
    with pytest.raises(DataError, match=r"row 3.*no\.png"):
        image_refs([str(tmp_path / "no.png")], "row 3")
    (tmp_path / "cat.png").write_bytes(b"other")
    with pytest.raises(DataError, match="has changed"):
        opened(found[3])


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize("form", ["jpeg", "png"])
def test_photos_are_turned_upright_as_transformers_turns_them(orientation, form, tokenizer, tmp_path):
    photo = Image.fromarray(np.random.default_rng(1).integers(0, 255, (16, 40, 3), dtype=np.uint8))
    exif = Image.Exif()
    exif[0x0112] = orientation
    photo.save(tmp_path / f"photo.{form}", exif=exif)
    (image,) = image_refs(str(tmp_path / f"photo.{form}"), "here")
    expected = load_image(str(tmp_path / f"photo.{form}"))
    assert expected.size == ((16, 40) if orientation > 4 else (40, 16))
    assert np.array_equal(np.asarray(opened(image)), np.asarray(expected))
    shows = pictures_of(MODELS["qwen2_5_vl"], tokenizer)
    assert shows.count(image) == shows.counts(shows.inputs([image]), [image])[0]
    already = image_refs(Image.open(tmp_path / f"photo.{form}"), "here")[0]  # as a processor takes what was opened
    assert np.array_equal(np.asarray(opened(already)), np.asarray(Image.open(tmp_path / f"photo.{form}")))


def see_through(mode):
    rng = np.random.default_rng(2)
    picture = Image.fromarray(rng.integers(0, 255, (8, 8, 4), dtype=np.uint8), "RGBA")
    if mode == "P":
        picture = Image.fromarray(rng.integers(0, 255, (8, 8, 3), dtype=np.uint8)).quantize(4)
        picture.info["transparency"] = 2
    return picture if mode == "P" else picture.convert(mode)


@pytest.mark.parametrize("mode", ["RGBA", "LA", "P", "PA", "L", "1", "CMYK"])
def test_transparency_is_laid_on_white_as_a_processor_lays_it(mode):
    picture = see_through(mode)
    expected = np.asarray(convert_to_rgb(picture))
    (given,) = image_refs(picture, "here")
    assert np.array_equal(np.asarray(opened(given)), expected)
    if mode in ("RGBA", "LA", "P"):
        (read,) = image_refs(png(picture), "here")
        assert np.array_equal(np.asarray(opened(read)), expected)


@pytest.mark.parametrize("form", ["png", "tif", "as it is"])
def test_grey_of_more_than_8_bits_is_scaled_or_refused_by_its_mode(form, tmp_path):
    ramp = np.linspace(0, 65535, 64).reshape(8, 8)
    eight = np.round(ramp / 257).astype(np.uint8)

    def of(numbers):
        picture = Image.fromarray(numbers)
        if form != "as it is":
            picture.save(tmp_path / f"a.{form}")
        return image_refs(picture if form == "as it is" else str(tmp_path / f"a.{form}"), "row 4")[0]

    grey = np.asarray(opened(of(ramp.astype(np.uint16))))
    assert np.abs(grey.astype(int) - eight[..., None]).max() <= 1
    if form == "png":
        return
    assert np.abs(np.asarray(opened(of((ramp / 65535).astype(np.float32)))).astype(int) - eight[..., None]).max() <= 1
    for odd, told in ((ramp.astype(np.float32), "mode F.*65535"), (ramp.astype(np.int32), "mode I")):
        with pytest.raises(DataError, match=told):
            opened(of(odd))


BROKEN = {
    "cut": lambda content: content[: len(content) // 2],
    "empty": lambda content: b"",
    "no picture": lambda content: b"junk",
    "a header alone": lambda content: content[:40],
}


@pytest.mark.parametrize("how", BROKEN)
@pytest.mark.parametrize("form", ["bytes", "mapping", "file"])
def test_a_broken_picture_costs_its_row_which_is_named(how, form, cat, tokenizer, tmp_path):
    broken = BROKEN[how](png(cat))
    (tmp_path / "broken.png").write_bytes(broken)
    cell = {"bytes": broken, "mapping": {"bytes": broken, "path": None}, "file": str(tmp_path / "broken.png")}[form]
    rows = [{"prompt": "a", "images": [cell]}, {"prompt": "b", "images": [cat]}]
    assert [prompt.text[-1:] for prompt in read(tokenizer, *rows)] == ["b", "b"]
    with pytest.raises(DataError, match=r"row 1: .*picture") as caught:
        read(tokenizer, *rows, unusable="error")
    assert " at 0x" not in str(caught.value)
    assert "NoneType" not in str(caught.value)
    assert "Is a directory" not in str(caught.value)


def test_a_broken_picture_that_the_datasets_library_decodes_costs_its_row_too(cat, tokenizer):
    datasets = pytest.importorskip("datasets")
    broken = [png(cat), png(cat)[:60], b"junk", png(cat)]
    columns = datasets.Features({"prompt": datasets.Value("string"), "image": datasets.Image()})
    rows = {"prompt": list("abca"), "image": [{"bytes": content, "path": None} for content in broken]}
    table = datasets.Dataset.from_dict(rows, features=columns)
    shows = lambda given: pictures_of(MODELS["qwen2_5_vl"], given)  # noqa: E731
    data = load_data(tokenizer, train=table, pictures=shows, shuffle=False)
    assert [prompt.text[-1:] for prompt in data.train.take(4)] == ["a", "a", "a", "a"]
    assert data.train.unusable == 4
    assert "row 2" in data.train.remark
    assert " at 0x" not in data.train.remark
    assert data.train.state_dict()["fingerprint"] == data.warm_up.state_dict()["fingerprint"]


@pytest.mark.parametrize("kind", MODELS)
def test_a_prompt_has_as_many_placeholders_as_the_model_has_features(kind, tokenizer):
    shows = pictures_of(MODELS[kind], tokenizer)
    shown = pictures((16, 16), (16, 24), (8, 40), (13, 37))
    inputs = shows.inputs(shown)
    net = build_model(MODELS[kind], tokenizer).eval()
    features = net.get_image_features(**inputs).pooler_output
    counts = [shows.count(image) for image in shown]
    assert counts == shows.counts(inputs, shown)
    assert sum(counts) == sum(len(one.view(-1, 32)) for one in features)
    blank, count = shows.blank()
    assert sum(len(one.view(-1, 32)) for one in net.get_image_features(**blank).pooler_output) == count


@pytest.mark.parametrize("kind", ["qwen2_5_vl", "qwen3_vl"])
def test_positions_are_those_that_the_model_gives(kind, tokenizer):
    shows = pictures_of(MODELS[kind], tokenizer)
    net = build_model(MODELS[kind], tokenizer)
    shown = pictures((16, 16), (16, 40), (24, 8))
    grids = shows.inputs(shown)[GRID]
    ids = np.array(shows.expand(tokenizer(f"a{shows.text}{shows.text}bc{shows.text}:1")["input_ids"], shown))
    types = torch.from_numpy((ids == shows.placeholder).astype(np.int32))[None]
    expected, _ = net.model.get_rope_index(torch.from_numpy(ids)[None], types, image_grid_thw=grids)
    assert np.array_equal(shows.positions(ids, grids), expected[:, 0].numpy())


def test_rows_with_pictures_become_prompts(cat, tokenizer):
    geometry = {"images": [cat, cat], "problem": "<image>a: <image>?", "answer": "3"}
    unmarked = {"images": [{"bytes": png(cat)}], "problem": "a?", "answer": "4"}
    plain = {"images": [], "problem": "abc?", "answer": "5"}
    first, second, third = read(tokenizer, geometry, unmarked, plain)
    shows = pictures_of(MODELS["qwen2_5_vl"], tokenizer)
    assert first.text == f"{shows.text}a: {shows.text}?"
    assert second.text == f"{shows.text}a?"
    assert [len(prompt.images) for prompt in (first, second, third)] == [2, 1, 0]
    assert [(prompt.token_ids == shows.placeholder).sum() for prompt in (first, second, third)] == [12, 6, 0]
    assert "images" not in first.row
    assert first.answer == "3"


def test_messages_say_where_pictures_stand(cat, tokenizer):
    tokenizer.chat_template = CHAT
    shows = pictures_of(MODELS["internvl"], tokenizer)
    parts = [{"type": "text", "text": "ab"}, {"type": "image"}, {"type": "text", "text": "c"}]
    rows = [
        {"prompt": [{"role": "user", "content": parts}], "image": cat},
        {"prompt": [{"role": "system", "content": "c"}, {"role": "user", "content": "ab"}], "image": cat},
    ]
    first, second = read(tokenizer, *rows, kind="internvl")
    assert first.text == f"u:ab{shows.text}ca:"
    assert second.text == f"s:cu:{shows.text}aba:"


def test_a_text_that_speaks_of_pictures_stands_for_none(cat, tokenizer):
    tokenizer.chat_template = CHAT

    def shown(*messages, **more):
        rows = [{"prompt": [{"role": role, "content": said} for role, said in messages], **more}]
        (prompt,) = read(tokenizer, *rows, unusable="error")
        assert (prompt.token_ids == tokenizer.convert_tokens_to_ids("<|image_pad|>")).sum() == 6 * len(prompt.images)
        return prompt.text.replace("<|vision_start|><|image_pad|><|vision_end|>", "#")

    part = [{"type": "image"}, {"type": "text", "text": "<image>?"}]
    assert shown(("user", part), images=cat) == "u:#<image>?a:", "the part says where"
    told = (("user", "a"), ("tool", "<image>"), ("assistant", "<image>"), ("user", "b"))
    assert shown(*told, images=cat) == "u:#at:<image>a:<image>u:ba:"
    assert shown(*told) == "u:at:<image>a:<image>u:ba:"
    with pytest.raises(DataError, match=r"1.*1.*pictures.*0 pictures"):
        shown(("tool", "<|image_pad|>"), ("user", "b"))


def test_what_does_not_fit_together_is_refused(cat, tokenizer):
    row = {"images": [cat], "problem": "<image><image>?"}
    with pytest.raises(DataError, match=r"1:.*2.*pictures.*1 pictures"):
        read(tokenizer, row)
    with pytest.raises(DataError, match=r"1:.*prompt.*1.*pictures.*0"):
        read(tokenizer, {"images": [], "problem": pictures_of(MODELS["qwen2_5_vl"], tokenizer).text})
    with pytest.raises(DataError, match=r"reads.*alone.*images:"):
        read(tokenizer, row, kind=None)
    (prompt,) = read(tokenizer, row, kind=None, columns={"images": None})
    assert (prompt.images, prompt.text) == ((), "<image><image>?")
    with pytest.raises(DataError, match=r"none.*PIL.*read"):
        read(tokenizer, {"images": [b"no picture"], "problem": "a"})


def test_a_data_set_of_pictures_is_known_again(cat):
    rows = [{"image": cat.copy(), "problem": "a"}]
    again = [{"image": cat.copy(), "problem": "a"}]
    other = [{"image": cat.rotate(180), "problem": "a"}]
    found = [fingerprint(ListRows("list", each)) for each in (rows, again, other)]
    assert found[0] == found[1] != found[2]


@pytest.mark.parametrize("kind", MODELS)
def test_a_saved_preprocessor_is_the_same(kind, tokenizer, tmp_path):
    shows = pictures_of(MODELS[kind], tokenizer)
    build_model(MODELS[kind], tokenizer).save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    shows.save(tmp_path)
    again = pictures_of(str(tmp_path), tokenizer)
    shown = pictures((17, 40))
    assert torch.equal(again.inputs(shown)[PIXELS], shows.inputs(shown)[PIXELS])
    assert (again.text, again.placeholder, again.banned) == (shows.text, shows.placeholder, shows.banned)
