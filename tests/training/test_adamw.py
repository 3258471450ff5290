"""The 8-bit optimizer: beside torch's AdamW, whole and sharded, saved and gone on from."""

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard

from rlinf.models.offload import Parking
from rlinf.training.checkpoint import copy_state, held, load_state
from rlinf.training.optimizer import AdamW8bit, adamw

pytest.importorskip("bitsandbytes", reason="bitsandbytes is not installed: pip install 'rlinf[optim8]'")
SETTINGS = {"lr": 3e-3, "betas": (0.9, 0.99), "weight_decay": 0.01}


def network(seed=0):
    torch.manual_seed(seed)
    return torch.nn.Sequential(torch.nn.Linear(64, 128), torch.nn.Tanh(), torch.nn.Linear(128, 64))


def learn(net, optimizer, steps, seed=0):
    """Fit a permutation; returns the last loss."""
    generator = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        given = torch.randn(64, 64, generator=generator)
        loss = ((net(given) - given.flip(1)) ** 2).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return float(loss.detach())


def weights(net):
    whole = (p.full_tensor() if hasattr(p, "full_tensor") else p for p in net.parameters())
    return torch.cat([tensor.detach().flatten() for tensor in whole])


@pytest.fixture
def mesh(tmp_path):
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield DeviceMesh("cpu", [0])
    torch.distributed.destroy_process_group()


def test_it_learns_as_adamw_does_with_a_quarter_of_the_memory():
    nets = network(), network()
    plain, small = (
        adamw(list(net.parameters()), kind, **SETTINGS) for net, kind in zip(nets, ("adamw", "adamw_8bit"), strict=True)
    )
    losses = learn(nets[0], plain, 60), learn(nets[1], small, 60)
    assert losses[1] == pytest.approx(losses[0], rel=0.05)
    assert losses[0] < 0.7  # 1.0 is what knows nothing
    kept = [sum(t.nbytes for t in held(torch.nn.Module(), one)) for one in (plain, small)]
    assert kept[1] < 0.3 * kept[0]


def test_a_sharded_model_learns_the_same(mesh):
    whole, sharded = network(), network()
    fully_shard(sharded, mesh=mesh)
    found = []
    for net in (whole, sharded):
        optimizer = adamw(list(net.parameters()), "adamw_8bit", **SETTINGS)
        learn(net, optimizer, 5)
        found.append(weights(net))
    assert torch.equal(found[0], found[1])


@pytest.mark.parametrize("kind", ["adamw", "adamw_8bit"])
def test_a_checkpoint_is_gone_on_from_by_either(tmp_path, kind):
    net = network()
    first = adamw(list(net.parameters()), "adamw_8bit", **SETTINGS)
    learn(net, first, 10)
    copy_state(net, first, None, 1, rank=0, ranks=1).write(tmp_path)
    learn(net, first, 10, seed=1)
    again = network(5)
    second = adamw(list(again.parameters()), kind, **SETTINGS)
    load_state(again, second, None, tmp_path, rank=0)
    learn(again, second, 10, seed=1)
    moved = (weights(net) - weights(network())).abs().mean()
    assert (weights(net) - weights(again)).abs().mean() < 0.03 * moved  # up to rounding of the states


def test_a_learning_rate_that_changes_holds_from_the_next_step_on():
    net = network()
    optimizer = adamw(list(net.parameters()), "adamw_8bit", **SETTINGS)
    learn(net, optimizer, 2)
    before = weights(net)
    optimizer.param_groups[0]["lr"] = 0.0
    learn(net, optimizer, 2)
    assert torch.equal(weights(net), before)


def test_its_states_can_be_parked_between_steps():
    found = []
    for parks in (False, True):
        net = network()
        optimizer = adamw(list(net.parameters()), "adamw_8bit", **SETTINGS)
        parking = Parking(lambda net=net, optimizer=optimizer: held(net, optimizer))
        for seed in range(3):
            learn(net, optimizer, 1, seed)
            if parks:
                parking.park()
                assert all(not t.untyped_storage().nbytes() for t in held(net, optimizer))
                parking.unpark()
        found.append(weights(net))
    assert torch.equal(found[0], found[1])


def test_without_the_library_one_message_says_what_to_install(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "bitsandbytes.optim", None)
    with pytest.raises(ValueError, match=r"install 'rlinf\[optim8\]'"):
        AdamW8bit([torch.nn.Parameter(torch.zeros(3))], **SETTINGS)
