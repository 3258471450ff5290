"""Settings of roles: given whole or by their keys, and read where they are used."""

import sys

import pytest
from pydantic.dataclasses import dataclass

from rlinf import Actor, ActorSystem, endpoint
from rlinf.actors.base import configured
from rlinf.actors.trainer import Trainer
from rlinf.config.learning import CriticSettings, TrainerSettings
from rlinf.runtime.base.errors import UserError
from tests.actors import toys

SHARED = {"model": toys.configuration(), "tokenizer": toys.ALPHABET}


class Configured(Actor):
    """Tells its settings."""

    @configured(TrainerSettings)
    async def setup(self, *, path, settings: TrainerSettings, seed=0):
        self._given = path, seed, settings

    @endpoint
    async def given(self):
        return self._given


async def test_keys_are_short_for_settings():
    async with ActorSystem.local() as system:
        by_keys = await system.spawn(Configured, name="keys", path="x", lr=0.5, parallel={"tensor": 2})
        whole = TrainerSettings(lr=0.5)
        whole.parallel.tensor = 2
        at_once = await system.spawn(Configured, name="whole", path="x", seed=3, settings=whole)
        assert await by_keys[0].given() == ("x", 0, whole)
        assert await at_once[0].given() == ("x", 3, whole)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"learning_rte": 1.0}, "learning_rte"),
        ({"warmup_step": 1}, "warmup_steps"),
        ({"lr": -1.0, "epochs": 0}, "epochs"),
        ({"settings": TrainerSettings(), "lr": 0.5}, "lr"),
        ({"settings": CriticSettings()}, "TrainerSettings"),
    ],
)
async def test_what_cannot_be_is_named_with_its_role(given, said):
    async with ActorSystem.local() as system:
        with pytest.raises(ValueError, match=f"(?s)chosen.*{said}"):
            await system.spawn(Configured, name="chosen", path="x", **given)


async def test_what_setup_needs_is_still_needed():
    async with ActorSystem.local() as system:
        with pytest.raises(UserError, match="path"):
            await system.spawn(Configured, lr=0.5)


READERS: list[str] = []


@dataclass
class Followed(TrainerSettings):
    """Notes which modules read `gradient_checkpointing`."""

    def __getattribute__(self, name):
        if name == "gradient_checkpointing":
            READERS.append(sys._getframe(1).f_globals["__name__"])
        return super().__getattribute__(name)


async def test_a_key_is_read_off_the_settings_where_it_is_used_and_nowhere_before():
    READERS.clear()
    async with ActorSystem.local() as system:
        trainer = await system.spawn(Trainer, **SHARED, settings=Followed(gradient_checkpointing=True))
        readers = [name for name in READERS if not name.startswith("rlinf.runtime.")]  # which looks for promises
        assert readers == ["rlinf.models.language.build"]
        plain = await system.spawn(Trainer, name="plain", **SHARED)
        batch = toys.groups(1)
        one, other = await trainer.train(batch), await plain.train(batch)
        assert one["grad_norm"] == pytest.approx(other["grad_norm"], rel=1e-5)
