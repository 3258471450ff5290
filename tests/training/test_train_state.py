"""Checkpoints: the same bits and the same future, written while training goes on, read without running anything."""

from __future__ import annotations

import asyncio
import errno
import itertools
import json
import os
import pickle
import threading
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.checkpoint import HuggingFaceStorageReader
from transformers import AutoModelForCausalLM, AutoTokenizer

from rlinf.actors.base import BaseTrainer
from rlinf.data import safetensors_io
from rlinf.data.safetensors_io import DTYPES, LateCopy, WritingStopped, explained, write_tensors
from rlinf.data.tokenizer import load_tokenizer
from rlinf.models.language.build import build_model
from rlinf.models.language.lora import add_adapters, start_adapters
from rlinf.runtime.actor.actor import endpoint
from rlinf.runtime.system.system import ActorSystem
from rlinf.training import checkpoint
from rlinf.training.checkpoint import copy_state, load_state
from rlinf.training.export import copy_model

TINY = {
    "model_type": "qwen2", "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 1, "intermediate_size": 24, "attention_dropout": 0.1,
}  # fmt: skip
TOKENIZER = load_tokenizer({"characters": "0123456789"})


class Learning:
    """A model, its optimizer and schedule, and a step that uses random numbers."""

    def __init__(self, seed=0, optimizer=torch.optim.AdamW, lora=False, **model):
        self.model = build_model({**TINY, **model}, TOKENIZER, seed=seed).train()
        if lora:
            add_adapters(self.model, {"r": 2, "alpha": 4, "target_modules": ["q_proj"]})
            with torch.no_grad():
                for parameter, value in start_adapters(self.model, seed):
                    parameter.copy_(torch.rand_like(value))
        trained = [parameter for parameter in self.model.parameters() if parameter.requires_grad]
        self.optimizer = optimizer(trained, lr=1e-2)
        self.schedule = torch.optim.lr_scheduler.LambdaLR(self.optimizer, lambda done: min(1.0, (done + 1) / 5))

    def learn(self, steps):
        for _ in range(steps):
            batch = torch.randint(0, 10, (2, 6))
            self.model(input_ids=batch, labels=batch).loss.backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.schedule.step()

    def everything(self):
        found = {name: parameter.detach().clone() for name, parameter in self.model.named_parameters()}
        for number, state in self.optimizer.state_dict()["state"].items():
            found |= {f"{number} {key}": value.clone() for key, value in state.items()}
        return found

    def save(self, directory, **more):
        parts = (self.model, self.optimizer, self.schedule)
        copy_state(*parts, 3, rank=0, ranks=1, **more).write(directory)

    def load(self, directory):
        return load_state(self.model, self.optimizer, self.schedule, directory, rank=0)


def assert_same(found, expected):
    assert found.keys() == expected.keys()
    assert not [key for key in expected if not torch.equal(found[key], expected[key])]


@pytest.mark.parametrize(
    ("optimizer", "lora"),
    [
        pytest.param(torch.optim.AdamW, True, id="adamw, adapters"),
        pytest.param(partial(torch.optim.AdamW, fused=True, betas=(0.9, 0.99)), False, id="fused"),
        pytest.param(partial(torch.optim.AdamW, amsgrad=True), False, id="amsgrad"),
        pytest.param(partial(torch.optim.SGD, momentum=0.9), True, id="momentum, adapters"),
        pytest.param(torch.optim.SGD, False, id="sgd"),
    ],
)
def test_a_restored_run_is_the_uninterrupted_one_bit_for_bit(tmp_path, optimizer, lora):
    first = Learning(0, optimizer, lora)
    torch.manual_seed(1)
    first.learn(3)
    first.save(tmp_path / "state", extra={"cursor": [1, 2.5, None]})
    at_saving = first.everything()
    first.learn(3)
    second = Learning(7, optimizer, lora)
    torch.manual_seed(99)
    restored = second.load(tmp_path / "state")
    assert (restored.version, restored.extra) == (3, {"cursor": [1, 2.5, None]})
    assert_same(second.everything(), at_saving)
    second.learn(3)
    assert_same(second.everything(), first.everything())
    assert second.schedule.get_last_lr() == first.schedule.get_last_lr()


def test_saving_changes_nothing(tmp_path):
    one = Learning(0)
    one.learn(1)
    before, chance = one.everything(), torch.get_rng_state()
    copy_state(one.model, one.optimizer, one.schedule, 1, rank=0, ranks=1)
    copy_model(one.model, TOKENIZER, lead=True)
    assert_same(one.everything(), before)
    assert torch.equal(torch.get_rng_state(), chance)


class Trainer(BaseTrainer):
    """Saves the model for everybody else, too."""

    async def setup(self) -> None:
        self.learning = one = Learning(0)
        self._own(one.model, one.optimizer, one.schedule)
        self.version = 3

    @endpoint(device=True)
    async def learn(self, steps: int) -> dict[str, torch.Tensor]:
        await self.compute(self.learning.learn, steps)
        return self.learning.everything()

    def _copies(self, directory):
        return {**super()._copies(directory), "hf": copy_model(self.learning.model, TOKENIZER, lead=True)}


def held_writing(monkeypatch):
    """Writing that waits until it is told to go on: (it has begun, it may go on)."""
    begun, go_on = threading.Event(), threading.Event()
    real = safetensors_io.write_tensors

    def write(*arguments):
        begun.set()
        assert go_on.wait(30)
        real(*arguments)

    monkeypatch.setattr(checkpoint, "write_tensors", write)
    return begun, go_on


def test_training_goes_on_while_a_checkpoint_is_written(tmp_path, monkeypatch):
    begun, go_on = held_writing(monkeypatch)

    async def main():
        async with ActorSystem.local(1) as system:
            trainer = await system.spawn(Trainer, hosts=[0], name="trainer", devices=[[0]])
            other = await system.spawn(Trainer, hosts=[0], name="other", devices=[[0]])
            at_saving = (await trainer.learn(2))[0]
            saving = asyncio.ensure_future(trainer.save(tmp_path))
            await asyncio.to_thread(begun.wait, 30)
            await other.learn(0)  # the device is free as well
            later = (await trainer.learn(3))[0]
            assert not saving.done()
            go_on.set()
            await saving
            return at_saving, later

    at_saving, later = asyncio.run(main())
    restored = Learning(5)
    restored.load(tmp_path / "state")
    assert_same(restored.everything(), at_saving)
    restored.learn(3)
    assert_same(restored.everything(), later)
    saved = AutoModelForCausalLM.from_pretrained(tmp_path / "hf")
    assert_same(dict(saved.named_parameters()), {name: at_saving[name] for name, _ in saved.named_parameters()})


@pytest.mark.parametrize("when", [0, 1, 2, 90, None], ids=lambda when: f"before piece {when}")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_is_written_while_steps_are_taken_is_of_the_step_of_its_copy(tmp_path, monkeypatch, when, dtype):
    one, numbers = Learning(0), itertools.count()
    one.learn(2)
    at_saving = one.everything()
    state = copy_state(one.model, one.optimizer, one.schedule, 2, rank=0, ranks=1)
    export = copy_model(one.model, None, lead=True, dtype=dtype, at_hand=state.copies)
    real = LateCopy.pieces

    def pieces(*arguments):
        for piece in real(*arguments):
            if next(numbers) == when:
                one.learn(1)
            yield piece

    monkeypatch.setattr(LateCopy, "pieces", pieces)
    monkeypatch.setattr(safetensors_io, "CHUNK", 128)
    state.write(tmp_path / "state")
    export.write(tmp_path / "hf")
    assert next(numbers) > 90
    restored = Learning(5)
    restored.load(tmp_path / "state")
    assert_same(restored.everything(), at_saving)
    saved = AutoModelForCausalLM.from_pretrained(tmp_path / "hf", dtype=dtype)
    assert_same(
        dict(saved.named_parameters()), {name: at_saving[name].to(dtype) for name, _ in saved.named_parameters()}
    )


def test_a_state_is_copied_neither_before_a_step_nor_after_it_was_written(tmp_path):
    one, name = Learning(0), "model.norm.weight"
    state = copy_state(one.model, None, None, 0, rank=0, ranks=1)
    one.model.get_parameter(name).detach().fill_(5)  # nobody was told
    state.write(tmp_path / "state")
    one.learn(1)
    assert bool((load_file(tmp_path / "state" / "rank_00000.safetensors")[f"model.{name}"] == 5).all())
    with pytest.raises(RuntimeError, match="written before"):
        state.write(tmp_path / "again")


def test_a_cancelled_save_stops_writing(tmp_path, monkeypatch):
    begun, go_on = held_writing(monkeypatch)

    async def main():
        async with ActorSystem.local(1) as system:
            trainer = await system.spawn(Trainer, hosts=[0], name="trainer")
            saving = asyncio.ensure_future(trainer.save(tmp_path))
            await asyncio.to_thread(begun.wait, 30)
            saving.cancel()
            asyncio.get_running_loop().call_later(0.05, go_on.set)
            with pytest.raises(asyncio.CancelledError):
                await saving
            await trainer.learn(1)

    asyncio.run(main())
    assert not (tmp_path / "hf").exists()
    assert not (tmp_path / "state" / "state.json").exists()


# What does not fit, is damaged or hostile ------------------------------------------------------------------------


class Bomb:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return (Path.touch, (self.path,))


@pytest.mark.parametrize("where", [".metadata", "__0_0.distcp", "state.json", "rank_00000.safetensors"])
def test_a_pickle_in_a_checkpoint_is_never_executed(tmp_path, where):
    one, mark = Learning(0), tmp_path / "executed"
    bomb = pickle.dumps(Bomb(mark))
    pickle.loads(bomb)
    assert mark.exists()  # it works
    mark.unlink()
    one.save(tmp_path / "state")
    replaced = (tmp_path / "state" / where).exists()
    (tmp_path / "state" / where).write_bytes(bomb)
    if replaced:
        with pytest.raises(ValueError, match="damaged"):
            one.load(tmp_path / "state")
    else:
        one.load(tmp_path / "state")
    assert not mark.exists()


def test_another_model_is_an_error_that_says_what_differs_and_changes_nothing(tmp_path):
    Learning(0).save(tmp_path)
    other = Learning(1, hidden_size=32)
    before = other.everything()
    with pytest.raises(ValueError, match=r"\[\d+, 16\].*\[\d+, 32\]"):
        other.load(tmp_path)
    assert_same(other.everything(), before)
    with pytest.raises(ValueError, match=r"model.*model\.model\.layers\.1"):
        Learning(0, num_hidden_layers=1).load(tmp_path)
    with pytest.raises(ValueError, match=r"model\.model\.layers\.2"):
        Learning(0, num_hidden_layers=3).load(tmp_path)
    smaller = Learning(0)
    smaller.optimizer = torch.optim.AdamW(list(smaller.model.parameters())[1:], lr=1e-2)
    with pytest.raises(ValueError, match=r"optimizers.*parameters"):
        smaller.load(tmp_path)


def test_an_incomplete_or_damaged_state_is_an_error(tmp_path):
    one = Learning(0)
    with pytest.raises(FileNotFoundError, match=r"state\.json"):
        one.load(tmp_path)
    one.save(tmp_path)
    about = json.loads((tmp_path / "state.json").read_text())
    (tmp_path / "state.json").write_text(json.dumps({**about, "format": 99}))
    with pytest.raises(ValueError, match=r"format 99"):
        one.load(tmp_path)
    (tmp_path / "state.json").write_text(json.dumps({**about, "ranks": 2}))
    with pytest.raises(FileNotFoundError, match=r"saved.*2 ranks.*rank_00001\.safetensors"):
        one.load(tmp_path)
    (tmp_path / "state.json").write_text(json.dumps(about))
    (tmp_path / "rank_00001.safetensors").write_bytes(b"")
    with pytest.raises(ValueError, match=r"rank_00001\.safetensors.*them"):
        one.load(tmp_path)
    (tmp_path / "rank_00001.safetensors").unlink()
    (tmp_path / "state.json").write_text(json.dumps(about)[:-9])
    with pytest.raises(ValueError, match=r"state\.json.*damaged"):
        one.load(tmp_path)
    (tmp_path / "state.json").write_text(json.dumps(about))
    file = tmp_path / "rank_00000.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(ValueError, match="is damaged"):
        one.load(tmp_path)


def test_a_state_with_a_shard_missing_is_an_error(tmp_path):
    one = Learning(0)
    state = copy_state(one.model, one.optimizer, one.schedule, 0, rank=0, ranks=1).whole()
    key = "model.model.norm.weight"
    state.shards[key], state.offsets[key] = state.shards[key][8:].clone(), (8,)
    state.write(tmp_path)
    with pytest.raises(ValueError, match=r"model\.model\.norm\.weight.*part"):
        one.load(tmp_path)


def test_a_parameter_that_the_model_has_not_is_an_error():
    one, other = Learning(0), Learning(1)
    with pytest.raises(ValueError, match=r"optimizer.*parameters"):
        copy_state(one.model, other.optimizer, None, 0, rank=0, ranks=1)


def test_what_is_not_json_is_an_error():
    one = Learning(0)
    with pytest.raises(ValueError, match=r"numbers, texts"):
        copy_state(one.model, None, None, 0, rank=0, ranks=1, extra={"a": object()})


# Files -----------------------------------------------------------------------------------------------------------


def test_every_dtype_can_be_read_back_by_the_library(tmp_path):
    tensors = {str(dtype): torch.randint(0, 2, (3, 5)).to(dtype) for dtype in DTYPES}
    tensors |= {"empty": torch.empty(0, 3), "one": torch.tensor(4.0), "turned": torch.arange(6).view(2, 3).t()}
    write_tensors(tmp_path / "a.safetensors", tensors, {"who": "me"})
    found = load_file(tmp_path / "a.safetensors")
    assert found.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert found[name].dtype == tensor.dtype
        assert found[name].shape == tensor.shape
        assert found[name].contiguous().view(-1).view(torch.uint8).equal(tensor.contiguous().view(-1).view(torch.uint8))


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_torchs_own_checkpoint_reader_understands_the_state(tmp_path):
    one = Learning(0)
    one.save(tmp_path)
    weight = one.model.model.norm.weight.detach()
    target = {"model.model.norm.weight": torch.zeros_like(weight)}
    torch.distributed.checkpoint.load(target, storage_reader=HuggingFaceStorageReader(str(tmp_path)), no_dist=True)
    assert torch.equal(target["model.model.norm.weight"], weight)


def test_a_full_disk_says_what_was_needed_where(tmp_path, monkeypatch):
    with pytest.raises(OSError, match=r"space.*device:.*/dev/full.*40,000") as caught:
        write_tensors(Path("/dev/full"), {"a": torch.zeros(10_000)})
    assert caught.value.errno == errno.ENOSPC
    monkeypatch.setattr("shutil.disk_usage", lambda path: SimpleNamespace(free=1000))
    with pytest.raises(OSError, match=r"space left.*state.*1,000"):
        Learning(0).save(tmp_path / "state")
    with pytest.raises(OSError, match=r"space left.*hf.*1,000"):
        copy_model(Learning(0).model, None, lead=True).write(tmp_path / "hf")


@pytest.mark.parametrize(
    ("number", "inodes", "named"),
    [(errno.ENOSPC, 0, "inodes"), (errno.EDQUOT, 5, "quota"), (errno.ENOSPC, 5, r"bytes; [0-9,]+.*free")],
)
def test_a_disk_that_is_full_of_something_else_than_bytes_says_so(tmp_path, monkeypatch, number, inodes, named):
    monkeypatch.setattr("os.statvfs", lambda path: SimpleNamespace(f_files=1000, f_favail=inodes))
    monkeypatch.setattr("shutil.disk_usage", lambda path: SimpleNamespace(free=10**9))
    with pytest.raises(OSError, match=named) as caught, explained(tmp_path, 40):
        raise OSError(number, os.strerror(number))
    assert caught.value.errno == number


def test_writing_stops_when_it_is_told_to(tmp_path):
    stop = threading.Event()
    stop.set()
    with pytest.raises(WritingStopped):
        write_tensors(tmp_path / "a", {"a": torch.zeros(10)}, None, stop)


# hf/ -------------------------------------------------------------------------------------------------------------


def answers(model):
    return model.eval().generate(torch.tensor([[3, 1, 4]]), max_new_tokens=5, do_sample=False).tolist()


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("shard_bytes", [10**9, 3000], ids=["one file", "many files"])
def test_the_exported_model_loads_and_generates_what_the_trained_one_does(tmp_path, tied, shard_bytes):
    one = Learning(0, tie_word_embeddings=tied)
    one.learn(2)
    copy_model(one.model, TOKENIZER, lead=True, shard_bytes=shard_bytes).write(tmp_path)
    files = sorted(path.name for path in tmp_path.glob("*.safetensors"))
    assert files == ["model.safetensors"] if shard_bytes > 3000 else len(files) > 2
    loaded, told = AutoModelForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert not any(told.values())
    assert type(loaded) is type(one.model)
    assert loaded.dtype == torch.float32
    assert_same(dict(loaded.named_parameters()), {name: p.detach() for name, p in one.model.named_parameters()})
    assert answers(loaded) == answers(one.model)
    assert AutoTokenizer.from_pretrained(tmp_path).encode("907") == TOKENIZER.encode("907")


def test_the_export_shares_the_copies_that_the_state_has():
    one = Learning(0)
    state = copy_state(one.model, one.optimizer, one.schedule, 0, rank=0, ranks=1)
    export = copy_model(one.model, None, lead=True, at_hand=state.copies)
    mine = {id(tensor) for tensor in state.shards.values()}
    assert all(id(tensor) in mine for tensor in export.tensors.values())


@pytest.mark.filterwarnings("ignore:Accessing the data pointer of FakeTensor")
def test_copies_from_gpus_are_waited_for_on_those_gpus_whatever_the_threads_own_is(monkeypatch):
    waited = []
    monkeypatch.setattr(torch.cuda, "synchronize", waited.append)
    monkeypatch.setattr(torch.cuda, "get_rng_state", lambda device: torch.zeros(1, dtype=torch.uint8))
    monkeypatch.setattr(checkpoint, "host_copy", lambda tensor: tensor)
    with FakeTensorMode(allow_non_fake_inputs=True):
        model = nn.ParameterDict({name: nn.Parameter(torch.empty(4, device="cuda:2")) for name in "ab"})
        copy_state(model, None, None, 1, rank=0, ranks=1)
    assert waited == [torch.device("cuda", 2)]
