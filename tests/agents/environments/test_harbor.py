"""Task directories of Harbor's: how they are read, worked on by harnesses, and judged by their own tests."""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from examples.environments.broken_packages import KINDS, write
from rlinf.agents.agent import samples_of
from rlinf.agents.environments import harnesses
from rlinf.agents.environments.harbor import Harbor
from rlinf.config.load import RunFailure
from rlinf.runtime.base.errors import UserError
from rlinf.sandbox.containers.protocol import ContainersError
from tests.agents.endpoint.serving import stand
from tests.agents.environments.folders import Folders

HERE = Path(__file__).parent
TASK = {
    "instruction.md": "Write 7 to /app/seven.\n",
    "task.toml": 'version = "1.0"\n[agent]\ntimeout_sec = 20.0\n[verifier]\ntimeout_sec = 20.0\n',
    "environment/Dockerfile": "FROM base\nWORKDIR /app\n",
    "tests/test.sh": "cd /logs/verifier; grep -q 7 /app/seven && echo 1 > reward.txt || echo 0 > reward.txt\n",
    "solution/solve.sh": "echo 7 > /app/seven\n",
}
SEVEN = "echo 7 > /app/seven"


def call(command, tool="bash"):
    return f'<tool_call>{{"name": "{tool}", "arguments": {json.dumps({"command": command})}}}</tool_call>'


def task_in(folder, **changes):
    """A task directory; changes are files, by their names without what a keyword cannot have."""
    files = {**TASK, **{name: text for name, text in changes.items() if name in TASK or "/" in name}}
    for name, text in files.items():
        if text is not None:
            (folder / "task" / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / "task" / name).write_text(text)
    return folder


def harbor(folder, **more):
    provider = Folders()
    return Harbor(folder, containers=lambda: provider, **more), provider


async def played(made, llm, number=0):
    async with made:
        return await made(SimpleNamespace(row=made.tasks()[number]), llm)


async def sampled_exactly(here):
    """Every token of the samples is one that was sampled, with its log-prob, once."""
    learned = []
    for one in samples_of(1.0, here.llm):
        learned += zip(one.learned(one.response_ids).tolist(), one.learned(one.logprobs).tolist(), strict=True)
    assert sorted(learned) == sorted(
        (int(i), -float(n)) for n, (_, ids, *_) in enumerate(here.model.calls, 1) for i in ids
    )


# Tasks that are ours ------------------------------------------------------------------------------------------------


async def test_each_planted_fault_fails_its_tests_and_is_mended_by_its_solution(tmp_path):
    write(tmp_path, count=len(KINDS), seed=3)
    made, _ = harbor(tmp_path, held_out=0)
    async with made:
        for row in made.tasks():
            async with stand("I leave it as it is.") as here:
                assert (await made(SimpleNamespace(row=row), here.llm)).value == 0.0, row["task"]
            assert await made.solved(row["task"]) == {"reward": 1.0}, row["task"]


async def test_a_package_is_mended_in_a_container_by_namespaces(tmp_path):
    write(tmp_path / "tasks", count=1)
    settings = {"directory": str(tmp_path / "cache")}
    made = Harbor(tmp_path / "tasks", image="base", settings=settings, held_out=0, weights={"turns": 0.5})
    (row,) = made.tasks()
    solution = (made.directory(row["task"]) / "solution/solve.sh").read_text()
    async with made:
        try:
            rewards = await made.solved(row["task"])
        except ContainersError as error:
            pytest.skip(str(error))
        assert rewards == {"reward": 1.0}
        for texts, value in (((call(solution), "done"), 2.0), (("done",), 0.5)):
            async with stand(*texts, new=4000) as here:
                assert (await made(SimpleNamespace(row=row), here.llm)).value == value


def test_the_same_seed_writes_the_same_packages(tmp_path):
    one, two = (write(tmp_path / name, count=12, seed=5) for name in "ab")
    texts = [{str(p.relative_to(d)): p.read_text() for p in sorted(d.rglob("*")) if p.is_file()} for d in (*one, *two)]
    assert texts[:12] == texts[12:]
    assert len({json.dumps(text) for text in texts[:12]}) == 12


# Harnesses ----------------------------------------------------------------------------------------------------------


async def test_the_loop_runs_commands_in_the_container_until_an_answer_has_none(tmp_path):
    made, provider = harbor(task_in(tmp_path))
    async with stand("I write. " + call(SEVEN), "It is written.") as here:
        score = await played(made, here.llm)
        await sampled_exactly(here)
        assert here.llm.counts().branches == 0
    assert score.value == 1.0
    assert score.scores["turns"] == 2
    assert ["bash", "-c", SEVEN] in provider.ran
    assert all(box.ended for box in provider.started)


async def test_a_context_that_is_full_ends_the_work_and_the_tests_decide(tmp_path):
    made, _ = harbor(task_in(tmp_path))
    async with stand(call(SEVEN) * 4, longest=1500, new=900) as here:
        score = await played(made, here.llm)
    assert score.value == 1.0


PROGRAM = """
import json, os, sys, urllib.request
body = json.dumps({'model': 'policy', 'messages': [{'role': 'user', 'content': sys.argv[1]}]}).encode()
url = os.environ['URL'] + '/chat/completions'
head = {'Authorization': 'Bearer ' + os.environ['KEY'], 'Content-Type': 'application/json'}
told = json.load(urllib.request.urlopen(urllib.request.Request(url, body, head)))
open('seven', 'w').write(told['choices'][0]['message']['content'])
os.remove('old'); open(os.path.expanduser('~/left'), 'w')
"""
REACHED = {"URL": "{url}", "KEY": "{key}"}


def task_with_a_file(folder):
    return task_in(folder, **{"environment/old": "", "environment/Dockerfile": "FROM base\nWORKDIR /app\nCOPY old .\n"})


async def test_a_program_works_on_a_copy_and_what_it_leaves_is_judged(tmp_path):
    harness = {"command": [sys.executable, "-c", PROGRAM, "{instruction}"], "env": REACHED}
    made, provider = harbor(task_with_a_file(tmp_path), harness=harness)
    async with stand("77") as here:
        score = await played(made, here.llm)
        read = here.model.tokenizer.decode(here.model.calls[0][0])
        await sampled_exactly(here)
    assert (score.value, score.scores["harness_failed"]) == (1.0, 0.0)
    assert "Write 7 to /app/seven." in read
    assert not any("old" in words for words in provider.ran)


@pytest.mark.parametrize("fails", [False, True])
async def test_a_program_inside_a_container_without_a_network_reaches_its_episodes_model_alone(tmp_path, fails):
    end = "print('no more'); sys.exit(3)" if fails else ""
    words = ["python3", "-c", f"{PROGRAM}\n{end}", "{instruction}"]
    made = Harbor(
        task_with_a_file(tmp_path / "tasks"),
        harness={"command": words, "env": REACHED, "inside": True},
        image="base",
        settings={"directory": str(tmp_path / "cache")},
    )
    async with stand("77") as here:
        try:
            score = await played(made, here.llm)
        except ContainersError as error:
            pytest.skip(str(error))
        read = here.model.tokenizer.decode(here.model.calls[0][0])
        await sampled_exactly(here)
    assert (score.value, score.scores["harness_failed"]) == (1.0, float(fails))
    assert "Write 7 to /app/seven." in read


@pytest.mark.parametrize(("asks", "fails"), [(False, True), (True, False)])
async def test_a_program_that_fails_is_no_attempt_only_if_the_model_was_not_asked(tmp_path, asks, fails):
    made, _ = harbor(task_in(tmp_path), harness=[sys.executable, "-c", "import sys; print('no key'); sys.exit(3)"])
    async with stand("7") as here:
        if asks:
            await here.llm.chat([{"role": "user", "content": "Hi"}])
        if fails:
            with pytest.raises(RuntimeError, match="status 3: no key"):
                await played(made, here.llm)
        else:
            assert (await played(made, here.llm)).scores["harness_failed"] == 1.0


async def test_a_harness_that_is_out_of_time_is_ended_and_the_tests_decide(tmp_path):
    files = {"task.toml": "[agent]\ntimeout_sec = 0.5\n", "environment/seven": "7"}
    files["environment/Dockerfile"] = "FROM base\nWORKDIR /app\nCOPY seven .\n"
    made, _ = harbor(task_in(tmp_path, **files), harness=[sys.executable, "-c", "import time; time.sleep(600)"])
    async with stand("7") as here:
        score = await played(made, here.llm)
    assert (score.value, score.scores["out_of_time"]) == (1.0, 1.0)


# mini-swe-agent -----------------------------------------------------------------------------------------------------


@pytest.fixture
def stand_in(monkeypatch):
    """A process that speaks as mini-swe-agent's does."""
    monkeypatch.setattr(harnesses, "_WORKER", (str(HERE / "stand_in_mini_swe.py"),))


@pytest.mark.usefixtures("stand_in")
async def test_commands_of_mini_swe_agent_run_in_the_container(tmp_path):
    made, provider = harbor(task_in(tmp_path), harness={"name": "mini_swe", "python": sys.executable})
    async with stand(SEVEN, "false", "submit") as here:
        score = await played(made, here.llm)
        await sampled_exactly(here)
        assert here.llm.counts().branches == 0
        read = here.model.tokenizer.decode(here.model.calls[2][0])
    assert (score.value, score.scores["commands"], score.scores["harness_failed"]) == (1.0, 2.0, 0.0)
    assert ["bash", "-c", "false"] in provider.ran
    assert '"returncode": 1' in read


@pytest.mark.usefixtures("stand_in")
@pytest.mark.parametrize(("answer", "failed"), [("raise", 1.0), ("submit", 0.0)])
async def test_how_mini_swe_agent_ended_is_a_number(tmp_path, answer, failed):
    made, _ = harbor(task_in(tmp_path), harness={"name": "mini_swe", "python": sys.executable})
    async with stand(answer) as here:
        assert (await played(made, here.llm)).scores["harness_failed"] == failed


@pytest.mark.usefixtures("stand_in")
async def test_an_episode_whose_process_dies_fails_and_others_go_on(tmp_path):
    made, _ = harbor(task_in(tmp_path), harness={"name": "mini_swe", "python": sys.executable})
    async with stand("die") as here, stand(SEVEN, "submit") as there, made:
        task = SimpleNamespace(row=made.tasks()[0])
        died, lived = await asyncio.gather(made(task, here.llm), made(task, there.llm), return_exceptions=True)
    assert isinstance(died, RuntimeError)
    assert lived.value == 1.0


# Verdicts -----------------------------------------------------------------------------------------------------------

VERDICTS = [
    ("echo 0.5 > /logs/verifier/reward.txt", 0.5, {"reward": 0.5}),
    ("""echo '{"reward": 0.25, "style": 1}' > /logs/verifier/reward.json""", 0.25, {"reward": 0.25, "style": 1.0}),
    ("""echo '{"a": 0, "b": 1}' > /logs/verifier/reward.json""", 0.5, {"a": 0.0, "b": 1.0}),
    ("true", 0.0, {"without_verdict": 1.0}),
    ("echo nan > /logs/verifier/reward.txt", 0.0, {"without_verdict": 1.0}),
    ("echo '{}' > /logs/verifier/reward.json", 0.0, {"without_verdict": 1.0}),
    ("echo yes > /logs/verifier/reward.txt; exit 1", 0.0, {"without_verdict": 1.0}),
]


@pytest.mark.parametrize(("script", "value", "scores"), VERDICTS)
async def test_a_reward_is_what_the_tests_write(tmp_path, script, value, scores):
    made, _ = harbor(task_in(tmp_path, **{"tests/test.sh": script}))
    async with stand("done") as here:
        score = await played(made, here.llm)
    assert score.value == value
    assert scores.items() <= score.scores.items()


async def test_a_reward_that_the_agent_wrote_itself_is_gone_before_the_tests(tmp_path, caplog):
    forged = "mkdir -p /logs/verifier; echo 1 > /logs/verifier/reward.json; echo 1 > /logs/verifier/reward.txt"
    made, _ = harbor(task_in(tmp_path, **{"tests/test.sh": "exit 4"}))
    async with stand(call(forged), "done") as here:
        assert (await played(made, here.llm)).value == 0.0
    assert "task" in caplog.text


# Reading ------------------------------------------------------------------------------------------------------------

REFUSED = [
    ("task.toml", "[agent\n", "line 1"),
    ("task.toml", 'steps = [{name = "a"}]\n', "steps"),
    ("task.toml", "[environment]\ngpus = 1\n", "environment.gpus"),
    ("task.toml", '[environment]\nos = "windows"\n', "environment.os"),
    ("task.toml", '[verifier]\nenvironment_mode = "separate"\n', "environment_mode"),
    ("task.toml", '[verifier.env]\nKEY = "${KEY}"\n', "verifier.env.KEY"),
    ("tests/test.sh", None, "test.sh"),
    ("instruction.md", None, "instruction.md"),
    ("environment/Dockerfile", None, "Dockerfile"),
    ("environment/docker-compose.yaml", "services: {}\n", "one container"),
    ("environment/Dockerfile", "WORKDIR /app\n", "no FROM"),
    ("environment/Dockerfile", "FROM a\nFROM b\n", "Dockerfile:2"),
    ("environment/Dockerfile", "FROM a\n\nUSER nobody\n", "Dockerfile:3: USER"),
    ("environment/Dockerfile", "FROM a\nCOPY --from=x /a /b\n", "Dockerfile:2"),
    ("environment/Dockerfile", "FROM a\nCOPY absent /b\n", "absent"),
    ("environment/Dockerfile", "FROM a\nADD https://a.b/c /b\n", "Dockerfile:2"),
    ("environment/Dockerfile", "FROM a\nENV A=${B:-c}\n", "Dockerfile:2: ENV"),
    ("environment/Dockerfile", "FROM a\nRUN true && \\\n  cat <<EOF\n", "Dockerfile:2"),
]


@pytest.mark.parametrize(("name", "text", "place"), REFUSED)
def test_a_task_that_needs_what_is_not_here_is_refused_with_its_place(tmp_path, name, text, place):
    with pytest.raises(UserError, match="task") as error:
        harbor(task_in(tmp_path, **{name: text}))
    assert place in str(error.value)
    assert "\n" not in str(error.value)


def test_a_folder_without_tasks_and_a_harness_that_is_not_there_are_refused(tmp_path):
    with pytest.raises(UserError, match=r"task\.toml"):
        harbor(tmp_path)
    task_in(tmp_path)
    for harness in (
        "codez",
        {"name": "mini_swe", "pythn": "x"},
        ["no-such-program"],
        {"name": "bash", "turns": 1, "x": 2},
    ):
        with pytest.raises(UserError, match="harness"):
            harbor(tmp_path, harness=harness)


async def test_an_images_steps_are_taken_once_and_copies_lie_where_docker_puts_them(tmp_path):
    recipe = (
        'FROM python:3.12 AS only\nARG WHO=me\nENV A=1\nENV B="$A 2" D=${NO}\nENV C three\nWORKDIR /app\nWORKDIR sub\n'
        "COPY one.txt two.txt ./\nCOPY folder /app/folder\nCOPY one.txt renamed\n# a comment\n"
        'RUN echo "$A$B$C$D$WHO" > made && \\\n    echo more >> made\nCMD ["true"]\nEXPOSE 80\n'
    )
    files = {"environment/one.txt": "1", "environment/two.txt": "2", "environment/folder/in.txt": "3"}
    test = "cat made /app/folder/in.txt renamed one.txt two.txt && echo 1 > /logs/verifier/reward.txt\n"
    made, provider = harbor(task_in(tmp_path, **files, **{"environment/Dockerfile": recipe, "tests/test.sh": test}))
    async with stand("done") as here, made:
        task = SimpleNamespace(row=made.tasks()[0])
        scores = await asyncio.gather(*(made(task, here.more()[0]) for _ in range(3)))
        text = (provider.started[1].root / "app/sub/made").read_text()
    assert [score.value for score in scores] == [1.0] * 3
    assert text == "11 2threeme\nmore\n"
    assert provider.images[0] == "python:3.12"
    assert len(set(provider.images[1:])) == 1


async def test_a_step_that_fails_ends_the_run_with_its_line(tmp_path):
    made, _ = harbor(task_in(tmp_path, **{"environment/Dockerfile": "FROM a\nRUN echo no network; exit 1\n"}))
    async with stand() as here:
        with pytest.raises(RunFailure, match=r"Dockerfile:2.*no network"):
            await played(made, here.llm)


def test_the_last_tasks_are_held_out_and_a_prebuilt_image_needs_no_dockerfile(tmp_path):
    write(tmp_path, count=16)
    made, _ = harbor(tmp_path)
    assert [row["task"][:2] for row in made.held_out()] == ["14", "15"]
    assert len(made.tasks()) == 14
    prebuilt = {"task.toml": '[environment]\ndocker_image = "x:1"\nworkdir = "/w"\n', "environment/Dockerfile": None}
    one, _ = harbor(task_in(tmp_path / "more", **prebuilt))
    recipe = one._tasks["task"].recipe
    assert (recipe.base, recipe.workdir, recipe.steps) == ("x:1", "/w", ())
