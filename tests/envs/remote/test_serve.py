"""Frames between a simulator's two sides, and a server that strangers speak to."""

import ast
import contextlib
import io
import socket
import sys
import threading
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import array_shapes, arrays

from rlinf.envs.remote import serve
from tests.envs.remote.arm import Arm

FRAMES = settings(derandomize=True, deadline=None, max_examples=80)
ARRAYS = st.sampled_from(["<f4", "<f8", "|u1", "<i8", "|b1", ">i4", "<f2"]).flatmap(
    lambda dtype: arrays(
        dtype,
        array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=4),
        elements={"allow_nan": False} if np.dtype(dtype).kind == "f" else None,
    )
)
LEAVES = (
    st.none()
    | st.booleans()
    | st.integers(-(2**53), 2**53)
    | st.floats(allow_nan=False)
    | st.text()
    | st.binary()
    | ARRAYS
)
TREES = st.recursive(LEAVES, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4))


def received(raw: bytes, known=True):
    return serve.receive(io.BytesIO(raw).read, known)


def equal(one, other) -> bool:
    if isinstance(one, np.ndarray):
        return one.shape == other.shape and one.dtype == other.dtype.newbyteorder("=") and np.array_equal(one, other)
    if isinstance(one, dict):
        return list(one) == list(other) and all(equal(one[name], other[name]) for name in one)
    if isinstance(one, list):
        return len(one) == len(other) and all(map(equal, one, other))
    return type(one) is type(other) and one == other


@FRAMES
@given(TREES)
def test_what_is_sent_is_what_comes(tree):
    assert equal(received(b"".join(map(bytes, serve.pack(tree)))), tree)


@FRAMES
@given(TREES, st.data())
def test_damaged_frames_are_refused_and_nothing_else_happens(tree, data):
    raw = bytearray(b"".join(map(bytes, serve.pack(tree))))
    for _ in range(data.draw(st.integers(1, 4))):
        raw[data.draw(st.integers(0, len(raw) - 1))] = data.draw(st.integers(0, 255))
    with contextlib.suppress(serve.Garbled, serve.Closed):
        received(bytes(raw[: data.draw(st.integers(0, len(raw)))]))


@pytest.mark.parametrize("value", [{1: 2}, object(), np.array(["text"]), {"a": {2}}])
def test_what_cannot_be_sent_is_told_to_who_sends_it(value):
    with pytest.raises(TypeError, match=r"sent|keys"):
        serve.pack(value)


@pytest.mark.parametrize(
    ("address", "split"),
    [
        ("robot:7000", ("robot", 7000)),
        (":7000", ("127.0.0.1", 7000)),
        ("[::1]:7000", ("::1", 7000)),
        ("::1:7000", ("::1", 7000)),
        ("[fe80::1%eth0]:7000", ("fe80::1%eth0", 7000)),
    ],
)
def test_an_address_is_a_host_and_a_port_of_either_internet(address, split):
    assert serve.split_address(address) == split


def test_it_listens_at_addresses_of_version_six():
    class Ready(Exception):
        pass

    def ready(line):
        raise Ready(line)

    with socket.socket(socket.AF_INET6) as probe:
        try:
            probe.bind(("::1", 0))
        except OSError:
            pytest.skip("this machine has no IPv6")
    with pytest.raises(Ready, match=r"listening.*\[::1\]:\d+"):
        serve.listen(None, "", "[::1]:0", 1, ready)


def test_long_frames_are_refused_before_memory_is_taken_for_them():
    huge = serve._PREFIX.pack(b"RLR1", 10, 1 << 40)
    with pytest.raises(serve.Garbled, match="too long"):
        received(huge)
    with pytest.raises(serve.Garbled, match="too long"):  # of somebody who has not said the token
        received(serve._PREFIX.pack(b"RLR1", 1 << 20, 0), known=False)
    lying = b'{"#array":["<f8",[4000000000,4000000000]]}'
    with pytest.raises(serve.Garbled, match=r"longer.*body"):
        received(serve._PREFIX.pack(b"RLR1", len(lying), 0) + lying)


def test_the_file_needs_python_3_8_and_numpy_alone():
    text = Path(serve.__file__).read_text()
    tree = ast.parse(text, feature_version=(3, 8))
    imported = {
        name.partition(".")[0]
        for node in ast.walk(tree)
        if isinstance(node, ast.Import | ast.ImportFrom)
        for name in ([each.name for each in node.names] if isinstance(node, ast.Import) else [node.module])
    }
    assert imported - set(sys.stdlib_module_names) == {"numpy"}


@pytest.fixture
def server():
    """Address of a server in a thread of this process, which takes two connections at a time."""
    told, ready = [], threading.Event()

    def say(line):
        told.append(line.rpartition(" ")[2])
        ready.set()

    threading.Thread(target=serve.listen, args=(Arm, "secret", "127.0.0.1:0", 2, say), daemon=True).start()
    assert ready.wait(60)
    return told[0]


def talk(address, *frames):
    """What a server answers to bytes, one answer for each; the last is None where it has closed the connection."""
    host, port = address.split(":")
    answers = []
    with socket.create_connection((host, int(port)), 10) as connection:
        for frame in frames:
            connection.sendall(frame)
            try:
                answers.append(serve.receive(connection.recv))
            except (serve.Closed, ConnectionError):
                answers.append(None)
    return answers


def call(**about):
    return b"".join(map(bytes, serve.pack(about)))


HELLO = {"call": "hello", "version": 1, "token": "secret"}


@pytest.mark.parametrize(
    ("frames", "said"),
    [
        ([b"GET / HTTP/1.1\r\nHost: robot\r\n\r\n"], "not rlinf's protocol"),
        ([call(call="step")], "must be hello"),
        ([call(call="hello", version=1, token="guess")], "token is wrong"),
        ([call(call="hello", version=1)], "token is wrong"),
        ([call(call="hello", version=1, token="\ud800")], "token is wrong"),
        ([call(call="hello", version=9, token="secret")], "version 1 "),
        ([call(**HELLO, options={"wrong": "made"})], "at this port"),
        ([call(**HELLO, options={"reech": 2})], "'reech'"),
        ([serve._PREFIX.pack(b"RLR1", 3, 0) + b"[1,"], "means nothing"),
    ],
)
def test_whoever_is_wrong_at_first_is_told_why_and_cut_off(server, frames, said):
    answer, after = talk(server, *frames, call(call="save"))
    assert said in answer["error"]
    assert after is None
    assert talk(server, call(**HELLO))[0]["value"]["max_steps"] == 5, "and others are served"


def test_whoever_is_wrong_later_may_go_on(server):
    hello, unknown, bad, saved = talk(
        server, call(**HELLO, num_envs=2), call(call="eval"), call(call="reset", seeds=3), call(call="save")
    )
    assert hello["value"]["can"] == ["save", "restore"]
    assert "no call 'eval'" in unknown["error"]
    assert bad["kind"] == "TypeError"
    assert len(saved["value"]) == 2


def test_connections_have_places_and_give_them_back(server):
    host, port = server.split(":")
    held = [socket.create_connection((host, int(port)), 10) for _ in range(2)]
    for connection in held:
        connection.sendall(call(**HELLO))
        assert "value" in serve.receive(connection.recv)
    with socket.create_connection((host, int(port)), 10) as late:
        assert "all 2 places" in serve.receive(late.recv)["error"]
    held[0].sendall(call(call="nothing"))
    assert "error" in serve.receive(held[0].recv)
    for connection in held:
        connection.close()


class Timer:
    """A timer that goes off when the test says so."""

    def __init__(self, seconds, call):
        self.seconds, self.call, self.runs, self.daemon = seconds, call, False, False

    def start(self):
        self.runs = True

    def cancel(self):
        self.runs = False


class Robot(Arm):
    """An arm that can hold."""

    most_change = (0.5, 1.0)
    hold_after = 0.25

    def __init__(self, num_envs=1):
        super().__init__(num_envs)
        self.calls = []

    def hold(self):
        self.calls.append("hold")

    def close(self):
        self.calls.append("close")


@pytest.fixture
def guarded():
    """(guard, its robot, its timers, what its clock says)."""
    timers, now = [], [10.0]

    def timer(*about):
        timers.append(Timer(*about))
        return timers[-1]

    robot = Robot()
    guard = serve.Guard(robot, clock=lambda: now[0], timer=timer)
    guard.reset(np.array([0]), np.array([0]))
    return guard, robot, timers, now


def moved(guard, *actions, number=None):
    return guard.step(np.array([actions], np.float32), np.array([True]), number=number)


def test_a_robot_holds_where_no_action_comes_in_time_and_takes_none_before_the_next_reset(guarded, capsys):
    guard, robot, timers, _ = guarded
    assert not timers  # it stands still
    moved(guard, 0.1, 0.0)
    (timer,) = timers
    assert timer.runs
    assert timer.seconds == 0.25
    timer.call()
    assert robot.calls == ["hold"]
    assert "0.25 s" in capsys.readouterr().out
    with pytest.raises(serve.Stale, match="holds"):
        moved(guard, 0.1, 0.0)
    assert robot.place.tolist() == [[np.float32(0.1), 0.0]]
    guard.reset(np.array([0]), np.array([0]))
    holds = [moved(guard, 0.1, 0.0)["timing"]["holds"] for _ in range(2)]
    assert holds == [1, 0]


def test_a_timer_that_goes_off_while_the_action_comes_holds_nothing(guarded):
    guard, robot, timers, _ = guarded
    moved(guard, 0.1, 0.0)
    moved(guard, 0.1, 0.0)
    assert [timer.runs for timer in timers] == [False, True]
    timers[0].call()
    assert not robot.calls
    moved(guard, 0.1, 0.0)


def test_actions_for_an_old_observation_are_refused_and_the_newest_s_are_done(guarded):
    guard, robot, _, _ = guarded
    seen = guard.timing()["seen"]
    newest = moved(guard, 0.1, 0.0, number=seen)["timing"]["seen"]
    with pytest.raises(serve.Stale, match=str(seen)):
        moved(guard, 0.1, 0.0, number=seen)
    moved(guard, 0.1, 0.0, number=newest)
    np.testing.assert_allclose(robot.place, [[0.2, 0.0]], rtol=1e-6)


def test_joints_change_no_faster_than_their_limits_and_what_is_cut_is_said(guarded):
    guard, robot, _, _ = guarded
    cut = [moved(guard, *action)["timing"]["limited"].tolist() for action in ((0.9, 0.0), (-0.9, 0.5), (0.0, 2.0))]
    assert cut == [[False], [True], [True]]
    np.testing.assert_allclose(robot.place, [[0.9 + 0.4 + 0.0, 0.0 + 0.5 + 1.5]], rtol=1e-6)


def test_ages_are_those_of_observations_when_their_actions_come(guarded):
    guard, _, _, now = guarded
    now[0] = 10.25
    assert moved(guard, 0.1, 0.0)["timing"]["age"] == 0.25
    now[0], guard._simulator.taken = 10.75, 10.5  # what it will see now was seen by its camera before
    assert moved(guard, 0.1, 0.0)["timing"]["age"] == 0.5
    now[0] = 11.0
    assert moved(guard, 0.1, 0.0)["timing"]["age"] == 0.5


def test_a_robot_that_moves_when_the_connection_ends_holds_before_it_is_closed(guarded):
    guard, robot, _, _ = guarded
    moved(guard, 0.1, 0.0)
    guard.close()
    assert robot.calls == ["hold", "close"]


@pytest.mark.parametrize("wrong", [{"hold_after": 0.0}, {"hold": None}, {"most_change": [-1.0, 0.0]}])
def test_a_robot_that_cannot_be_watched_is_refused(wrong):
    kind = type("Wrong", (Robot,), wrong)
    if wrong.get("hold", 0) is None:
        kind = type("Wrong", (Arm,), {"hold_after": 0.25})
    with pytest.raises(ValueError, match=r"hold_after|most_change"):
        serve.Guard(kind(1))
