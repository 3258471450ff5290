"""Models split over ranks compute what plain transformers computes, and learn the same; in float64, so that rounding
hides nothing."""

from functools import cache
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from rlinf.config.learning import ParallelConfig
from rlinf.data.tokenizer import load_tokenizer
from rlinf.models.language.arrangement import arranged
from rlinf.models.language.build import build_model
from rlinf.models.language.fsdp import mistakes_in
from rlinf.models.language.tensor_parallel import zigzag
from rlinf.training.export import MODEL
from tests.actors import toys
from tests.actors.watched import in_double
from tests.training.programs.splits import CASES, EXPERTS, FROM, batch

PROGRAM = Path(__file__).parent / "programs" / "splits.py"
RUNS = {
    2: ("context, windows", "context, whole answers", "tensor", "expert", "expert, Mixtral"),
    4: (
        "tensor, context, expert",
        "context in fours",
        "context in copies",
        "tensor and slices",
        "tensor in copies",
    ),
}
"""By number of ranks, what is examined."""
PATIENCE = 150.0
"""Seconds for a job; generous, since tests share their cores."""
LR, CLIP, DECAY = 0.01, 0.05, 0.1


@pytest.fixture(scope="module")
def results(zygotes, tmp_path_factory):
    """What every split model answered, by its name, and the checkpoint that it saved."""
    found, saved = {}, "-"
    for world, names in RUNS.items():
        out = tmp_path_factory.mktemp("splits") / "out.pt"
        ranks = zygotes.run(PROGRAM, world, out, saved, *names)
        try:
            assert ranks.codes(PATIENCE) == [0] * world, ranks.everything()
        finally:
            ranks.end()
        saved = out.parent
        answers = torch.load(out, weights_only=False)
        found |= {name: {**answer, "saved": saved / name} for name, answer in answers.items()}
    return found


@cache
def plain(name):
    """Log-probs, gradients, and two steps, by transformers' own forward of one sequence after the other."""
    case = CASES[name]
    net = in_double(build_model(toys.configuration(case.kind, **case.more), load_tokenizer(toys.ALPHABET)).eval())
    optimizer = torch.optim.AdamW(net.parameters(), lr=LR, weight_decay=DECAY)
    steps, weights = [], []
    for _ in range(3):
        optimizer.zero_grad()
        loss, logprobs = by_itself(net, case.recipe)
        loss.backward()
        gradients = toys.gradients(net)
        norm = float(torch.nn.utils.clip_grad_norm_(net.parameters(), CLIP))
        optimizer.step()
        steps.append((float(loss.detach()), norm, gradients, logprobs))
        weights.append({name: parameter.detach().clone() for name, parameter in net.named_parameters()})
    return steps, weights


def by_itself(net, recipe):
    total, count, found = torch.zeros(()), 0, []
    for row in batch():
        ids = torch.tensor([[*row.prompt_ids, *row.response_ids]])
        spread = torch.log_softmax(net(ids).logits[0, len(row.prompt_ids) - 1 : -1] / row.temperature, -1)
        logprobs = spread.gather(1, torch.tensor(row.response_ids)[:, None])[:, 0]
        ratio = (logprobs - torch.tensor(row.old_logprobs)).exp()
        if recipe == "gspo":  # of the geometric mean of its tokens' ratios; every answer counts as one
            ratio = ratio.log().mean()[None].exp()
        total = total + torch.maximum(-row.advantage * ratio, -row.advantage * ratio.clamp(0.8, 1.28)).sum()
        count += len(ratio)
        found.append(logprobs.detach())
    return total / count, torch.cat(found)


@pytest.mark.torchrun
@pytest.mark.slow
@pytest.mark.timeout(300)
class TestASplitModel:
    pytestmark = pytest.mark.parametrize("name", [name for names in RUNS.values() for name in names])

    def test_gives_the_log_probs_of_the_plain_model(self, results, name):
        steps, _ = plain(name)
        # what a batch brings, such as temperatures, is float32
        assert torch.allclose(results[name]["outputs"][0], steps[0][3], rtol=0, atol=1e-6)

    def test_has_its_gradient_its_norm_and_its_loss(self, results, name):
        steps, _ = plain(name)
        loss, norm, gradients, _ = steps[0]
        found = {key: gradient / min(1.0, CLIP / norm) for key, gradient in results[name]["gradients"].items()}
        assert found.keys() == gradients.keys()
        # routers of mixtures make their weights in float32, whose rounding is 6e-8
        assert max(float((found[key] - gradients[key]).abs().max()) for key in found) < 1e-6
        for told, (loss, norm, *_) in zip(results[name]["steps"], steps, strict=False):
            assert (told["loss"], told["grad_norm"]) == pytest.approx((loss, norm), rel=1e-6)
            assert told["weight"] == (
                8 if CASES[name].recipe == "gspo" else sum(len(row.response_ids) for row in batch())
            )
        if "context" in CASES[name].parallel:  # and they stay whole where there is room for them
            assert ("micro_batch_tokens" not in CASES[name].settings) in results[name]["wholes"]

    def test_learns_what_it_learns_and_publishes_it_whole(self, results, name):
        _, weights = plain(name)
        found, began = results[name]["exported"], results[name]["began"]
        assert {key: tensor.shape for key, tensor in found.items()} == {k: t.shape for k, t in weights[1].items()}
        assert toys.furthest(found, weights[1]) < 1e-3 * toys.furthest(began, weights[1])

    def test_is_saved_for_everybody_else(self, results, name):
        loaded = AutoModelForCausalLM.from_pretrained(results[name]["saved"] / MODEL, dtype=torch.float64)
        found = {key: tensor.float() for key, tensor in results[name]["exported"].items()}
        assert toys.furthest({key: each.float() for key, each in loaded.named_parameters()}, found) == 0.0

    def test_goes_on_from_what_others_saved(self, results, name):
        if name not in FROM:
            assert "continued" not in results[name]
            return
        _, weights = plain(name)
        moved = toys.furthest(weights[1], weights[2])
        assert toys.furthest(results[name]["continued"], weights[2]) < 1e-3 * moved

    def test_is_read_from_files_without_ever_being_whole(self, results, name):
        if name not in FROM:
            assert "read" not in results[name]
            return
        saved = {key: tensor.float() for key, tensor in results[FROM[name]]["exported"].items()}
        assert toys.furthest({key: each.float() for key, each in results[name]["read"].items()}, saved) == 0.0


@pytest.mark.parametrize(("tokens", "shares", "parts"), [(64, 2, 1), (1, 2, 1), (50, 4, 2), (7, 3, 1)])
def test_shares_have_all_tokens_and_equal_work(tokens, shares, parts):
    order = zigzag(tokens, shares, parts)
    assert order.shape[1] % parts == 0
    assert sorted(order.reshape(-1).tolist()) == list(range(order.size))
    assert tokens <= order.size < tokens + 2 * shares * parts
    # of one causal sequence, a token costs all that came before it
    assert len({int(share.sum()) for share in order}) == 1


def test_ranks_that_compute_together_are_neighbours_of_one_copy():
    machines = ["a", "b", "a", "b", "a", "b", "a", "b"]
    found = arranged("hybrid", machines, ParallelConfig(context=2))
    assert found.copies == ((0, 2, 4, 6), (1, 3, 5, 7))
    assert found.shares == (0, 2, 0, 2, 1, 3, 1, 3)
    assert arranged("shard", machines, ParallelConfig(tensor=2, context=2)).shares == (0, 0, 0, 0, 1, 1, 1, 1)
    assert arranged("replicate", machines[:4], ParallelConfig(expert=2)).copies == ((0, 1), (2, 3))


def test_so_many_processes_as_cannot_be_arranged_are_told():
    parallel = ParallelConfig(tensor=2, context=2, expert=8)
    with pytest.raises(ValueError, match=r"tensor 2.*context 2.*8.*multiple of 8.*4 processes"):
        arranged("shard", ["a"] * 4, parallel)
    with pytest.raises(ValueError, match=r"6 processes.*machine"):
        arranged("hybrid", ["a"] * 6 + ["b"] * 6, ParallelConfig(tensor=4))


def test_all_that_keeps_a_model_from_being_split_is_told_at_once():
    model = toys.model("qwen2")
    told = "; ".join(mistakes_in(model, ParallelConfig(tensor=3, pipeline=2, expert=2), adapters=True))
    for words in (
        "no stages",
        "num_attention_heads 4, num_key_value_heads 2, q_proj of 32",
        "no experts",
        "model.lora",
    ):
        assert words in told
    assert not [*mistakes_in(model, ParallelConfig(tensor=2, context=4), adapters=False)]
    assert not [*mistakes_in(toys.model("qwen3_moe", **EXPERTS), ParallelConfig(expert=4), adapters=True)]
    (told,) = mistakes_in(toys.model("phi3"), ParallelConfig(tensor=2), adapters=False)
    assert "o_proj" in told
