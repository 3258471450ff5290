"""Several models on one frozen base: each learns as if it were alone, by its own adapters, or all weights, and
optimizer."""

import numpy as np
import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from rlinf.actors.trainer import Trainer
from rlinf.algos.token_losses import TokenLoss
from rlinf.data.packing import Row
from rlinf.models.language.tenants import rows_apart
from rlinf.runtime.system.system import ActorSystem
from rlinf.training.optimizer import Adam
from rlinf.training.schedule import TokenPass
from tests.actors import toys
from tests.runs.library.test_token_steps import data, plain_logprobs, plain_loss

LORA = {"r": 4, "alpha": 32, "target_modules": ["q_proj", "v_proj", "down_proj"]}
OTHER = {"r": 2, "alpha": 32, "target_modules": "auto"}
ADAM = Adam(5e-3, weight_decay=0.1)
PPO = TokenLoss.of("ppo")


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    directory = tmp_path_factory.mktemp("base")
    toys.model().save_pretrained(directory)
    return str(directory)


@pytest.fixture(scope="module")
def untied(tmp_path_factory):
    directory = tmp_path_factory.mktemp("untied")
    toys.model(tie_word_embeddings=False).save_pretrained(directory)
    return str(directory)


SMALL = {"r": 1, "alpha": 1, "target_modules": "auto"}


async def spawned(system, base, lora=None, **more):
    own = lora or SMALL
    more = {"micro_batch_tokens": 12, **more}
    return await system.spawn(Trainer, model=base, tokenizer=toys.ALPHABET, lora=own, **more)


async def steps(trainer, model, count=3, adam=ADAM, seed=0):
    """Log-probs before each step."""
    seen = []
    for step in range(seed, seed + count):
        seen += await trainer.forward_backward(data(step), PPO, model)
        await trainer.optim_step(adam, model)
    return seen


async def adapters(trainer, model, tmp_path, name="saved"):
    await trainer.save_model(model, str(tmp_path / name))
    return load_file(tmp_path / name / "adapter_model.safetensors")


@pytest.mark.parametrize(("of", "head"), [("base", False), ("base", True), ("untied", True)])
async def test_gradients_and_three_steps_are_those_of_our_trainer_and_of_a_loop_with_peft(request, tmp_path, of, head):
    base = request.getfixturevalue(of)
    lora = {**LORA, "target_modules": [*LORA["target_modules"], "unembed"]} if head else LORA
    raw = Adam(1e8, eps=1e8)  # a first step of it moves weights by the gradient
    async with ActorSystem.local() as system:
        trainer = await spawned(system, base)
        await trainer.open_model("a", lora, 7)
        await trainer.open_model("grad", lora, 7)
        start = await adapters(trainer, "a", tmp_path, "start")
        await steps(trainer, "grad", 1, raw)
        gradient = await adapters(trainer, "grad", tmp_path, "grad")
        ours = await steps(trainer, "a")
        found = await adapters(trainer, "a", tmp_path)
        if head and of == "base":  # adapters of one of two tied layers cannot be merged, so they are no policy's
            with pytest.raises(ValueError, match="tied"):
                await spawned(system, base, lora=lora, name="alone")
            with pytest.raises(ValueError, match="tied"):
                await trainer.model_weights("a", 1)
        else:
            alone = await spawned(system, base, lora=lora, seed=7, name="alone")
            told = await steps(alone, "default")
            merged = {name: tensor.clone() for name, tensor in (await trainer.model_weights("a", 1)).named()}
            own = {name: tensor.clone() for name, tensor in (await alone.weights()).named()}
            for one, other in zip(ours, told, strict=True):
                np.testing.assert_allclose(one, other, atol=1e-6)
            assert toys.furthest(merged, own) < 1e-6
    layers = ["lm_head" if name == "unembed" else name for name in lora["target_modules"]]
    net = get_peft_model(
        AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32),
        LoraConfig(r=4, lora_alpha=32, target_modules=layers),
    )
    names = {name.replace(".default", ""): parameter for name, parameter in net.named_parameters() if "lora" in name}
    assert head == any("lm_head" in name for name in found)
    for name, parameter in names.items():
        parameter.data.copy_(start[name])
    optimizer = torch.optim.AdamW(names.values(), lr=5e-3, betas=(0.9, 0.95), eps=1e-12, weight_decay=0.1)
    for step in range(3):
        plain_loss(net, data(step), "ppo").backward()
        if not step:
            for name, parameter in names.items():
                torch.testing.assert_close(start[name] - gradient[name], parameter.grad, atol=1e-5, rtol=1e-5)
        optimizer.step()
        optimizer.zero_grad()
    assert toys.furthest(found, {name: parameter.detach() for name, parameter in names.items()}) < 1e-5


async def whole(trainer, model, tmp_path, name="saved"):
    await trainer.save_model(model, str(tmp_path / name))
    net = AutoModelForCausalLM.from_pretrained(tmp_path / name, dtype=torch.float32)
    return {path: parameter.detach() for path, parameter in net.named_parameters()}


async def test_a_model_of_all_weights_learns_what_our_trainer_and_a_plain_loop_learn(base, tmp_path):
    raw = Adam(1e8, eps=1e8)  # a first step of it moves weights by the gradient
    adam = Adam(5e-3, eps=1e-4, weight_decay=0.1)  # less would divide roundings by roundings where a gradient is 0
    async with ActorSystem.local() as system:
        trainer = await spawned(system, base)
        for model in ("w", "grad"):
            await trainer.open_model(model, None)
        start = await whole(trainer, "w", tmp_path, "start")
        await steps(trainer, "grad", 1, raw)
        moved = await whole(trainer, "grad", tmp_path, "grad")
        ours = [*await steps(trainer, "w", adam=adam), *await trainer.forward(data(9), "w")]
        found = await whole(trainer, "w", tmp_path)
        published = {name: tensor.clone() for name, tensor in (await trainer.model_weights("w", 1)).named()}
        same = {"model": base, "tokenizer": toys.ALPHABET, "micro_batch_tokens": 12}
        once, alone = [await system.spawn(Trainer, name=name, **same) for name in ("once", "alone")]
        await steps(once, "default", 1, raw)
        told = [*await steps(alone, "default", adam=adam), *await alone.forward(data(9))]
        own = [{name: tensor.clone() for name, tensor in (await one.weights()).named()} for one in (once, alone)]
    assert toys.furthest(found, published) == 0
    assert toys.furthest(moved, own[0]) < 1e-6
    assert toys.furthest(found, own[1]) < 1e-6
    for one, other in zip(ours, told, strict=True):
        np.testing.assert_allclose(one, other, atol=1e-6)
    net = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    optimizer = torch.optim.AdamW(net.parameters(), lr=5e-3, betas=(0.9, 0.95), eps=1e-4, weight_decay=0.1)
    for step in range(3):
        plain_loss(net, data(step), "ppo").backward()
        for name, parameter in net.named_parameters() if not step else ():
            torch.testing.assert_close(start[name] - moved[name], parameter.grad, atol=1e-5, rtol=1e-5)
        optimizer.step()
        optimizer.zero_grad()
    assert toys.furthest(found, {name: parameter.detach() for name, parameter in net.named_parameters()}) < 1e-5
    for datum, logprobs in zip(data(9), ours[-3:], strict=True):
        np.testing.assert_allclose(logprobs, plain_logprobs(net, datum).detach().numpy(), atol=1e-5)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
async def test_all_weights_and_adapters_of_one_base_learn_bit_for_bit_what_each_learns_alone(tmp_path, dtype):
    toys.model().bfloat16().save_pretrained(tmp_path / "base")
    models, results = {"w": None, "v": None, "a": LORA, "b": OTHER}, []
    for together in (False, True):
        async with ActorSystem.local() as system:
            trainer = await spawned(system, str(tmp_path / "base"), dtype=dtype, micro_batch_tokens=100)
            for name, lora in models.items():
                await trainer.open_model(name, lora, 7)
            seen = [await trainer.forward(data(9))]
            for step in range(2):
                passes = [TokenPass(data(step + 5 * n), PPO, name) for n, name in enumerate(models)]
                passes.append(passes.pop(1)._replace(loss=None))  # what learns nothing of it, last
                at_once = [passes] if together else [[each] for each in passes]
                seen += [arrays for some in at_once for arrays in await trainer.token_passes(some)]
                for name in "wab":
                    await trainer.optim_step(ADAM, name)
                if together:  # as one waits on the disk
                    await trainer.save_model("w", str(tmp_path / f"parked{step}"))
                    await trainer.close_model("w")
                    await trainer.open_model("w", None)
                    await trainer.load_model("w", str(tmp_path / f"parked{step}"))
            seen += [await trainer.forward(data(9)), await trainer.forward(data(9), "v")]
            (best,) = await trainer.likeliest([Row.of_datum(data(9)[1], ())], 3, "w")
            results.append((seen, best[0], await whole(trainer, "w", tmp_path, str(together))))
            if not together:
                with pytest.raises(ValueError, match="adapters"):
                    await trainer.load_model("a", str(tmp_path / str(together)))
                await trainer.save_model("a", str(tmp_path / "a"), False)
                with pytest.raises(ValueError, match="all weights"):
                    await trainer.load_model("w", str(tmp_path / "a"), False)
    (alone, best, weights), (beside, same, others) = results
    for one, other in zip(alone, beside, strict=True):
        assert [each.tolist() for each in one] == [each.tolist() for each in other]
    assert best.tolist() == same.tolist()
    assert toys.furthest(weights, others) == 0
    base = alone[0]
    for kept in alone[-2:]:  # neither the base nor who learned nothing has anything of the others
        assert [each.tolist() for each in kept] == [each.tolist() for each in base]


async def test_a_model_learns_bit_for_bit_the_same_whether_others_are_there_or_not(base, tmp_path):
    results = []
    for crowded in (False, True):
        async with ActorSystem.local() as system:
            trainer = await spawned(system, base)
            if crowded:
                await trainer.open_model("before", OTHER, 1)
                await steps(trainer, "before", 1)
            await trainer.open_model("a", LORA, 7)
            seen = await trainer.forward_backward(data(0), PPO, "a")
            if crowded:  # between the gradient and the step
                await trainer.open_model("after", {**LORA, "r": 8}, 2)
                await steps(trainer, "after", 2)
                await trainer.forward_backward(data(5), PPO, "before")
            await trainer.optim_step(ADAM, "a")
            if crowded:
                await trainer.close_model("before")
            seen += await steps(trainer, "a", 2, seed=1)
            results.append((seen, await adapters(trainer, "a", tmp_path, str(crowded))))
    (alone, weights), (beside, others) = results
    assert all((one == other).all() for one, other in zip(alone, beside, strict=True))
    assert weights.keys() == others.keys()
    assert all(torch.equal(weights[name], others[name]) for name in weights)


@pytest.mark.parametrize(("optimizer", "kind"), [(True, "adamw"), (False, "adamw"), (True, "adamw_8bit")])
async def test_saved_models_go_on_bit_for_bit_and_are_peft_s(base, tmp_path, optimizer, kind):
    lora = {**LORA, "target_modules": ["auto", "unembed"]}
    async with ActorSystem.local() as system:
        trainer = await spawned(system, base, kind=kind)
        await trainer.open_model("a", lora, 7)
        await steps(trainer, "a", 2)
        saved = str(tmp_path / "two")
        await trainer.save_model("a", saved, optimizer)
        await trainer.open_model("b", lora, 1)
        await steps(trainer, "b", 1, seed=20)
        await trainer.forward_backward(data(3), PPO, "b")
        if not optimizer:
            with pytest.raises(ValueError, match="without its optimizer"):
                await trainer.load_model("b", saved, True)
        await trainer.load_model("b", saved, optimizer)
        with pytest.raises(ValueError, match="forward_backward"):  # gradients of other weights
            await trainer.optim_step(ADAM, "b")
        (theirs,) = await trainer.forward(data(1)[:1], "b")
        await steps(trainer, "a", 1, seed=2)
        await steps(trainer, "b", 1, seed=2)
        one, other = await adapters(trainer, "a", tmp_path, "one"), await adapters(trainer, "b", tmp_path, "other")
        await trainer.open_model("c", OTHER, 1)
        with pytest.raises(ValueError, match="another model"):
            await trainer.load_model("c", saved, False)
        await trainer.open_model("d", {"path": saved}, 0)
        np.testing.assert_array_equal((await trainer.forward(data(1)[:1], "d"))[0], theirs)
    assert optimizer == all(torch.equal(one[name], other[name]) for name in one)
    net = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32), saved)
    np.testing.assert_allclose(plain_logprobs(net, data(1)[0]).detach().numpy(), theirs, atol=1e-5)


async def test_what_cannot_be_is_refused_and_leaves_the_others_as_they_are(base):
    async with ActorSystem.local() as system:
        four_bits = await spawned(system, base, {**SMALL, "base": "nf4"}, name="four", micro_batch_tokens=100)
        with pytest.raises(ValueError, match=r"model\.lora\.base"):
            await four_bits.open_model("w", None)
        trainer = await spawned(system, base)
        await trainer.open_model("a", LORA, 7)
        await trainer.forward_backward(data(0), PPO, "a")
        for name, lora, named in [
            ("a", LORA, "'a'"),
            ("x.y", LORA, "'x.y'"),
            ("b", {**LORA, "target_modules": "no"}, "no"),
        ]:
            with pytest.raises(ValueError, match=named):
                await trainer.open_model(name, lora, 0)
        with pytest.raises(ValueError, match="'b'"):
            await trainer.forward(data(0), "b")
        await trainer.optim_step(ADAM, "a")


@pytest.mark.parametrize(("threads", "chunk", "most"), [(1, 1024, 40), (2, 1024, 40), (2, 64, 100)])
async def test_models_that_learn_in_one_batch_learn_bit_for_bit_what_each_learns_alone(
    base, tmp_path, threads, chunk, most
):
    before, results = torch.get_num_threads(), []
    wide = {"r": 3, "alpha": 8, "target_modules": ["all-linear", "unembed"]}
    head = {"r": 2, "alpha": 8, "target_modules": ["unembed"]}
    tenants = {"a": (LORA, 7), "b": (OTHER, 1), "c": (wide, 2), "d": (head, 4), "idle": (wide, 3)}
    torch.set_num_threads(threads)
    try:
        for together in (False, True):
            async with ActorSystem.local() as system:
                trainer = await spawned(system, base, micro_batch_tokens=most, logprob_chunk=chunk)
                for name, (lora, seed) in tenants.items():
                    await trainer.open_model(name, lora, seed)
                seen = []
                for step in range(3):
                    passes = [
                        TokenPass(data(step, (5, 9, 1, 40)), PPO, "a"),
                        TokenPass(data(step + 10, (3,)), TokenLoss.of("cross_entropy"), "b"),
                        TokenPass(data(step + 20, (17, 30, 2)), PPO, "c"),
                        TokenPass(data(step + 30, (5, 6)), None, "idle"),
                        TokenPass(data(step + 40, (7, 3, 12)), PPO, "d"),
                    ]
                    at_once = [passes] if together else [[each] for each in passes]
                    seen += [arrays for some in at_once for arrays in await trainer.token_passes(some)]
                    for name in "abcd":
                        seen.append([np.array([*(await trainer.optim_step(ADAM, name)).values()])])
                saved = [await adapters(trainer, name, tmp_path, f"{together}{name}") for name in tenants]
                results.append((seen, saved))
    finally:
        torch.set_num_threads(before)
    (alone, weights), (beside, others) = results
    for one, other in zip(alone, beside, strict=True):
        assert [each.tolist() for each in one] == [each.tolist() for each in other]
    for one, other in zip(weights, others, strict=True):
        assert all(torch.equal(one[name], other[name]) for name in one)


async def test_on_a_base_in_bfloat16_models_learn_in_float32_what_they_learn_on_one_in_float32(tmp_path):
    toys.model().bfloat16().save_pretrained(tmp_path / "base")
    lora, results = {**LORA, "target_modules": ["all-linear", "unembed"]}, []
    for dtype in ("float32", "bfloat16"):
        async with ActorSystem.local() as system:
            trainer = await spawned(system, str(tmp_path / "base"), micro_batch_tokens=100, dtype=dtype)
            for name in ("a", "b"):
                await trainer.open_model(name, lora, 7)
            for step in range(3):
                both = [TokenPass(data(step), PPO, "a"), TokenPass(data(step), PPO, "b")]
                one, other = await trainer.token_passes(both)
                assert all((each == same).all() for each, same in zip(one, other, strict=True))
                for name in ("a", "b"):
                    await trainer.optim_step(ADAM, name)
            await trainer.close_model("b")
            await trainer.save_model("a", str(tmp_path / dtype))
            await trainer.open_model("c", lora, 1)
            await trainer.load_model("c", str(tmp_path / dtype), True)
            seen = [await trainer.forward(data(9), name) for name in ("a", "c")]
            assert all((each == same).all() for each, same in zip(*seen, strict=True))
            results.append((np.concatenate(seen[0]), await adapters(trainer, "a", tmp_path, f"{dtype}-end")))
    (exact, weights), (logprobs, learned) = results
    np.testing.assert_allclose(logprobs, exact, atol=0.05)
    assert {each.dtype for each in learned.values()} == {torch.float32}
    moved = torch.cat([each.flatten() for each in learned.values()])
    same = torch.cat([weights[name].flatten() for name in learned])
    assert torch.nn.functional.cosine_similarity(moved, same, dim=0) > 0.999


async def test_what_is_not_finite_in_one_model_reaches_no_other_in_its_batch(base):
    async with ActorSystem.local() as system:
        trainer = await spawned(system, base, micro_batch_tokens=100)
        for name in ("a", "b"):
            await trainer.open_model(name, LORA, 7)
        broken = data(0)
        broken[0].inputs["advantages"][1] = np.nan
        both = [TokenPass(broken, PPO, "a"), TokenPass(data(0), PPO, "b")]
        await trainer.token_passes(both)
        with pytest.raises(FloatingPointError):
            await trainer.optim_step(ADAM, "a")
        assert np.isfinite((await trainer.optim_step(ADAM, "b"))["grad_norm"])
        for wrong in (both[:1] * 2, [*both, TokenPass(data(1), PPO, "default")], [TokenPass(data(1), PPO, "no")]):
            with pytest.raises(ValueError, match=wrong[-1].model):
                await trainer.token_passes(wrong)
        await trainer.token_passes([TokenPass(data(1), PPO, "b")])


def test_where_rows_depend_on_one_another_nothing_is_computed_together():
    odd = torch.nn.Linear(9, 5)  # of no multiple do vector instructions leave nothing over
    found = rows_apart(odd)
    assert 9 * found.multiple % 32 == 0 if found.multiple else "OMP_NUM_THREADS" in found.why
    even = torch.nn.Linear(64, 32)
    threads = torch.get_num_threads()
    assert rows_apart(even).multiple in range(8, 129, 8)
    try:
        torch.set_num_threads(7)
        assert rows_apart(odd).multiple is None
    finally:
        torch.set_num_threads(threads)
