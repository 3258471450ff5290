"""Tensors that were away are the same tensors afterwards, and their bytes were given back in between."""

import copy
import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from rlinf.models.offload import Parking, bytes_of


def network(seed=0):
    torch.manual_seed(seed)
    net = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 8, bias=False), nn.Linear(8, 3))
    net.register_buffer("scale", torch.linspace(1, 2, 3))
    return net


def state_of(net, optimizer):
    """What a training loop has on its device."""
    for parameter in net.parameters():
        yield from [parameter, *([] if parameter.grad is None else [parameter.grad])]
        yield from optimizer.state.get(parameter, {}).values()
    yield from net.buffers()


def test_parked_tensors_take_no_bytes_and_come_back_as_they_were():
    parameter, buffer = nn.Parameter(torch.randn(5, 3)), torch.arange(6)
    before, address = parameter.detach().clone(), parameter.data
    parking = Parking([parameter, buffer])
    assert (parking.bytes, parking.parked) == (5 * 3 * 4 + 6 * 8, 0)
    parking.park()
    assert bytes_of([parameter, buffer]) == 0
    assert (parking.bytes, parking.parked) == (108, 108)
    assert (parameter.shape, parameter.dtype, parameter.requires_grad) == ((5, 3), torch.float32, True)
    parking.unpark()
    assert parking.parked == 0
    assert bytes_of([parameter, buffer]) == 108
    assert torch.equal(parameter, before)
    assert torch.equal(address, before)  # whoever holds the data still does
    assert buffer.tolist() == [0, 1, 2, 3, 4, 5]


def test_what_shares_a_storage_moves_once_and_goes_on_sharing_it():
    whole = torch.arange(12.0)
    row, tied = whole[4:8], nn.Parameter(whole)
    outside = whole.view(3, 4)[1]  # nobody names it
    parking = Parking([tied, row, whole])
    assert parking.bytes == 48
    parking.park()
    assert parking.parked == 48
    parking.unpark()
    assert row.tolist() == outside.tolist() == [4, 5, 6, 7]
    row[0] = 9
    assert [float(each) for each in (whole[4], outside[0], tied.detach()[4])] == [9, 9, 9]


def test_parking_what_is_parked_and_bringing_back_what_is_there_do_nothing():
    tensor = torch.arange(4.0)
    parking = Parking(iter([tensor]))
    parking.unpark()
    for _ in range(3):
        parking.park()
        parking.park()
        parking.unpark()
        parking.unpark()
    assert tensor.tolist() == [0, 1, 2, 3]


def test_a_tensor_of_no_bytes_or_on_no_device_stays_what_it_is():
    empty, nowhere = torch.empty(0, 3), torch.empty(3, device="meta")
    parking = Parking([empty, nowhere])
    parking.park()
    parking.unpark()
    assert (parking.bytes, empty.shape, nowhere.shape) == (0, (0, 3), (3,))


def test_memory_that_is_not_torchs_own_is_exchanged_for_a_copy():
    array = np.arange(6.0)
    borrowed, mapped = torch.from_numpy(array), torch.arange(3.0).share_memory_()
    view, parameter = borrowed[2:4], nn.Parameter(mapped)
    parking = Parking([borrowed, view, parameter])
    parking.park()
    assert bytes_of([borrowed, view, parameter]) == 0
    parking.unpark()
    assert borrowed.tolist() == [0, 1, 2, 3, 4, 5]
    assert parameter.tolist() == [0, 1, 2]
    view[0] = 7
    assert float(borrowed[2]) == 7  # shared as before
    assert array[2] == 2  # but no longer with whoever lent it


def test_a_move_that_fails_half_way_is_gone_on_with_in_either_direction(monkeypatch):
    tensors = [torch.full((3,), float(number)) for number in range(4)]
    parking = Parking(tensors)
    true_resize, left = torch.UntypedStorage.resize_, [0]

    def resize(storage, size):
        left[0] -= 1
        if left[0] == 0:
            raise RuntimeError("out of memory")
        return true_resize(storage, size)

    monkeypatch.setattr(torch.UntypedStorage, "resize_", resize)
    for fails_at in (1, 3, 4):
        for first, then in (("park", "park"), ("park", "unpark"), ("unpark", "unpark"), ("unpark", "park")):
            left[0] = 0
            if first == "unpark":
                parking.park()
            left[0] = fails_at
            with pytest.raises(RuntimeError, match=r"out.*memory"):
                getattr(parking, first)()
            getattr(parking, then)()
            assert bytes_of(tensors) == (0 if then == "park" else 48)
            parking.unpark()
            assert [tensor.tolist() for tensor in tensors] == [[number] * 3 for number in range(4)]


def test_a_copy_that_fails_on_the_way_back_leaves_the_whole_one_in_host_memory(monkeypatch):
    tensor = torch.arange(4.0)
    parking = Parking([tensor])
    parking.park()

    def copy(storage, other):
        raise RuntimeError("the device is gone")

    with monkeypatch.context() as patched:
        patched.setattr(torch.UntypedStorage, "copy_", copy)
        with pytest.raises(RuntimeError, match=r"device.*gone"):
            parking.unpark()
    assert bytes_of([tensor]) == parking.bytes == 16  # room was made, and nothing put into it
    parking.park()
    assert bytes_of([tensor]) == 0
    parking.unpark()
    assert tensor.tolist() == [0, 1, 2, 3]


def test_what_will_be_overwritten_gets_its_memory_back_and_nothing_is_copied_into_it(monkeypatch):
    kept, overwritten = torch.arange(4.0), torch.arange(100.0)
    parking = Parking([kept, overwritten])
    parking.park()
    copied = []
    copy = torch.UntypedStorage.copy_
    monkeypatch.setattr(
        torch.UntypedStorage, "copy_", lambda to, source, *more: copied.append(to.nbytes()) or copy(to, source, *more)
    )
    parking.unpark(without=[overwritten])
    assert copied == [kept.nbytes]
    assert bytes_of([kept, overwritten]) == kept.nbytes + overwritten.nbytes
    assert parking.parked == 0
    overwritten.fill_(7)
    parking.park()
    parking.unpark()
    assert (kept.tolist(), overwritten.tolist()) == ([0, 1, 2, 3], [7] * 100)


def test_a_function_that_needs_parked_tensors_refuses_to_run():
    tensor = torch.arange(3.0)
    parking = Parking([tensor])

    def total(factor):
        return float(tensor.sum() * factor)

    needing = parking.needed(total)
    assert needing(factor=2) == 6
    parking.park()
    with pytest.raises(RuntimeError, match=r"total.*tensors.*parked.*device=True"):
        needing(2)
    parking.unpark()
    assert needing(3) == 9


@given(st.lists(st.sampled_from(["gradient", "step", "away", "restore"]), max_size=12))
def test_learning_that_was_interrupted_anywhere_is_bit_for_bit_the_same(happens):
    """Gradients and the optimizer's state come into being, and are replaced, between moves."""
    nets = [network(), network()]
    optimizers = [torch.optim.AdamW(net.parameters(), lr=0.1, fused=True) for net in nets]
    parking = Parking(lambda: state_of(nets[0], optimizers[0]))
    identities = [id(parameter) for parameter in nets[0].parameters()]
    for number, what in enumerate(happens):
        if what == "away":
            parking.park()
            assert bytes_of(state_of(nets[0], optimizers[0])) == 0
            parking.unpark()
            continue
        for net, optimizer in zip(nets, optimizers, strict=True):
            if what == "gradient":
                rows = torch.arange(8.0).view(2, 4) + number
                (net(rows) * net.scale).sum().backward()
            elif what == "step":
                optimizer.step()
                optimizer.zero_grad()
            else:
                optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    assert [id(parameter) for parameter in nets[0].parameters()] == identities
    both = zip(state_of(nets[0], optimizers[0]), state_of(nets[1], optimizers[1]), strict=True)
    assert all(torch.equal(one, other) for one, other in both)


def test_what_came_into_being_after_the_first_move_goes_along_and_what_went_is_let_go():
    net = network()
    optimizer = torch.optim.AdamW(net.parameters())
    parking = Parking(lambda: state_of(net, optimizer))
    parking.park()
    weights = parking.parked
    assert weights == 4 * (sum(map(math.prod, [(4, 8), (8,), (8, 8), (8, 3), (3,)])) + 3)
    parking.unpark()
    net(torch.ones(1, 4)).sum().backward()
    optimizer.step()
    parking.park()
    assert parking.parked == 4 * weights - 3 * 12 + 5 * 4  # gradients, two means of each weight, five counters
    parking.unpark()
    optimizer.zero_grad()
    optimizer.state.clear()
    parking.park()
    assert parking.parked == weights
    parking.unpark()
