"""A mixture of experts learns the same however its batch is cut, with and without the auxiliary loss; and says how its
experts were used."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from rlinf.algos import recipes
from rlinf.config.learning import LearningSettings
from rlinf.data.packing import Row, pack
from rlinf.models.language.moe import drift, load
from rlinf.models.language.policy_model import PolicyModel
from rlinf.training.fsdp import Learner
from rlinf.training.policy import learn_policy
from tests.actors.toys import furthest, gradients
from tests.models.language.mixture.test_replay import chosen, mixture, rows

COEFFICIENT = 0.5
SPECS = {
    "token-mean": recipes.get("grpo", {"aggregation": {"how": "token-mean"}}),
    "seq-mean-token-mean": recipes.get("grpo", {"aggregation": {"how": "seq-mean-token-mean"}}),
}


@pytest.fixture(scope="module")
def learned():
    """Rows whose tokens go where the gates of `mixture()` send them; prompts of two are one."""
    own = [chosen(mixture(), row) for row in rows()]
    found = []
    for number, (row, routes) in enumerate(zip(rows(), own, strict=True)):
        old = np.full(len(row.response_ids), -2.5, np.float32)
        found.append(replace(row, routes=routes, old_logprobs=old, advantage=(-1.0) ** number))
    return found


def by_itself(spec, part, coefficient):
    """Loss and metrics by the model's own forward, text by text."""
    net = mixture()
    losses, shares, chances, lengths = [], [], [], []
    for row in part:
        text = torch.tensor([[*row.prompt_ids, *row.response_ids]])
        found = net(text, output_router_logits=True)
        places = slice(len(row.prompt_ids) - 1, text.shape[1] - 1)
        logprobs = found.logits[0, places].log_softmax(-1).gather(1, torch.tensor(row.response_ids)[:, None])[:, 0]
        ratio = (logprobs + 2.5).exp()
        gain = row.advantage
        losses.append(torch.maximum(-gain * ratio, -gain * ratio.clamp(0.8, 1.2)))
        probabilities = torch.stack([layer[places].softmax(-1) for layer in found.router_logits])
        chances.append(probabilities)
        best = probabilities.topk(2, dim=-1).indices
        shares.append(torch.zeros_like(probabilities).scatter(-1, best, 0.5))
        lengths.append(len(row.response_ids))
    share = torch.cat(shares, dim=1).mean(1).detach()  # [layers, experts], adds up to 1
    values = [8 * torch.einsum("lte,le->t", one, share) / 2 for one in chances]
    whole = [main + coefficient * more for main, more in zip(losses, values, strict=True)]
    mean = torch.cat(whole).mean() if spec is SPECS["token-mean"] else torch.stack([x.mean() for x in whole]).mean()
    mean.backward()
    return gradients(net), share, torch.cat(values).mean()


def by_learner(spec, cuts, coefficient, mine):
    policy = PolicyModel(mixture(), router_replay="auto")
    policy.settle()
    share = torch.from_numpy(policy.mixture.load_of(mine))
    learner = Learner(policy, LearningSettings(lr=0.0, grad_clip=1e9))
    seen = {}
    learner.optimizer.register_step_pre_hook(lambda *_: seen.update(gradients(policy.model)))
    for cut in cuts:
        learn_policy(learner, replace(pack(cut), expert_load=share), spec, version=0, compare=True, balance=coefficient)
    gathered, _ = learner.step()
    return seen, gathered.values()


@pytest.mark.parametrize("how", SPECS)
@pytest.mark.parametrize("coefficient", [0.0, COEFFICIENT])
def test_gradients_and_metrics_do_not_depend_on_how_the_batch_is_cut(learned, how, coefficient):
    spec = SPECS[how]
    expected, share, value = by_itself(spec, learned, coefficient)
    for cuts in ([learned], [learned[:1], learned[1:3], [], learned[3:]]):
        found, metrics = by_learner(spec, cuts, coefficient, learned)
        assert furthest(found, expected) < 1e-5
        assert metrics["moe/load_max"] == pytest.approx(float(share.max()) * 8)
        assert metrics["moe/dead_experts"] == int((share == 0).sum())
        assert metrics["moe/route_drift"] == 0.0
        if how == "token-mean":
            assert metrics["moe/aux_loss"] == pytest.approx(float(value.detach()), rel=1e-5)


def test_the_auxiliary_loss_makes_a_difference(learned):
    with_it, without = (by_itself(SPECS["token-mean"], learned, one)[0] for one in (COEFFICIENT, 0.0))
    gates = [name for name in with_it if "gate.weight" in name]
    assert furthest({n: with_it[n] for n in gates}, {n: without[n] for n in gates}) > 0.1


def test_samples_that_tell_nothing_cannot_be_balanced(learned):
    policy = PolicyModel(mixture(), router_replay="auto")
    with pytest.raises(ValueError, match=r"algorithm\.router_aux_loss balances"):
        policy.mixture.load_of([Row(np.arange(2, 5), np.arange(2, 4))])


def test_drift_counts_tokens_of_these_weights_alone():
    apart = torch.tensor([[True, False, True, True], [False, False, True, True]])
    (found,) = drift(apart, torch.tensor([True, True, True, False])).values()
    assert found.metrics(found.sums) == {"moe/route_drift": pytest.approx(0.5)}
    (none,) = drift(apart, torch.zeros(4, dtype=torch.bool)).values()
    assert none.metrics(none.sums) == {}
    assert (none + found).metrics((none + found).sums) == {"moe/route_drift": pytest.approx(0.5)}


def test_tokens_that_all_go_to_the_same_experts_are_as_uneven_as_can_be():
    counts = torch.tensor([[6.0, 6.0, 0.0, 0.0], [3.0, 3.0, 3.0, 3.0]])
    chances = torch.tensor([[3.0, 3.0, 0.0, 0.0], [1.5, 1.5, 1.5, 1.5]])
    (found,) = load(counts, chances).values()
    metrics = found.metrics(found.sums)
    assert metrics == {"moe/load_max": 2.0, "moe/dead_experts": 2.0, "moe/aux_loss": pytest.approx(1.5)}
    with pytest.raises(ValueError, match="shape"):
        load(counts, chances[:1])
