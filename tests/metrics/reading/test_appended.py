from hypothesis import given, settings
from hypothesis import strategies as st

from rlinf.storage import reading
from rlinf.storage.reading import Appended


class Reader:
    """What somebody holds who follows a file."""

    def __init__(self, path):
        self.lines, self.times_anew = [], 0
        self.file = Appended(path, self.forget)

    def forget(self):
        self.lines, self.times_anew = [], self.times_anew + 1

    def read(self):
        blocks = list(self.file.blocks())
        self.lines += [line for _, block in blocks for line in block.splitlines()]
        return blocks


def test_a_line_is_read_once_and_a_half_written_one_waits(tmp_path):
    path = tmp_path / "lines"
    reader = Reader(path)
    assert reader.read() == []
    path.write_bytes(b"one\ntw")
    assert reader.read() == [(0, b"one\n")]
    assert reader.read() == []
    with path.open("ab") as file:
        file.write(b"o\nthree\n")
    assert reader.read() == [(4, b"two\nthree\n")]
    assert reader.times_anew == 0


@settings(max_examples=60, deadline=None)
@given(
    lines=st.lists(st.integers(0, 60), max_size=12),
    pieces=st.lists(st.integers(1, 50), max_size=12),
    block=st.integers(1, 9),
)
def test_lines_that_are_too_long_are_left_out_and_read_no_more_than_once(tmp_path_factory, lines, pieces, block):
    path, longest = tmp_path_factory.mktemp("file") / "lines", 16
    whole = b"".join(b"x" * length + b"\n" for length in lines)
    was, (reading.BLOCK, reading.LONGEST) = (reading.BLOCK, reading.LONGEST), (block, longest)
    try:
        found, file, reached = [], Appended(path), 0
        for size in [*pieces, len(whole)]:
            with path.open("ab") as out:
                out.write(whole[reached : reached + size])
            reached += size
            for offset, read in file.blocks():
                assert len(read) <= longest
                assert whole[offset:].startswith(read)
                found += [len(line) for line in read.splitlines()]
    finally:
        reading.BLOCK, reading.LONGEST = was
    assert found == [length for length in lines if length < longest]
    assert file.left_out == sum(length >= longest for length in lines)


def test_a_file_that_was_cut_is_read_anew(tmp_path):
    path = tmp_path / "lines"
    path.write_bytes(b"one\ntwo\nthree\n")
    reader = Reader(path)
    reader.read()
    path.write_bytes(b"one\ntwo\n")
    reader.read()
    assert (reader.lines, reader.times_anew) == ([b"one", b"two"], 1)


def test_a_file_that_another_took_the_place_of_is_read_anew_though_it_is_longer(tmp_path):
    path, other = tmp_path / "lines", tmp_path / "other"
    path.write_bytes(b"one\n")
    reader = Reader(path)
    reader.read()
    other.write_bytes(b"one\nand more\n")
    other.replace(path)
    reader.read()
    assert (reader.lines, reader.times_anew) == ([b"one", b"and more"], 1)


def test_a_file_that_was_written_anew_in_its_place_is_told_by_what_is_in_it(tmp_path):
    path = tmp_path / "lines"
    path.write_bytes(b"one\n")
    reader = Reader(path)
    reader.read()
    path.write_bytes(b"ONE\nTWO\n")
    reader.read()
    assert (reader.lines, reader.times_anew) == ([b"ONE", b"TWO"], 1)


def test_a_file_that_was_removed_is_forgotten_once_and_read_when_it_comes_again(tmp_path):
    path = tmp_path / "lines"
    path.write_bytes(b"one\n")
    reader = Reader(path)
    reader.read()
    path.unlink()
    reader.read()
    reader.read()
    assert (reader.lines, reader.times_anew) == ([], 1)
    path.write_bytes(b"two\n")
    reader.read()
    assert (reader.lines, reader.times_anew) == ([b"two"], 1)


@settings(max_examples=40, deadline=None)
@given(pieces=st.lists(st.binary(max_size=40), max_size=12), block=st.integers(1, 16))
def test_whatever_is_written_when_is_read_in_whole_lines(tmp_path_factory, pieces, block):
    path = tmp_path_factory.mktemp("file") / "lines"
    was, reading.BLOCK = reading.BLOCK, block
    try:
        read, file = b"", Appended(path)
        for piece in pieces:
            with path.open("ab") as out:
                out.write(piece)
            for offset, lines in file.blocks():
                assert offset == len(read)
                assert lines.endswith(b"\n")
                read += lines
    finally:
        reading.BLOCK = was
    whole = b"".join(pieces)
    assert read == whole[: whole.rfind(b"\n") + 1]
