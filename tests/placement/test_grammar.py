"""Placement strings: what they mean, and that every mistake is shown at its place with what to write instead."""

import itertools
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlinf.placement.devices import Cluster, NodeGroup
from rlinf.placement.grammar import PlacementError, assign, parse


def test_the_documented_example_gives_each_process_its_resources():
    placed = parse("0-1:0-3,3-5,7-10:7-14", 16)
    assert placed[:4] == ((0,), (0,), (1,), (1,))
    assert placed[4:7] == ((3,), (4,), (5,))
    assert placed[7:] == tuple((resource,) for resource in (7, 7, 8, 8, 9, 9, 10, 10))


@pytest.mark.parametrize(
    ("text", "placed"),
    [
        ("all", ((0,), (1,), (2,), (3,))),
        ("all:0-7", tuple((rank // 2,) for rank in range(8))),
        ("all:0-1", ((0, 1), (2, 3))),
        ("all:0", ((0, 1, 2, 3),)),
        ("2", ((2,),)),
        ("0,3", ((0,), (3,))),
        (" 0 - 1 : 0 - 3 , 3 ", ((0,), (0,), (1,), (1,), (3,))),
        ("0-1:2-3,2-3:0-1", ((2,), (3,), (0,), (1,))),
    ],
)
def test_a_string_means(text, placed):
    assert parse(text, 4) == placed


@pytest.mark.parametrize(
    ("text", "column", "words"),
    [
        ("", 1, "missing here"),
        ("0-3,,5", 5, "missing here"),
        ("0,", 3, "missing here"),
        ("0-x", 1, "'0-x'"),
        ("-1", 1, "not a rank"),
        ("3,2-0", 3, "write 0-2"),
        ("0-3:", 5, "processes are missing"),
        (":0-3", 1, "resources are missing"),
        ("0-3:all", 5, "cannot be `all`"),
        ("0:0:0", 4, "a second colon"),
        ("0,all", 3, "`all` leaves nothing"),
        ("0-8", 1, "write 0-7"),
        ("0,9-10", 3, "write ranks below 8"),
        ("0-3,3-5", 5, "resource 3 is"),
        ("0,0", 3, "resource 0 is"),
        ("0-1:0-2", 1, "write 4 processes, 0-3"),
        ("0-2:0-1", 1, "write 1 processes, 0"),
        ("0-1:0-1,2-3:1-2", 13, "free one is 2"),
        ("0-1,2-3:4-5", 9, "gap: write 2-3"),
        ("0-1:1-2", 5, "process 0 has no"),
        ("0-99999999999", 1, "a smaller one"),
    ],
)
def test_a_mistake_is_shown_at_its_place_with_the_fix(text, column, words):
    with pytest.raises(PlacementError) as caught:
        parse(text, 8, key="placement.rollout")
    message = caught.value.complaints[0]
    assert words in message
    assert f"column {column}:" in message
    shown, marks, _ = message.split("\n")
    assert shown == f"placement.rollout: {text}"
    assert marks.index("^") == len("placement.rollout: ") + column - 1


def test_all_mistakes_of_a_string_are_reported_together():
    with pytest.raises(PlacementError) as caught:
        parse("x,3-1,0:", 8)
    assert [re.search(r"column (\d+)", message)[1] for message in caught.value.complaints] == ["1", "3", "9"]


@st.composite
def placements(draw):
    """Processes as some placement string may give them, and how many resources there are."""
    processes, resource = [], 0
    for kind in draw(st.lists(st.sampled_from(["one", "many", "wide"]), min_size=1, max_size=6)):
        resource += draw(st.integers(0, 3))
        count, share = draw(st.integers(1, 4)), draw(st.integers(1, 3))
        for _ in range(count):
            if kind == "wide":
                processes.append(tuple(range(resource, resource + share)))
                resource += share
            else:
                processes += [(resource,)] * (share if kind == "many" else 1)
                resource += 1
    return tuple(processes), resource + draw(st.integers(0, 3))


def written(processes):
    """A placement string, with a segment for each process or for several with the same resources."""
    parts, rank = [], 0
    for resources, alike in itertools.groupby(processes):
        count = len(list(alike))
        parts.append(f"{resources[0]}-{resources[-1]}:{rank}-{rank + count - 1}")
        rank += count
    return ",".join(parts)


@given(placements())
def test_what_is_written_is_read_back_the_same(case):
    processes, available = case
    assert parse(written(processes), available) == processes


@given(st.text(alphabet="0123456789-:, alx", max_size=20), st.integers(0, 12))
def test_any_text_is_either_a_whole_placement_or_a_placement_error(text, available):
    complaints = ()
    try:
        placed = parse(text, available)
    except PlacementError as error:
        complaints, placed = error.complaints, None
    if placed is None:
        assert complaints
        assert all(re.search(r"\^+\n  column \d+: .*", message) for message in complaints)
        return
    assert placed
    assert all(process and set(process) <= set(range(available)) for process in placed)
    assert parse(written(placed), available) == placed


MIXED = Cluster.declared(
    [{"a800": 8}, {"a800": 8}, {"rtx4090": 8}, {"franka": 2}, {}],
    {"a800": 80 << 30},
    [
        NodeGroup("a800", (0, 1)),
        NodeGroup("4090", (2,)),
        NodeGroup("robot", (3,), hardware="franka"),
        NodeGroup("cpu", (4,)),
    ],
)


def test_a_table_counts_ranks_inside_its_node_groups():
    placed = assign(
        {
            "trainer,reference": {"node_group": "a800", "placement": "0-15"},
            "rollout": {"node_group": "4090", "placement": "all"},
            "env": {"node_group": "robot", "placement": "0-1:0-3"},
            "agent": {"node_group": "node", "placement": "0-1:0-199"},
            "judge": {"node_group": "cpu", "placement": 0},
            "critic": {"node_group": "a800, 4090", "placement": "15-16"},
        },
        MIXED,
    )
    assert placed["trainer"].devices == placed["reference"].devices == tuple(range(16))
    assert placed["rollout"].devices == tuple(range(16, 24))
    assert [process[0].device for process in placed["env"].processes] == [24, 24, 25, 25]
    assert [process[0].node for process in placed["agent"].processes] == [0] * 100 + [1] * 100
    assert placed["agent"].devices == placed["judge"].devices == ()
    assert placed["judge"].processes[0][0].node == 4
    assert [process[0].kind for process in placed["critic"].processes] == ["a800", "rtx4090"]


def test_every_mistake_of_a_table_is_in_one_error():
    with pytest.raises(PlacementError) as caught:
        assign(
            {
                "trainr": "0-7",
                "rollout": {"node_group": "a80", "placement": "0"},
                "judge": {"group": "a800"},
                "critic,critic": "0-40",
                "env": {"node_group": "a800"},
                "reward": {"node_group": "a800", "placement": "7-8:0"},
                "policy": {"node_group": "4090,robot", "placement": "7-8:0"},
                "reference": 1.5,
            },
            MIXED,
            roles=["trainer", "rollout", "judge", "critic", "env", "reward", "policy", "reference"],
        )
    text = str(caught.value)
    for words in (
        "no role 'trainr' in this run; did you mean 'trainer'?",
        "placement.rollout.placement: there is no node group 'a80'; did you mean 'a800'?",
        "placement.judge.group: unknown",
        "role 'critic' is placed twice",
        "resource 40 does not exist",
        "placement.env: `placement` is missing",
        "process 0 spans nodes 0, 1",
        "process 0 spans nodes 2, 3",
        "1.5 is neither a placement string nor a rank",
    ):
        assert words in text
    assert len(caught.value.complaints) == 9


def test_a_process_cannot_mix_hardware_of_one_node():
    cluster = Cluster.declared([{"gpu": 1, "franka": 1}])
    with pytest.raises(PlacementError, match=r"process 0.*franka"):
        assign({"env": "0-1:0"}, cluster)


def test_a_cluster_without_devices_is_counted_by_nodes():
    assert [resource.node for resource in Cluster.declared([{}, {}]).resources()] == [0, 1]


def test_devices_are_numbered_through_the_nodes():
    cluster = Cluster.declared([{"gpu": 4}, {"gpu": 4}, {"gpu": 2}], {"gpu": 5})
    assert [len(node.devices) for node in cluster.nodes] == [4, 4, 2]
    assert [device.number for device in cluster.devices] == list(range(10))


@pytest.mark.parametrize(
    ("groups", "words"),
    [
        ([NodeGroup("a", (0,)), NodeGroup("a", (0,))], r"names.*groups"),
        ([NodeGroup("node", (0,))], "is reserved"),
        ([NodeGroup("a", (7,))], r"node 7"),
    ],
)
def test_a_wrong_group_is_refused(groups, words):
    with pytest.raises(ValueError, match=words):
        Cluster.declared([{"gpu": 1}], groups=groups)
