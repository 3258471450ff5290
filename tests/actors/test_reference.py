"""The reference: what it says of tokens does not depend on company, and its weights change on all ranks or on none."""

from __future__ import annotations

import asyncio
import dataclasses

import numpy as np
import pytest
import torch

from rlinf import ActorSystem, Stream
from rlinf.actors.reference import FILE, Arrivals, Blend, Reference
from rlinf.config.learning import ReferenceSettings
from rlinf.data.packing import Row, pack
from rlinf.data.sample import Group
from rlinf.data.tokenizer import load_tokenizer
from rlinf.data.weights import Weights
from rlinf.models.language.build import ModelSpec, build_model, build_module
from rlinf.runtime.actor.actor import endpoint
from rlinf.runtime.base.clock import run_virtual
from rlinf.runtime.base.errors import UserError
from rlinf.training.weight_sync import LoadRefused, LoadTimeout
from tests.actors import toys

TOKENIZER = load_tokenizer(toys.ALPHABET)
MODEL = toys.configuration()
SHARED = {"model": MODEL, "tokenizer": toys.ALPHABET}
GROUPS = toys.groups(9, longest=12)


class Seen(Reference):
    """One that shows its weights, and counts its forward passes."""

    @endpoint
    async def shown(self) -> dict[str, torch.Tensor]:
        return {name: tensor.clone() for name, tensor in self._exact.named_parameters()}

    @endpoint
    async def computing(self) -> dict[str, torch.Tensor]:
        return {name: tensor.clone() for name, tensor in self.policy.model.named_parameters()}

    @endpoint
    async def count(self) -> None:
        self.passes = 0
        self.policy.register_forward_hook(self._passed)

    def _passed(self, *_: object) -> None:
        self.passes += 1

    @endpoint
    async def counted(self) -> int:
        return self.passes


@pytest.fixture
async def system():
    async with ActorSystem.local() as system:
        yield system


def named(seed):
    """The weights of another model."""
    model = build_model(MODEL, TOKENIZER, seed=seed)
    return {name: tensor.detach() for name, tensor in model.named_parameters()}


def weights(version, seed=1):
    return Weights.pack(named(seed).items(), version)


def said(groups, column="ref_logprobs"):
    """What was said of each sample, by (prompt id, index)."""
    return {(s.group, s.index): s.per_token[column] for group in groups for s in group.samples}


def by_a_plain_loop(groups, seed=0):
    """The same, one sample after the other, by the model's own forward."""
    net = build_model(MODEL, TOKENIZER, seed=seed)
    net.set_attn_implementation("eager")
    found = {}
    for sample in (sample for group in groups for sample in group.samples):
        ids = torch.tensor([[*sample.prompt.token_ids, *sample.response_ids]])
        begins = len(sample.prompt.token_ids) - 1
        with torch.no_grad():
            logits = net(ids).logits[0, begins : begins + len(sample.response_ids)] / (sample.temperature or 1.0)
        rows = torch.log_softmax(logits, dim=-1)
        found[sample.group, sample.index] = rows.gather(1, torch.tensor(sample.response_ids)[:, None])[:, 0].numpy()
    return found


def assert_close(found, expected, tolerance=2e-6):
    assert found.keys() == expected.keys()
    for key, logprobs in expected.items():
        np.testing.assert_allclose(found[key], logprobs, atol=tolerance, rtol=1e-5)


def assert_same_bits(found, expected):
    assert {key: row.tobytes() for key, row in found.items()} == {key: row.tobytes() for key, row in expected.items()}


def as_they_come(groups, order):
    """A stream of them in another order, with nothing at hand at times."""

    async def source():
        for number in order:
            await asyncio.sleep(0.002 * (number % 3))
            yield groups[number]

    return Stream.of(source())


@pytest.mark.parametrize("order", ["prompt", "arrival"])
@pytest.mark.parametrize("budget", [1, 60, 8192])
async def test_log_probs_are_those_of_a_plain_forward_however_groups_are_packed(system, order, budget):
    reference = await system.spawn(Reference, **SHARED, order=order, micro_batch_tokens=budget, logprob_chunk=7)
    found = await reference.logprobs(GROUPS).collect()
    assert sorted(group.prompt.id for group in found) == list(range(len(GROUPS)))
    assert_close(said(found), by_a_plain_loop(GROUPS))


async def test_log_probs_are_the_trainers_to_the_last_bit_before_anyone_has_learned(system):
    device = torch.device("cpu")
    policy = build_module(ModelSpec(MODEL, seed=5), TOKENIZER, device)
    reference = await system.spawn(Reference, **SHARED, seed=5)
    for group in await reference.logprobs(GROUPS).collect():
        expected, _ = policy(pack([Row.of(sample) for sample in group.samples]))
        found = np.concatenate([sample.per_token["ref_logprobs"] for sample in group.samples])
        assert found.tobytes() == expected.detach().numpy().tobytes()


async def test_neither_company_nor_arrival_nor_rank_changes_a_bit_of_what_is_said(system):
    one = await system.spawn(Reference, name="one", **SHARED)
    three = await system.spawn(Reference, name="three", hosts=[0, 0, 0], **SHARED)
    expected = said(await one.logprobs(GROUPS).collect())
    assert_same_bits(said(await one.logprobs(as_they_come(GROUPS, [4, 0, 8, 2, 1, 7, 3, 6, 5])).collect()), expected)
    shared = await three.logprobs(as_they_come(GROUPS, range(len(GROUPS)))).collect()
    assert len(shared) == len(GROUPS)  # each by one of them
    assert_same_bits(said(shared), expected)


@pytest.mark.parametrize(("order", "passes"), [("prompt", 9), ("arrival", 1)])
async def test_groups_at_hand_are_computed_together_where_runs_need_not_repeat(system, order, passes):
    reference = (await system.spawn(Seen, **SHARED, order=order))[0]
    await reference.count()
    await reference.logprobs(GROUPS).collect()
    assert await reference.counted() == passes


def test_a_group_is_not_kept_waiting_for_others():
    async def main():
        async def source():
            for group in GROUPS[:3]:
                yield group
                await asyncio.sleep(10.0)

        loop = asyncio.get_running_loop()
        async with ActorSystem.local() as system:
            reference = await system.spawn(Reference, **SHARED, order="arrival")
            begun = loop.time()
            return [loop.time() - begun async for _ in reference.logprobs(Stream.of(source()))]

    assert run_virtual(main())[0] == [0.0, 10.0, 20.0]


async def test_no_more_is_held_than_a_micro_batch_beyond_what_is_computed():
    taken = []

    async def source():
        for group in GROUPS:
            taken.append(group.prompt.id)
            yield group

    arrivals = Arrivals(source(), most=1)
    seen = []
    while came := await arrivals.take():
        seen += [group.prompt.id for group in came]
        assert (len(came), len(taken)) == (1, len(seen))
        await asyncio.sleep(0.0)
    await arrivals.close()
    assert seen == taken == list(range(len(GROUPS)))


@pytest.mark.parametrize("hosts", [1, 2])
def test_when_nobody_wants_the_groups_any_more_those_who_make_them_stop(hosts):
    async def main():
        ended = asyncio.Event()

        async def source():
            try:
                for group in GROUPS:
                    yield group
                    await asyncio.sleep(10.0)
            finally:
                ended.set()

        async with ActorSystem.local(hosts, serialize=hosts > 1) as system:
            reference = await system.spawn(Reference, hosts=[hosts - 1], **SHARED)
            told = reference.logprobs(Stream.of(source()))
            assert (await anext(told)).prompt.id == 0
            await told.close()
            await ended.wait()
            return asyncio.get_running_loop().time()

    assert run_virtual(main())[0] < 10.0


async def test_what_came_before_the_source_failed_is_said_and_then_why_it_failed(system):
    async def source():
        yield GROUPS[0]
        raise OSError("no more groups")

    reference = await system.spawn(Reference, **SHARED)
    found = []

    async def read():
        async for group in reference.logprobs(Stream.of(source())):
            found.append(group.prompt.id)

    with pytest.raises(OSError, match=r"more groups"):
        await read()
    assert found in ([], [0])  # a failed stream need not be read to its end
    assert_close(said(await reference.logprobs(GROUPS[:1]).collect()), by_a_plain_loop(GROUPS[:1]))


async def test_a_teacher_fills_its_own_column_and_leaves_the_others(system):
    reference = await system.spawn(Reference, **SHARED)
    teacher = await system.spawn(Reference, name="teacher", **SHARED, seed=3, column="teacher_logprobs")
    found = await teacher.logprobs(reference.logprobs(Stream.of(GROUPS))).collect()
    assert_close(said(found), by_a_plain_loop(GROUPS))
    assert_close(said(found, "teacher_logprobs"), by_a_plain_loop(GROUPS, seed=3))


async def test_greedy_and_empty_answers_have_log_probs_too(system):
    first = GROUPS[0]
    greedy = dataclasses.replace(first.samples[0], temperature=0.0)
    none, no_ids = np.zeros(0, np.float32), np.zeros(0, np.int64)
    empty = dataclasses.replace(first.samples[1], response_ids=no_ids, logprobs=none, versions=no_ids)
    odd = [
        Group(first.prompt, (greedy, empty)),
        Group(GROUPS[1].prompt, (dataclasses.replace(empty, prompt=GROUPS[1].prompt),)),
    ]
    nothing = Group(GROUPS[2].prompt, ())
    reference = await system.spawn(Reference, **SHARED)
    found = await reference.logprobs([*odd, nothing]).collect()
    assert len(found) == 3
    assert_close(said(found), by_a_plain_loop(odd))
    assert await reference.logprobs([]).collect() == []


async def test_bfloat16_is_close(system):
    reference = await system.spawn(Seen, **SHARED, dtype="bfloat16")
    found = await reference.logprobs(GROUPS).collect()
    assert {tensor.dtype for tensor in (await reference[0].computing()).values()} == {torch.bfloat16}
    assert_close(said(found), by_a_plain_loop(GROUPS), tolerance=0.05)


@pytest.mark.parametrize(
    ("setting", "text"),
    [
        ({"decay": 1.0}, "decay=1.0"),
        ({"order": "any"}, r"order='any': expected"),
        ({"dtype": "float16"}, "dtype='float16'"),
        ({"micro_batch_tokens": 0}, "micro_batch_tokens=0"),
    ],
)
async def test_wrong_settings_are_named(system, setting, text):
    with pytest.raises(ValueError, match=text):
        await system.spawn(Reference, **SHARED, **setting)


# Weights -------------------------------------------------------------------------------------------------------------


async def test_all_ranks_take_weights_over(system):
    reference = await system.spawn(Reference, hosts=[0, 0], **SHARED)
    assert await reference.load(weights(4, seed=2)) == 4
    for rank in reference:
        assert_close(said(await rank.logprobs(GROUPS).collect()), by_a_plain_loop(GROUPS, seed=2))


async def test_weights_that_do_not_fit_are_named_and_change_nothing(system):
    reference = await system.spawn(Seen, hosts=[0, 0], **SHARED, decay=0.5)
    before = await reference.shown()
    other = named(1)
    first = next(iter(other))
    other[first] = other[first][:-1]
    for change in (reference.load, reference.follow):
        with pytest.raises(LoadRefused, match=f"version 7.*{first}.*model"):
            await change(Weights.pack(other.items(), 7))
    after = await reference.shown()
    assert all(torch.equal(new[name], old[name]) for new, old in zip(after, before, strict=True) for name in old)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
async def test_a_reference_that_follows_is_the_exponential_mean_of_what_it_followed(system, dtype):
    decay = 0.999
    reference = await system.spawn(Seen, hosts=[0, 0], **SHARED, decay=decay, dtype=dtype)
    mean = {name: tensor.double() for name, tensor in named(0).items()}
    for version in range(1, 8):
        assert await reference.follow(weights(version, seed=version)) == version
        other = named(version)
        mean = {name: decay * tensor + (1 - decay) * other[name].double() for name, tensor in mean.items()}
    for kept, computing in zip(await reference.shown(), await reference.computing(), strict=True):
        for name, tensor in mean.items():
            torch.testing.assert_close(kept[name].double(), tensor, atol=1e-7, rtol=1e-6)
            assert torch.equal(computing[name], kept[name].to(computing[name].dtype))


async def test_ranks_of_which_one_loads_and_one_follows_do_neither(system):
    reference = await system.spawn(Seen, hosts=[0, 0], **SHARED, decay=0.5)
    before = await reference.shown()
    same = weights(3, seed=2)
    told = [reference[0].follow(same, deadline=0.2), reference[1].load(same, deadline=0.2)]
    assert [type(error) for error in await asyncio.gather(*told, return_exceptions=True)] == [LoadTimeout] * 2
    after = await reference.shown()
    assert all(torch.equal(new[name], old[name]) for new, old in zip(after, before, strict=True) for name in old)


async def test_a_reference_without_decay_follows_nobody(system):
    reference = await system.spawn(Reference, name="reference", **SHARED)
    with pytest.raises(ValueError, match=r"reference\[0\] follows"):
        await reference.follow(weights(1))


@pytest.mark.parametrize("settings", [{}, {"decay": 0.9}, {"decay": 0.9, "dtype": "bfloat16"}])
async def test_a_restored_reference_goes_on_to_the_last_bit(system, tmp_path, settings):
    one = await system.spawn(Seen, hosts=[0, 0], name="one", **SHARED, **settings)
    two = await system.spawn(Seen, hosts=[0, 0], name="two", **SHARED, seed=9, **settings)
    await one.load(weights(4, seed=2))
    if settings:
        await one.follow(weights(5, seed=3))
    assert await one.save(tmp_path / "reference") == str(tmp_path / "reference")
    assert await two.restore(tmp_path / "reference") == (5 if settings else 4)
    if settings:
        for each in (one, two):
            await each.follow(weights(6, seed=4))
    for rank in two:
        assert_same_bits(said(await rank.logprobs(GROUPS).collect()), said(await one[0].logprobs(GROUPS).collect()))
    (first, _), (second, other) = await one.shown(), await two.shown()
    assert all(torch.equal(tensor, second[name]) and torch.equal(tensor, other[name]) for name, tensor in first.items())


async def test_what_is_saved_are_the_weights_of_that_moment(system, tmp_path):
    reference = (await system.spawn(Seen, **SHARED, decay=0.5))[0]
    before = await reference.shown()
    saving = reference.save(tmp_path)
    await asyncio.gather(saving, reference.load(weights(1, seed=2)))
    await reference.restore(tmp_path)
    after = await reference.shown()
    assert all(torch.equal(after[name], tensor) for name, tensor in before.items())


async def test_what_cannot_be_restored_says_why(system, tmp_path):
    reference = await system.spawn(Reference, name="reference", **SHARED)
    with pytest.raises(FileNotFoundError, match=r"reference.*saved"):
        await reference.restore(tmp_path)
    narrow = {**SHARED, "model": toys.configuration(hidden_size=16)}
    other = await system.spawn(Reference, name="narrow", **narrow)
    await other.save(tmp_path)
    with pytest.raises(ValueError, match=r"reference.safetensors.*reference\[0\]:.*model"):
        await reference.restore(tmp_path)
    (tmp_path / FILE).write_bytes((tmp_path / FILE).read_bytes()[:-8])
    with pytest.raises(ValueError, match=r"damaged:.*checkpoint"):
        await reference.restore(tmp_path)
    assert_close(said(await reference.logprobs(GROUPS).collect()), by_a_plain_loop(GROUPS))


# One of several teachers ----------------------------------------------------------------------------------------------


async def test_several_teachers_mix_their_probabilities(system):
    groups = GROUPS
    for name, share, seed in (("a", 0.25, 0), ("b", 0.75, 1)):
        teacher = await system.spawn(
            Reference, **SHARED, seed=seed, name=name, column=f"teacher_logprobs/{name}",
            blend=Blend(name, ("a", "b"), share),
        )  # fmt: skip
        groups = await teacher.logprobs(groups).collect()
    a, b = by_a_plain_loop(GROUPS), by_a_plain_loop(GROUPS, 1)
    assert_close(said(groups, "teacher_logprobs/a"), a)
    assert_close(said(groups, "teacher_logprobs/b"), b)
    mixed = {key: np.log(0.25 * np.exp(a[key]) + 0.75 * np.exp(b[key])) for key in a}
    assert_close(said(groups, "teacher_logprobs"), mixed)


async def test_a_routed_teacher_answers_for_its_own_prompts_alone(system):
    def routed(group, value):
        prompt = dataclasses.replace(group.prompt, row={"kind": value})
        return Group(prompt, tuple(dataclasses.replace(sample, prompt=prompt) for sample in group.samples))

    groups = [routed(group, "ab"[number % 2]) for number, group in enumerate(GROUPS)]
    for name, seed in (("a", 0), ("b", 1)):
        teacher = await system.spawn(
            Reference, **SHARED, seed=seed, name=name, column=f"teacher_logprobs/{name}",
            blend=Blend(name, ("a", "b"), 0.5, route="kind"),
        )  # fmt: skip
        groups = await teacher.logprobs(Stream.of(groups)).collect()
    a, b = by_a_plain_loop(GROUPS), by_a_plain_loop(GROUPS, 1)
    assert_close(said(groups, "teacher_logprobs"), {key: (b if key[0] % 2 else a)[key] for key in a})
    assert {*groups[0].samples[0].per_token} & {"teacher_logprobs/a", "teacher_logprobs/b"} != {
        "teacher_logprobs/a", "teacher_logprobs/b",
    }  # fmt: skip
    with pytest.raises(UserError, match=r"'c'.*'kind'"):
        await teacher.logprobs([routed(GROUPS[0], "c")]).collect()


# What teachers say of whole distributions -----------------------------------------------------------------------------


async def test_a_teacher_says_its_likeliest_tokens_or_its_hidden_states_beside_log_probs(system):
    net = build_model(MODEL, TOKENIZER, seed=0)
    head = net.get_output_embeddings().weight.detach()
    plain = said(await (await system.spawn(Reference, name="plain", **SHARED)).logprobs(GROUPS).collect())
    top = await system.spawn(Reference, name="top", **SHARED, distribution="top", top_k=3, logprob_chunk=5)
    hidden = await system.spawn(
        Reference, name="hidden", **SHARED, distribution="hidden", blend=Blend("b", ("a", "b"), 0.5, None, 40, "total")
    )
    likeliest, states = [await each.logprobs(GROUPS).collect() for each in (top, hidden)]
    assert_close(said(likeliest), plain)
    tables = said(states, "teacher_hidden")
    for key, found in said(likeliest, "teacher_top").items():
        table = torch.from_numpy(tables[key])
        assert table.shape[1] == 1 + 40
        assert bool((table[:, 0] == 1).all())
        assert not table[:, 1 + head.shape[1] :].any()
        temperature = next(s.temperature for group in GROUPS for s in group.samples if (s.group, s.index) == key)
        logprobs = (table[:, 1 : 1 + head.shape[1]] @ head.T / temperature).log_softmax(-1)
        values, ids = logprobs.topk(3)
        np.testing.assert_array_equal(found[:, 0], ids.numpy())
        np.testing.assert_allclose(found[:, 1], values.numpy(), atol=3e-6)


async def test_a_teacher_of_another_tokenizer_reads_the_text_in_its_own_tokens(system, tmp_path):
    other = load_tokenizer({"characters": ">9876543210"})
    other.save_pretrained(tmp_path)
    teacher = await system.spawn(
        Reference, name="teacher", **SHARED, settings=ReferenceSettings(tokenizer=str(tmp_path))
    )
    found = said(await teacher.logprobs(GROUPS).collect())
    net = build_model(MODEL, other, seed=0)
    for sample in (sample for group in GROUPS for sample in group.samples):
        ids = [*other(sample.prompt.text)["input_ids"], *other(TOKENIZER.decode(sample.response_ids))["input_ids"]]
        if len(ids) != len(sample.response_ids) + len(sample.prompt.text):
            continue  # it has tokens that are no characters
        begins = len(sample.prompt.text)
        with torch.no_grad():
            rows = (net(torch.tensor([ids])).logits[0, begins - 1 : -1] / sample.temperature).log_softmax(-1)
        expected = rows.gather(1, torch.tensor(ids[begins:])[:, None])[:, 0].numpy()
        np.testing.assert_allclose(found[sample.group, sample.index], expected, atol=3e-6, rtol=1e-5)
    both = ReferenceSettings(tokenizer=str(tmp_path), distribution="top")
    with pytest.raises(ValueError, match="another tokenizer"):
        await system.spawn(Reference, name="both", **SHARED, settings=both)
