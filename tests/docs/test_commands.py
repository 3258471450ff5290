"""Commands on pages are refused when the programs would not take them."""

import pytest

from tests.docs import commands
from tests.docs.snippets import ROOT, blocks_of

pytestmark = pytest.mark.usefixtures("at_the_top")


@pytest.fixture
def at_the_top(monkeypatch):
    monkeypatch.chdir(ROOT)


@pytest.mark.parametrize(
    ("script", "of_ours"),
    [
        ("rlinf train --config quickstart steps=3  # a comment; with a semicolon", 1),
        ("WORLD_SIZE=2 python launch.py --config configs/quickstart.yaml \\\n    placement.trainer=0-1", 1),
        ("torchrun --nproc-per-node 2 -m rlinf train --config quickstart placement.trainer=0-1 && make quickstart", 2),
        ("rlinf compare outputs/a outputs/b -h", 1),
        ("srun --nodes 2 bash -c 'one\ntwo' & wait", 0),
        ("pip install 'rlinf[data,math]' && python -m benchmarks.learning --recipes ppo", 2),
    ],
)
def test_what_programs_take_is_taken(script, of_ours):
    assert commands.check(script, run=True) == of_ours


@pytest.mark.parametrize(
    ("script", "said"),
    [
        ("rlinf train --config quickstart stepz=3", "stepz"),
        ("python launch.py --config configs/quickstart.yaml placement.trainer=0-1 steps=-1", "steps"),
        ("rlinf train --config configs/nowhere.yaml", "nowhere"),
        ("rlinf evaluate --config quickstart", "--model"),
        ("rlinf lodger outputs/x", "lodger"),
        ("rlinf plan --profile x --devices 2 --strange", "strange"),
        ("make quickstarted", "quickstarted"),
        ("pip install 'rlinf[data,meth]'", "meth"),
        ("python my_script.py", "my_script"),
        ("python -m benchmarks.nothing", "nothing"),
        ("python -m benchmarks.learning --recipe ppo", "--recipe"),
        ("for x in; do", "bash"),
    ],
)
def test_what_they_do_not_take_is_refused(script, said):
    with pytest.raises(commands.Refused, match=said):
        commands.check(script, run=True)


def test_of_what_is_not_run_the_keys_are_still_checked():
    assert commands.check("rlinf train --config configs/quickstart.yaml model.path=mine", run=False)
    with pytest.raises(commands.Refused, match="pathh"):
        commands.check("rlinf train --config configs/quickstart.yaml model.pathh=mine", run=False)


def test_a_page_says_which_block_is_a_file_and_which_is_not_run():
    page = (
        'a\n```python title="mine.py"\nx = 1\n```\n<!-- not run: too large -->\n- b\n\n    ```bash\n    ls\n    ```\n'
    )
    file, listed = blocks_of(page)
    assert (file.file, file.text, file.line, file.not_run) == ("mine.py", "x = 1\n", 2, None)
    assert (listed.language, listed.text, listed.not_run) == ("bash", "ls\n", None), (
        "the remark belongs to the next line"
    )
    (remarked,) = blocks_of("<!-- not run: too large -->\n```bash\nls\n```\n")
    assert remarked.not_run == "too large"
