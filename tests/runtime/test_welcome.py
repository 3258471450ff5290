"""What goes to all hosts goes along a tree: everyone gets it once, and nobody sends to many."""

from hypothesis import given
from hypothesis import strategies as st

from rlinf.runtime.system.host_service import FAN_OUT, children


@given(hosts=st.integers(1, 5000))
def test_every_host_but_the_first_has_exactly_one_parent_which_comes_before_it(hosts):
    parents = {}
    for host in range(hosts):
        for child in children(host, hosts):
            assert child not in parents
            parents[child] = host
        assert len(children(host, hosts)) <= FAN_OUT
    assert sorted(parents) == list(range(1, hosts))
    assert all(parent < child for child, parent in parents.items())


def test_a_thousand_hosts_are_four_steps_from_the_first_at_most():
    depth = {0: 0}
    for host in range(1000):
        for child in children(host, 1000):
            depth[child] = depth[host] + 1
    assert max(depth.values()) == 4
