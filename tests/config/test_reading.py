"""Files and texts that anybody may have written are read, or refused in words: nothing hangs or fills memory."""

import json
import os

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from rlinf.config.load import InputError, load
from rlinf.config.reading import open_regular, parse_json, parse_yaml, read_bytes
from rlinf.config.text import RunConfig

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53), 2**53) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
)
BOMB = "a: &a [x, x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"{name}: &{name} [{', '.join([f'*{before}'] * 10)}]\n" for before, name in zip("abcdefgh", "bcdefghi", strict=True)
)


@given(VALUES)
def test_what_json_and_yaml_can_say_is_read_as_by_their_libraries(value):
    assert parse_json(json.dumps(value)) == value
    text = yaml.safe_dump(value)
    assert parse_yaml(text) == yaml.safe_load(text)


@pytest.mark.parametrize("text", ["[" * 100_000, '{"a":' * 100_000, b"\xff", "", "{"])
def test_json_that_cannot_be_read_is_a_value_error(text):
    with pytest.raises(ValueError):
        parse_json(text)


@pytest.mark.parametrize(
    "text", [BOMB, "[" * 1_500, "a: &a [*a]", "a: 2026-13-45", "{", "? [a]\n: 1", "!!python/name:os.system"]
)
def test_yaml_that_cannot_be_read_is_a_value_error(text):
    with pytest.raises(ValueError):
        parse_yaml(text)


@pytest.fixture(params=["pipe", "device", "directory"])
def irregular(request, tmp_path):
    path = tmp_path / "there"
    match request.param:
        case "pipe":
            os.mkfifo(path)
        case "device":
            path.symlink_to("/dev/zero")
        case "directory":
            path.mkdir()
    return path


def test_only_regular_files_are_opened(irregular):
    with pytest.raises(OSError, match=r"no regular file|directory"):
        open_regular(irregular)


def test_links_are_followed_where_that_is_wanted_alone(tmp_path):
    (tmp_path / "file").write_text("x")
    (tmp_path / "link").symlink_to("file")
    assert read_bytes(tmp_path / "link") == b"x"
    with pytest.raises(OSError):
        read_bytes(tmp_path / "link", links=False)


def test_a_file_has_a_most(tmp_path):
    (tmp_path / "file").write_bytes(b"x" * 11)
    with pytest.raises(OSError, match="more than"):
        read_bytes(tmp_path / "file", most=10)


def test_a_configuration_that_is_no_file_is_refused_by_its_name(irregular):
    with pytest.raises(InputError, match=str(irregular)):
        load(RunConfig, irregular)
