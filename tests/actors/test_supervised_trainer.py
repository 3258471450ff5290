"""The trainer of given texts learns what a plain loop over single sequences learns, whatever the micro-batches."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from transformers import AutoModelForSequenceClassification

from rlinf import ActorSystem, Stream
from rlinf.actors.reference import Reference
from rlinf.actors.supervised_trainer import SupervisedTrainer
from rlinf.data.datasets.load import ConversationOptions, load_conversations
from rlinf.data.tokenizer import load_tokenizer
from rlinf.flows.text import annotate_in_order
from rlinf.models.language.build import build_model, pictures_of
from rlinf.training.supervised import OUTPUT, Likelihood, Preference, Scores, measured
from tests import pictured
from tests.actors import toys

SHARED = {"model": toys.configuration(), "tokenizer": toys.ALPHABET, "lr": 0.01, "grad_clip": 1e9}
TOKENIZER = load_tokenizer(toys.ALPHABET)
TEXTS = [("12", "345", "35"), ("4", "0", "1234"), ("999>", "77", "6"), ("12", "9", "88")]


@pytest.fixture
async def system():
    async with ActorSystem.local() as system:
        yield system


def pairs(scored=False, **more):
    rows = [{"prompt": prompt, "chosen": one, "rejected": other, **more} for prompt, one, other in TEXTS]
    options = ConversationOptions(kind="pairs", scored=scored)
    return load_conversations(TOKENIZER, train=rows, shuffle=False, options=options).train.take(len(rows))


def conversations():
    rows = [{"prompt": prompt, "completion": one} for prompt, one, _ in TEXTS]
    return load_conversations(TOKENIZER, train=rows, shuffle=False).train.take(len(rows))


def logprob(net, prompt, answer):
    """Of the answer's tokens, end token included, one sequence at a time."""
    before, after = TOKENIZER(prompt)["input_ids"], [*TOKENIZER(answer)["input_ids"], TOKENIZER.eos_token_id]
    logits = net(torch.tensor([before + after])).logits[0, len(before) - 1 : -1]
    return torch.log_softmax(logits, -1)[torch.arange(len(after)), after]


def plain(loss_of, **kind):
    """Loss, norm of the gradient and weights after one step of AdamW on what `loss_of` says of the model."""
    net = build_model(toys.configuration(), TOKENIZER, **kind).eval()
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.01, weight_decay=0.0)
    loss = loss_of(net)
    loss.backward()
    norm = torch.nn.utils.get_total_norm([each.grad for each in net.parameters() if each.grad is not None])
    optimizer.step()
    return loss.item(), norm.item(), loss_of(net).item()


def likelihood(net):
    return -torch.cat([logprob(net, prompt, answer) for prompt, answer, _ in TEXTS]).mean()


def preference(net, reference=None):
    held = build_model(toys.configuration(), TOKENIZER).eval() if reference is None else reference
    each = []
    for prompt, one, other in TEXTS:
        here = logprob(net, prompt, one).sum() - logprob(net, prompt, other).sum()
        with torch.no_grad():
            there = logprob(held, prompt, one).sum() - logprob(held, prompt, other).sum()
        each.append(-F.logsigmoid(0.5 * (here - there)))
    return torch.stack(each).mean()


def scores(net):
    def score(*texts):
        return net(torch.tensor([[*TOKENIZER("".join(texts))["input_ids"], TOKENIZER.eos_token_id]])).logits[0, 0]

    apart = [(score(prompt, one), score(prompt, other)) for prompt, one, other in TEXTS]
    return torch.stack([-F.logsigmoid(a - b - 2.0) + 0.1 * (a + b) ** 2 for a, b in apart]).mean()


CASES = {
    "sft": (Likelihood(), conversations, likelihood, {}),
    "dpo": (Preference(beta=0.5), pairs, preference, {}),
    "reward": (
        Scores(center=0.1),
        lambda: pairs(scored=True, margin=2),
        scores,
        {"kind": AutoModelForSequenceClassification},
    ),
}


@pytest.mark.parametrize("budget", [8, 10_000])
@pytest.mark.parametrize("name", CASES)
async def test_a_step_is_that_of_a_plain_loop(system, name, budget):
    objective, make, loss_of, kind = CASES[name]
    groups = make()
    trainer = await system.spawn(SupervisedTrainer, objective=objective, micro_batch_tokens=budget, **SHARED)
    if name == "dpo":
        groups = await annotate_in_order(
            groups, await system.spawn(Reference, model=SHARED["model"], tokenizer=toys.ALPHABET)
        )
    found = await trainer.train(Stream.of(reversed(groups)))
    loss, norm, after = plain(loss_of, **kind)
    assert found["loss"] == pytest.approx(loss, abs=1e-5)
    assert found["grad_norm"] == pytest.approx(norm, rel=1e-3)
    heard = [group async for group in trainer.outputs(groups)]
    assert measured(objective, heard)["loss"] == pytest.approx(after, abs=2e-3)  # see the bound on Adam in CONTRIBUTING
    assert (await trainer.samples(1))[0]["prompt"] == "12"


async def test_a_reference_under_the_adapters_says_what_one_of_its_own_says(system):
    lora = {"r": 2, "alpha": 4.0, "target_modules": ["q_proj", "v_proj"]}
    shared = {**SHARED, "objective": Preference(), "lora": lora}
    inside = await system.spawn(SupervisedTrainer, name="inside", reference="adapters_off", **shared)
    beside = await system.spawn(SupervisedTrainer, name="beside", **shared)
    groups = await annotate_in_order(
        pairs(), await system.spawn(Reference, model=SHARED["model"], tokenizer=toys.ALPHABET)
    )
    for _ in range(3):
        one, other = await inside.train(pairs()), await beside.train(groups)
        assert one["loss"] == pytest.approx(other["loss"], abs=1e-5)
    assert one["rewards/margins"] != 0


async def test_weights_of_messages_weigh_their_tokens(system):
    groups = conversations()
    weighed = [group.with_column("weight", [np.full(each.learned_tokens, 1.0 + (n == 0), np.float32)])
               for n, group in enumerate(groups) for each in group.samples]  # fmt: skip
    trainer = await system.spawn(SupervisedTrainer, objective=Likelihood(), **{**SHARED, "lr": 0.0})
    once, twice = await trainer.train([*groups, groups[0]]), await trainer.train(weighed)
    assert twice["loss"] == pytest.approx(once["loss"], abs=1e-6)


async def test_what_is_missing_is_said(system):
    trainer = await system.spawn(SupervisedTrainer, objective=Preference(), **SHARED)
    with pytest.raises(ValueError, match=r"nobody.*reference's.*reference.logprobs"):
        await trainer.train(pairs())
    with pytest.raises(ValueError, match=r"0.*1 samples:.*chosen"):
        await trainer.train(conversations())
    with pytest.raises(ValueError, match=r"train:.*batch"):
        await trainer.train([])
    with pytest.raises(ValueError, match=r"epochs"):
        await system.spawn(SupervisedTrainer, name="more", objective=Likelihood(), epochs=2, **SHARED)
    with pytest.raises(ValueError, match=r"trainer.outputs\(groups\) tell"):
        measured(Likelihood(), conversations())


@pytest.mark.parametrize("objective", [Likelihood(), Preference(beta=0.5)], ids=["sft", "dpo"])
async def test_given_texts_about_pictures_are_read_with_them(system, objective):
    """The log-probs of answers, by transformers' own model on one sequence at a time, with its own positions."""
    tokenizer, source = load_tokenizer(pictured.TOKENIZER), pictured.MODELS["qwen2_5_vl"]
    shows = pictures_of(source, tokenizer)
    images = pictured.pictures((16, 24), (8, 8))
    rows = [
        {"prompt": "a<image>b", "chosen": "12", "rejected": "3", "images": [{"bytes": images[0].content}]},
        {"prompt": "c", "chosen": "1", "rejected": "0", "images": []},
        {"prompt": "<image>", "chosen": "2", "rejected": "bb", "images": [{"bytes": images[1].content}]},
    ]
    kind = "pairs" if isinstance(objective, Preference) else "sft"
    columns = {} if kind == "pairs" else {"completion": "chosen"}
    options = ConversationOptions(kind=kind, columns=columns, pictures=shows)
    groups = load_conversations(tokenizer, train=rows, shuffle=False, options=options).train.take(len(rows))
    trainer = await system.spawn(SupervisedTrainer, objective=objective, model=source, tokenizer=pictured.TOKENIZER)
    net = build_model(source, tokenizer).eval()
    async for group in trainer.outputs(groups):
        for sample in group.samples:
            ids = np.concatenate([group.prompt.token_ids, sample.response_ids])
            seen = {} if not group.prompt.images else shows.inputs(group.prompt.images)
            kinds = torch.tensor(ids == shows.placeholder).long()[None]
            with torch.no_grad():
                logits = net(torch.tensor(ids)[None], mm_token_type_ids=kinds, **seen).logits[0]
            logits[:, list(shows.banned)] = -torch.inf
            begun = len(group.prompt.token_ids)
            wanted = torch.log_softmax(logits[begun - 1 : -1], -1)[range(len(ids) - begun), ids[begun:]]
            assert sample.per_token[OUTPUT] == pytest.approx(wanted.numpy(), abs=1e-5)
