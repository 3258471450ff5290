"""A mistake in code of one's own is told from that code on; a mistake of ours is told whole."""

import json
import runpy

import pytest

from rlinf.cli import main


@pytest.fixture
def failing(tmp_path, monkeypatch):
    """Runs a program of ours that calls one's own code, or fails before it; gives the exception."""
    ours, own = tmp_path / "rlinf" / "flow.py", tmp_path / "mine.py"
    ours.parent.mkdir()
    monkeypatch.setattr(main, "_OURS", f"{ours.parent}/")
    own.write_text("def mine(text):\n    return json_of(text)\n")

    def run(reached: bool) -> BaseException:
        call = "mine('{')" if reached else "json_of('{')"
        ours.write_text(f"def program():\n    return {call}\n\n\ndef start():\n    program()\n\n\n")
        names = {**runpy.run_path(str(own), {"json_of": json.loads}), "json_of": json.loads}
        with pytest.raises(json.JSONDecodeError) as raised:
            runpy.run_path(str(ours), names)["start"]()
        return raised.value

    return run


def test_the_calls_before_ones_own_code_are_left_out_and_those_behind_it_are_not(failing, capsys):
    assert main.print_own_error(failing(reached=True))
    first, _, begun, line, *rest = capsys.readouterr().err.splitlines()
    assert first == "error: in code of your own; the 3 calls of rlinf that led there are left out"
    assert "mine.py" in begun
    assert line.strip() == "return json_of(text)"
    assert any("decoder.py" in line for line in rest)
    assert rest[-1].startswith("json.decoder.JSONDecodeError: ")


def test_a_mistake_of_ours_is_not_shortened(failing, capsys):
    assert not main.print_own_error(failing(reached=False))
    assert capsys.readouterr().err == ""


def test_an_exception_of_no_code_of_ours_is_left_alone():
    """A script outside of rlinf at the top, such as launch.py, is not taken for the user's."""
    with pytest.raises(ZeroDivisionError) as raised:
        _ = 1 / 0
    assert main.from_own_code(raised.value.__traceback__) is None
