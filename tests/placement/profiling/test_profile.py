"""Profiles: exact where measured, honest between, silent outside; merged as if measured in one run."""

import json
import math
import statistics

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlinf.placement.profile import BESIDE, Footprint, OutOfRange, Profile, Release, StageProfile, Timing, load, save

seconds = st.floats(1e-4, 1e4)
sizes = st.integers(1, 4096)
timings = st.builds(Timing, sizes, sizes, seconds, st.floats(0, 10), st.integers(1, 50), st.none() | st.just(1e-4))
releases = st.lists(st.floats(0, 1), max_size=8).map(lambda shares: Release((*sorted(shares), 1.0)))
footprints = st.builds(Footprint, sizes, st.integers(0, 2**40), st.integers(0, 2**40), st.floats(0, 9), st.floats(0, 9))


def unique(values, key):
    return tuple({key(one): one for one in values}.values())


stages = st.builds(
    StageProfile,
    st.lists(timings, max_size=5).map(lambda found: unique(found, lambda one: (one.batch, one.devices))),
    st.none() | releases,
    st.lists(footprints, max_size=3).map(lambda found: unique(found, lambda one: one.devices)),
    st.sampled_from(["gpu", "cpu"]),
)
names = st.sampled_from(["rollout", "trainer", "judge"])
profiles = st.builds(
    Profile,
    st.just("m"),
    st.just("8x"),
    st.dictionaries(names, stages),
    st.dictionaries(st.tuples(names, names), seconds),
    st.lists(st.builds(Timing, st.just(1), sizes, seconds), max_size=2).map(tuple),
    st.sampled_from(["", "rlinf.flows.grpo"]),
    st.integers(0, 512),
    st.lists(st.tuples(names, names, st.booleans()), max_size=3).map(tuple),
    st.lists(st.tuples(names, names), max_size=2).map(tuple),
)


@given(profiles)
def test_a_profile_is_read_back_as_it_was_saved(tmp_path_factory, profile):
    path = tmp_path_factory.mktemp("profile") / "profile.json"
    save(profile, path)
    assert load(path) == profile


@given(st.lists(seconds, min_size=1, max_size=8), st.lists(seconds, min_size=1, max_size=8))
def test_merging_two_runs_equals_measuring_once(first, second):
    def summed(times):
        mean = statistics.fmean(times)
        return Timing(4, 2, mean, statistics.pstdev(times), len(times), busy=mean / 2)

    merged, whole = summed(first).merged(summed(second)), summed(first + second)
    assert merged.work == pytest.approx(whole.work)
    assert merged.count == whole.count
    assert merged.seconds == pytest.approx(whole.seconds)
    assert merged.spread == pytest.approx(whole.spread, abs=1e-5 * max(first + second))


def stage_of(law, batches=(8, 64, 512), devices=(1, 4, 16)):
    return StageProfile(tuple(Timing(b, n, law(b, n)) for b in batches for n in devices))


@given(
    fixed=st.floats(0, 5), per_item=st.floats(0.001, 1), serial=st.floats(0, 1), parallel=st.floats(0.01, 10),
    batch=st.integers(8, 512), devices=st.integers(1, 16),
)  # fmt: skip
def test_affine_batches_and_amdahl_devices_lie_inside_the_bar(fixed, per_item, serial, parallel, batch, devices):
    def law(items, count):
        return (fixed + per_item * items) * (serial + parallel / count)

    guess = stage_of(law).time(batch, devices)
    assert abs(law(batch, devices) - guess.seconds) <= guess.error + 1e-9


@given(
    scale=st.floats(0.01, 10), of_batch=st.floats(0, 1.2), of_devices=st.floats(-1, 0),
    batch=st.integers(8, 512), devices=st.integers(1, 16),
)  # fmt: skip
def test_power_laws_are_met_without_looking_at_the_bar(scale, of_batch, of_devices, batch, devices):
    def law(items, count):
        return scale * items**of_batch * count**of_devices

    assert stage_of(law).time(batch, devices).seconds == pytest.approx(law(batch, devices))


def test_at_a_measured_place_the_bar_is_the_measured_spread():
    stage = StageProfile((Timing(8, 1, 2.0, spread=0.25, count=9), Timing(8, 2, 1.5)))
    there = stage.time(8, 1)
    assert (there.seconds, there.error) == (2.0, 0.25)


def test_the_bar_is_wider_between_measurements_than_at_them():
    stage = stage_of(lambda items, count: (1 + items) / count)
    assert stage.time(200, 8).error > stage.time(64, 4).error == 0


@pytest.mark.parametrize(
    ("batch", "devices", "words"), [(4, 1, "4 items"), (8, 32, "32 devices"), (1024, 2, "devices")]
)
def test_outside_of_what_was_measured_nothing_is_claimed_unasked(batch, devices, words):
    profile = Profile("m", "8x", {"rollout": stage_of(lambda items, count: items / count)})
    with pytest.raises(OutOfRange, match=words):
        profile.time("rollout", batch, devices)


@given(batch=st.integers(1, 5000), devices=st.integers(1, 300), exponent=st.floats(-1, 0))
def test_extrapolation_that_is_asked_for_holds_every_scaling_from_none_to_perfect(batch, devices, exponent):
    def law(items, count):
        return items**0.5 * count**exponent

    guess = stage_of(law).time(batch, devices, extrapolate=True)
    assert abs(law(batch, devices) - guess.seconds) <= guess.error + 1e-6


def test_an_unknown_stage_is_named_with_those_that_there_are():
    with pytest.raises(OutOfRange, match=r"stage.*rollout"):
        Profile("m", "8x", {"rollout": StageProfile()}).time("judge", 1, 1)


@given(st.lists(st.floats(0.01, 100), min_size=1, max_size=50), st.integers(1, 16))
def test_a_release_curve_never_says_that_a_chunk_left_too_early(finished, chunks):
    ordered, last = sorted(finished), max(finished)
    for k, share in enumerate(Release.from_times(finished).chunks(chunks), 1):
        assert share * last >= ordered[math.ceil(k / chunks * len(ordered) - 1e-9) - 1] - 1e-9


def test_a_release_curve_shows_the_tail():
    curve = Release.from_times([1.0] * 95 + [10.0] * 5, points=20)
    assert curve.at(0.5) == pytest.approx(0.1)
    assert curve.at(1.0) == 1.0
    assert curve.chunks(2) == (pytest.approx(0.1), 1.0)


@given(releases, releases)
def test_merged_curves_lie_between_the_two(first, second):
    merged = first.merged(second)
    for share in (0.25, 0.5, 1.0):
        ends = sorted((first.at(share), second.at(share)))
        if len(first.shares) == len(second.shares):
            assert ends[0] - 1e-9 <= merged.at(share) <= ends[1] + 1e-9
    assert merged.shares[-1] == 1.0


def test_memory_is_never_guessed_below_what_was_seen():
    stage = StageProfile(footprints=(Footprint(4, 100, 10, 1.0, 2.0), Footprint(8, 60, 6, 0.5, 1.0)))
    assert stage.footprint(6).active_bytes == 100
    assert stage.footprint(16).active_bytes == 60
    assert stage.footprint(2) == Footprint(2, 200, 20, 2.0, 4.0)


def test_profiles_of_other_models_machines_or_devices_do_not_merge():
    ours = Profile("a", "8x", {"rollout": StageProfile(kind="gpu")})
    with pytest.raises(ValueError, match=r"model 'b'"):
        ours.merged(Profile("b", "4x", {"rollout": StageProfile(kind=BESIDE)}))
    assert ours.mismatch("a", "8x") == ()
    assert ours.mismatch("a", "8x", "") == ()
    assert "'rlinf.flows.ppo'" in ours.mismatch("a", "8x", "rlinf.flows.ppo")[0]


def test_a_device_is_not_busy_for_longer_than_its_stage():
    assert Timing(8, 4, 2.0, busy=1.5).work == 6.0
    assert Timing(8, 4, 2.0).work == 8.0
    with pytest.raises(ValueError, match=r"busy.*between"):
        Timing(8, 4, 2.0, busy=2.5)


def test_merging_keeps_what_only_one_run_measured_and_the_worst_memory():
    first = Profile(
        "a",
        "8x",
        {"rollout": StageProfile((Timing(1, 1, 2.0),), footprints=(Footprint(1, 5, 1),))},
        flow="f",
        items=4,
        edges=(("a", "b", True),),
        published=(("a", "b"),),
    )
    again = StageProfile((Timing(1, 1, 4.0),), footprints=(Footprint(1, 4, 2),))
    transfers = {("rollout", "judge"): 1.0}
    edges, published = (("a", "b", False), ("a", "c", True)), (("a", "b"), ("c", "b"))
    stages = {"rollout": again, "judge": StageProfile()}
    second = Profile("a", "8x", stages, transfers, (Timing(1, 2, 3.0),), "f", 8, edges, published)
    merged = first.merged(second)
    assert merged.time("rollout", 1, 1).seconds == 3.0
    assert merged.stages["rollout"].footprint(1) == Footprint(1, 5, 2)
    assert set(merged.stages) == {"rollout", "judge"}
    assert merged.transfers == second.transfers
    assert (merged.flow, merged.items, merged.published) == ("f", 8, (("a", "b"), ("c", "b")))
    assert merged.edges == (("a", "b", False), ("a", "c", True)), "a barrier only where it always was one"
    assert merged.sync == second.sync


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ("{", "not a profile"),
        ("3", "version is 3"),
        ('{"version": 9}', r"version.*9.*program.*2"),
        ('{"version": 2}', r"'model'.*missing"),
        (
            json.dumps({"version": 2, "model": "m", "machine": "x", "transfers": [], "sync": [],
                        "stages": {"rollout": {"timings": [{"batch": 0, "devices": 1, "seconds": 1}],
                                               "release": None, "footprints": [], "kind": "gpu"}}}),
            r"'rollout':.*devices.*1",
        ),
    ],
)  # fmt: skip
def test_a_file_that_is_no_profile_says_what_is_wrong(tmp_path, body, words):
    path = tmp_path / "profile.json"
    path.write_text(body)
    with pytest.raises(ValueError, match=words):
        load(path)
