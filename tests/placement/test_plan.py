"""Plans: read back as written, mode derived, and refused with the smallest fix when a cluster cannot run them."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlinf.placement.devices import Cluster
from rlinf.placement.grammar import PlacementError
from rlinf.placement.plan import EdgePlan, Plan, Prediction, RolePlan, complaints, from_yaml, load, save, to_yaml

GB = 10**9
NAMES = st.sampled_from(["rollout", "judge", "trainer", "critic", "reference"])


@st.composite
def role_plans(draw):
    active = draw(st.integers(0, 80 * GB))
    return RolePlan(
        devices=tuple(sorted(draw(st.sets(st.integers(0, 40), max_size=9)))),
        phases=tuple(sorted(draw(st.sets(st.integers(0, 4), min_size=1)))),
        resident=draw(st.booleans()),
        items=draw(st.none() | st.integers(1, 999)),
        lease_items=draw(st.none() | st.integers(1, 999)),
        active_bytes=active,
        parked_bytes=draw(st.integers(0, active)),
    )


plans = st.builds(
    Plan,
    st.dictionaries(NAMES, role_plans(), min_size=1),
    st.dictionaries(
        st.tuples(NAMES, NAMES), st.builds(EdgePlan, st.none() | st.integers(1, 99), st.booleans()), max_size=3
    ),
    st.none() | st.builds(Prediction, st.floats(0.01, 1e5), st.floats(0, 1e5)),
    st.text(alphabet=st.characters(codec="utf-8", exclude_categories=("Cc", "Cs", "Zl", "Zp")), max_size=40),
)


@given(plans)
def test_a_plan_is_read_back_as_it_was_written(plan):
    assert from_yaml(to_yaml(plan)) == plan


def test_a_plan_survives_its_file(tmp_path):
    plan = Plan({"rollout": RolePlan((0, 1, 2, 5))}, reason="nothing else fits")
    save(plan, tmp_path / "plan.yaml")
    assert "0-2,5" in (tmp_path / "plan.yaml").read_text()
    assert load(tmp_path / "plan.yaml") == plan


@pytest.mark.parametrize(
    ("devices", "mode"),
    [
        ([(0, 1), (0, 1)], "collocated"),
        ([(0,), (1,)], "disaggregated"),
        ([(0, 1), (1,)], "hybrid"),
        ([(0,), (1,), (0, 1)], "hybrid"),
        ([(0, 1)], "collocated"),
    ],
)
def test_the_mode_follows_from_the_devices(devices, mode):
    assert Plan({str(index): RolePlan(numbers) for index, numbers in enumerate(devices)}).mode == mode


def test_every_mistake_of_a_file_is_in_one_error():
    with pytest.raises(PlacementError) as caught:
        from_yaml(
            """
            role: {}
            reason: [a]
            predicted: {step_seconds: soon, bound_seconds: 1}
            roles:
              rollout: {devices: 3-1, itms: 3}
              judge: {devices: all, items: 0}
              trainer: {devices: 0-3, resident: maybe, phases: [x], active_bytes: 1, parked_bytes: 2}
              critic: 7
            edges:
              rollout judge: {}
              rollout -> trainer: {items: many}
            """
        )
    text = str(caught.value)
    for words in (
        "role is not a key of a plan; did you mean 'roles'?",
        "reason is ['a']: write text",
        "predicted.step_seconds is 'soon'",
        "runs backwards: write 1-3",
        "roles.rollout.itms is not a key of a plan; did you mean 'items'?",
        "roles.judge.devices is 'all': a plan names devices alone",
        "roles.judge.items is 0: write a whole number, at least 1",
        "roles.trainer.resident is 'maybe': write true or false",
        "roles.trainer.phases is ['x']",
        "roles.trainer.parked_bytes is more than its active_bytes",
        "roles.critic is 7, not a mapping",
        "edges.rollout judge is not an edge",
        "edges.rollout -> trainer.items is 'many'",
    ):
        assert words in text


@pytest.mark.parametrize(
    ("text", "words"), [("", r"roles.*missing"), ("[", "not YAML"), ("3", "not a mapping"), ("roles: 3", "not a map")]
)
def test_a_file_that_holds_no_plan_says_so(text, words):
    with pytest.raises(PlacementError, match=words):
        from_yaml(text)


CLUSTER = Cluster.declared([{"gpu": 4}], {"gpu": 80 * GB})


def two(**changes):
    rollout = {"devices": (0, 1, 2, 3), "phases": (0,), "active_bytes": 50 * GB, "parked_bytes": 2 * GB}
    trainer = {"devices": (0, 1, 2, 3), "phases": (1,), "active_bytes": 60 * GB, "parked_bytes": 5 * GB}
    return Plan(
        {
            "rollout": RolePlan(**rollout | changes.get("rollout", {})),
            "trainer": RolePlan(**trainer | changes.get("trainer", {})),
        },
        {("rollout", "trainer"): EdgePlan()},
    )


def test_an_edit_that_overfills_a_device_names_the_one_change_that_frees_enough():
    problems = complaints(two(), CLUSTER)
    assert len(problems) == 1
    assert "110.0 GB of 80.0 in phase 0 (rollout 50.0, trainer 60.0)" in problems[0]
    assert "roles.trainer.resident to false" in problems[0]
    assert complaints(two(rollout={"resident": False}, trainer={"resident": False}), CLUSTER) == ()


def test_a_role_that_can_never_fit_says_how_much_has_to_go():
    plan = Plan({"trainer": RolePlan((0,), active_bytes=100 * GB)})
    assert "20.0 GB have to go" in complaints(plan, CLUSTER)[0]


def test_an_active_role_that_does_not_fit_beside_another_has_to_move():
    plan = two(rollout={"parked_bytes": 50 * GB, "resident": False}, trainer={"resident": False})
    assert any("move rollout" in problem for problem in complaints(plan, CLUSTER))


def test_more_devices_than_exist_work_before_its_input_and_crowding_are_refused():
    plan = two(rollout={"devices": (3, 4), "phases": (2,), "resident": False}, trainer={"resident": False})
    text = "\n".join(complaints(plan, CLUSTER))
    assert "roles.rollout.devices: device 4 " in text
    assert "roles.trainer.phases: " in text
    small = {"active_bytes": GB, "parked_bytes": 0}
    crowded = two(rollout=small, trainer=small | {"phases": (0,)})
    assert "phase 0 on device 0" in complaints(crowded, CLUSTER)[0]
    turns = two(rollout=small | {"lease_items": 4}, trainer=small | {"phases": (0,), "lease_items": 4})
    assert complaints(turns, CLUSTER) == ()


def test_an_edge_to_a_role_without_devices_is_refused():
    plan = Plan({"rollout": RolePlan((0,))}, {("rollout", "judge"): EdgePlan()})
    assert "no role 'judge'" in complaints(plan, CLUSTER)[0]
