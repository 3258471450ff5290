"""The official client's names, over the service of this process: a loop comes here by changing an import.

    import rlinf.service.client as tinker                # in place of: import tinker

    with local_service("serve/tiny"):
        model = tinker.ServiceClient().create_lora_training_client(base_model="tiny", rank=8).result()

In: the calls of a loop. Out: promises, `.result()` or awaited. Nothing goes over HTTP: a call is made on the loop of
the service, in the order in which the program makes it, and runs as the same call of the official client would.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Coroutine, Generator, Mapping, Sequence
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any, Generic, TypeVar

import numpy as np
from torch import Tensor

from rlinf.data.tokenizer import load_tokenizer
from rlinf.runtime.base.errors import UserError
from rlinf.service import types, wire
from rlinf.service.local import Local
from rlinf.service.types import AdamParams, Datum, ModelInput, SampledSequence, SamplingParams, TensorData

__all__ = ["AdamParams", "Datum", "ModelInput", "SampledSequence", "SamplingParams", "TensorData", "types"]
TinkerError = UserError
"""Raised by results of requests that cannot be served."""
CustomLoss = Callable[[list[Datum], list[Tensor]], tuple[Tensor, dict[str, float]]]
T = TypeVar("T")


class Promise(Generic[T]):
    """A result that is coming: `promise.result()`, or `await promise`."""

    def __init__(self, future: Future[T]) -> None:
        self._future = future

    def result(self, timeout: float | None = None) -> T:
        """Wait for it; for so many seconds."""
        return self._future.result(timeout)

    async def result_async(self) -> T:
        """Wait for it on a loop."""
        return await asyncio.wrap_future(self._future)

    def __await__(self) -> Generator[Any, Any, T]:
        return self.result_async().__await__()


class RestClient:
    """Tells what a service serves; lists of checkpoints are the official client's alone."""

    def __init__(self) -> None:
        self._local = Local.newest()

    def get_server_capabilities(self) -> Promise[Any]:
        """`supported_models`, each with its `model_name` and `max_context_length`."""

        async def asked() -> Any:
            answer = await self._local.app.called("capabilities", {})
            return SimpleNamespace(supported_models=[SimpleNamespace(**each) for each in answer["supported_models"]])

        return Promise(self._local.begun(asked()))


class ServiceClient:
    """A session of the service that `local_service` opened last.

    Raises:
        UserError: there is none.
    """

    def __init__(self) -> None:
        self._local = Local.newest()
        self._models, self._samplers = itertools.count(), itertools.count()
        self._session = self._local.begun(self._local.app.called("create_session", {})).result()["session_id"]

    def create_lora_training_client(
        self,
        base_model: str,
        rank: int = 32,
        seed: int | None = None,
        train_mlp: bool = True,
        train_attn: bool = True,
        train_unembed: bool = True,
        user_metadata: dict[str, str] | None = None,
    ) -> Promise[TrainingClient]:
        """New adapters on the base model; of rank 0, all of its weights."""
        lora = {"rank": rank, "seed": seed, "train_mlp": train_mlp, "train_attn": train_attn}
        body = {"lora_config": {**lora, "train_unembed": train_unembed}, "user_metadata": user_metadata}
        return self._training_client("create_model", {**body, "base_model": base_model})

    def create_training_client_from_state(
        self, path: str, base_model: str | None = None, user_metadata: dict[str, str] | None = None
    ) -> Promise[TrainingClient]:
        """Adapters that begin as a checkpoint's."""
        body = {"path": path, "base_model": base_model, "user_metadata": user_metadata}
        return self._training_client("load_weights", {**body, "optimizer": False})

    def create_training_client_from_state_with_optimizer(
        self, path: str, base_model: str | None = None, user_metadata: dict[str, str] | None = None
    ) -> Promise[TrainingClient]:
        """Adapters that go on from a checkpoint."""
        body = {"path": path, "base_model": base_model, "user_metadata": user_metadata}
        return self._training_client("load_weights", {**body, "optimizer": True})

    def _training_client(self, call: str, body: Mapping[str, Any]) -> Promise[TrainingClient]:
        whole = {**body, "session_id": self._session, "model_seq_id": next(self._models)}

        async def made() -> TrainingClient:
            id = (await self._local.app.called(call, whole))["model_id"]
            about = await self._local.app.called("get_info", {"model_id": id})
            data = SimpleNamespace(**about["model_data"])
            return TrainingClient(self, self._local, SimpleNamespace(**{**about, "model_data": data}), self._samplers)

        return Promise(self._local.begun(made()))

    def create_sampling_client(
        self, model_path: str | None = None, base_model: str | None = None
    ) -> Promise[SamplingClient]:
        """Answers by a checkpoint, or by the base model."""
        body = {"model_path": model_path, "base_model": base_model, "session_id": self._session}
        whole = {**body, "sampling_session_seq_id": next(self._samplers)}

        async def made() -> SamplingClient:
            answer = await self._local.app.called("create_sampling_session", whole)
            return SamplingClient(self._local, answer["sampling_session_id"])

        return Promise(self._local.begun(made()))

    def close(self, status: str = "success") -> Promise[None]:
        """End the session: its models are unloaded, its checkpoints stay."""

        async def ended() -> None:
            await self._local.app.called("finish_session", {"session_id": self._session})

        return Promise(self._local.begun(ended()))


class TrainingClient:
    """A model that learns; `ServiceClient` makes it."""

    def __init__(self, service: ServiceClient, local: Local, info: Any, samplers: itertools.count[int]) -> None:
        self._service, self._local, self._info, self._samplers = service, local, info, samplers
        self.model_id: str = info.model_id
        self._numbers = itertools.count(1)

    def get_info(self) -> Any:
        """`model_id`, `model_data`, `lora_rank`."""
        return self._info

    def get_tokenizer(self) -> Any:
        """The base model's."""
        return load_tokenizer(self._local.app.tokenizer)

    def forward(
        self, data: Sequence[Datum], loss_fn: str, loss_fn_config: Mapping[str, float | str] | None = None
    ) -> Promise[types.ForwardBackwardOutput]:
        """Log-probs and a sum over tokens."""
        return Promise(self._local.begun(self._passed(data, loss_fn, loss_fn_config, forward_only=True)))

    def forward_backward(
        self, data: Sequence[Datum], loss_fn: str, loss_fn_config: Mapping[str, float | str] | None = None
    ) -> Promise[types.ForwardBackwardOutput]:
        """Add the gradient of a sum over tokens to what the next `optim_step` takes; the sum, and log-probs."""
        return Promise(self._local.begun(self._passed(data, loss_fn, loss_fn_config)))

    def _passed(
        self, data: Sequence[Datum], loss: str, settings: Mapping[str, Any] | None, *, forward_only: bool = False
    ) -> Coroutine[Any, Any, types.ForwardBackwardOutput]:
        config = [
            {"key": key, "value": {"text" if isinstance(value, str) else "number": value}}
            for key, value in (settings or {}).items()
        ]
        about = {"loss_fn": loss, "loss_fn_config_v2": config, "forward_only": forward_only}
        about["data"] = [each.fields() for each in data]  # what is wrong with them leaves no gap in the numbers
        own = {"model_id": self.model_id, "seq_id": next(self._numbers)}
        body = wire.written("ForwardBackwardRequest", **own, **about)

        async def passed() -> types.ForwardBackwardOutput:
            return types.ForwardBackwardOutput.of(await self._local.app.called("forward_backward", body))

        return passed()

    def forward_backward_custom(self, data: list[Datum], loss_fn: CustomLoss) -> Promise[types.ForwardBackwardOutput]:
        """Add the gradient of a function of log-probs, which is computed here before this returns.

        Args:
            data: each with `target_tokens`.
            loss_fn: of the data and their log-probs; returns what is to become less, and metrics.
        """
        targets = [{"target_tokens": each.loss_fn_inputs["target_tokens"]} for each in data]
        plain = [
            Datum(each.model_input, {**it, "weights": np.zeros(it["target_tokens"].shape)})
            for each, it in zip(data, targets, strict=True)
        ]
        outputs = self.forward(plain, "cross_entropy").result().loss_fn_outputs
        leaves = [each["logprobs"].to_torch().clone().requires_grad_(True) for each in outputs]
        loss, metrics = loss_fn(data, leaves)
        loss.backward()  # type: ignore[no-untyped-call]
        linear: list[Datum] = []
        for each, it, leaf in zip(data, targets, leaves, strict=True):
            if leaf.grad is None:
                raise ValueError(f"forward_backward_custom: the loss does not depend on datum {len(linear)}")
            linear.append(Datum(each.model_input, {**it, "weights": -leaf.grad}))
        coming, total = self._passed(linear, "cross_entropy", None), float(loss.detach().sum())

        async def passed() -> types.ForwardBackwardOutput:
            learned = await coming
            mine = {**metrics, "loss:sum": total, "surrogate_loss:sum": learned.metrics["loss:sum"]}
            return types.ForwardBackwardOutput(learned.loss_fn_outputs, {**learned.metrics, **mine})

        return Promise(self._local.begun(passed()))

    def optim_step(self, optim_params: AdamParams | None = None) -> Promise[Any]:
        """Take a step; its `metrics`."""
        adam = AdamParams() if optim_params is None else optim_params
        return self._asked("optim_step", {"adam_params": {name: getattr(adam, name) for name in adam.__slots__}})

    def save_state(self, name: str, ttl_seconds: int | None = None, overwrite: bool = False) -> Promise[Any]:
        """Write a checkpoint to go on from; its `path`."""
        return self._asked("save_weights", {"path": name, "ttl_seconds": ttl_seconds, "overwrite": overwrite})

    def load_state(self, path: str) -> Promise[Any]:
        """Take weights of a checkpoint over."""
        return self._asked("load_weights", {"path": path, "optimizer": False})

    def load_state_with_optimizer(self, path: str) -> Promise[Any]:
        """Take a checkpoint over."""
        return self._asked("load_weights", {"path": path, "optimizer": True})

    def save_weights_for_sampler(self, name: str, ttl_seconds: int | None = None) -> Promise[Any]:
        """Write a checkpoint to answer by; its `path`."""
        return self._asked("save_weights_for_sampler", {"path": name, "ttl_seconds": ttl_seconds})

    def save_weights_and_get_sampling_client(self, name: str | None = None) -> Promise[SamplingClient]:
        """Answers by the weights as they are."""
        body = {"model_id": self.model_id, "seq_id": next(self._numbers), "path": name}
        body["sampling_session_seq_id"] = next(self._samplers)

        async def made() -> SamplingClient:
            answer = await self._local.app.called("save_weights_for_sampler", body)
            if name is not None:
                return await self._service.create_sampling_client(model_path=answer["path"])
            return SamplingClient(self._local, answer["sampling_session_id"])

        return Promise(self._local.begun(made()))

    def create_sampling_client(self, model_path: str) -> Promise[SamplingClient]:
        """Answers by a checkpoint."""
        return self._service.create_sampling_client(model_path=model_path)

    def _asked(self, call: str, body: Mapping[str, Any]) -> Promise[Any]:
        whole = {**body, "model_id": self.model_id, "seq_id": next(self._numbers)}

        async def asked() -> Any:
            return SimpleNamespace(**await self._local.app.called(call, whole))

        return Promise(self._local.begun(asked()))


class SamplingClient:
    """Answers by weights that do not change; `ServiceClient` and `TrainingClient` make it."""

    def __init__(self, local: Local, id: str) -> None:
        self._local, self._id = local, id

    def get_tokenizer(self) -> Any:
        """The base model's."""
        return load_tokenizer(self._local.app.tokenizer)

    def sample(
        self,
        prompt: ModelInput,
        num_samples: int,
        sampling_params: SamplingParams,
        include_prompt_logprobs: bool = False,
        topk_prompt_logprobs: int = 0,
        topk_sample_logprobs: int = 0,
        target_prompt_logprobs: TensorData | None = None,
        prompt_logprobs_last_n: int | None = None,
    ) -> Promise[types.SampleResponse]:
        """Answer."""
        body = {
            "sampling_session_id": self._id,
            "prompt": {"chunks": [{"type": "encoded_text", "tokens": prompt.to_ints()}]},
            "num_samples": num_samples,
            "sampling_params": sampling_params.json(),
            "prompt_logprobs": include_prompt_logprobs,
            "topk_prompt_logprobs": topk_prompt_logprobs,
            "topk_sample_logprobs": topk_sample_logprobs,
            "target_prompt_logprobs": None if target_prompt_logprobs is None else target_prompt_logprobs.json(),
            "prompt_logprobs_last_n": prompt_logprobs_last_n,
        }

        async def answered() -> types.SampleResponse:
            return types.SampleResponse.of(await self._local.app.called("asample", body))

        return Promise(self._local.begun(answered()))

    def compute_logprobs(
        self, prompt: ModelInput, prompt_logprobs_last_n: int | None = None
    ) -> Promise[list[float | None]]:
        """Log-probs of the tokens of a text, None where there is none."""
        one, last = SamplingParams(max_tokens=1), prompt_logprobs_last_n
        answer = self.sample(prompt, 1, one, include_prompt_logprobs=True, prompt_logprobs_last_n=last)

        async def scored() -> list[float | None]:
            return (await answer).prompt_logprobs or []

        return Promise(self._local.begun(scored()))
