"""The names that `rlinf` exports: all there, and imported only when they are used."""

import subprocess
import sys

import pytest

import rlinf


@pytest.mark.parametrize("name", rlinf.__all__)
def test_a_public_name_is_what_it_says(name):
    assert getattr(rlinf, name).__name__ == name


def test_importing_the_package_imports_neither_torch_nor_a_role():
    program = (
        "import sys, rlinf; print([name for name in ('torch', 'rlinf.actors', 'rlinf.runtime') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
    with pytest.raises(AttributeError, match=r"attribute 'Trainner'"):
        _ = rlinf.Trainner
