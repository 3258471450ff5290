"""What a server is told of pictures, and by which names it gets the weights of models that read them."""

import base64
import contextlib
from types import SimpleNamespace

import numpy as np
import pytest
from safetensors.numpy import load_file

from rlinf.data.images import content_of
from rlinf.data.tokenizer import load_tokenizer
from rlinf.data.weights import Weights
from rlinf.engines.base import EngineSetup, Request, Sampling
from rlinf.engines.served.engine import Row
from rlinf.engines.served.server import model_files
from rlinf.engines.served.sglang import SGLangServer, SGLangSettings
from rlinf.models.language.build import build_model, pictures_of
from tests.pictured import MODELS, TOKENIZER, asked, pictures


async def test_sglang_gets_pictures_and_never_draws_their_placeholders():
    shown = pictures((16, 16), (16, 24))
    request = Request(1, asked("qwen2_5_vl", shown), Sampling(5), images=shown)
    shows = pictures_of(MODELS["qwen2_5_vl"], load_tokenizer(TOKENIZER))
    sent = []

    async def events(path, body):
        sent.append(body)
        yield {"meta_info": {"completion_tokens": 1, "output_token_logprobs": [[-1.0, 3]]}}

    server = SGLangServer(SGLangSettings(), EngineSetup("", {}, None), "-", ("cpu", 0))
    ask = Row(request, None, shows.banned).ask("name")
    assert [chunk.tokens async for chunk in server.generate(SimpleNamespace(events=events), ask)] == [[3]]
    (body,) = sent
    found = [base64.b64decode(url.partition(",")[2]) for url in body["image_data"]]
    assert found == [content_of(image) for image in shown]
    assert body["input_ids"] == request.prompt_ids.tolist()
    assert body["sampling_params"]["logit_bias"] == {str(shows.placeholder): -1e9}


@pytest.mark.parametrize("kind", MODELS)
def test_a_server_gets_weights_by_the_names_of_files(kind):
    tokenizer = load_tokenizer(TOKENIZER)
    shows = pictures_of(MODELS[kind], tokenizer)
    net = build_model(MODELS[kind], tokenizer)
    setup = EngineSetup("rollout[0]", MODELS[kind], lambda: contextlib.nullcontext(net), tokenizer, shows)
    files = model_files(setup)
    try:
        again = model_files(EngineSetup("rollout[0]", str(files.directory), setup.build_model, tokenizer, shows))
        assert (again.names, again.shapes) == (files.names, files.shapes)
        saved = load_file(files.directory / "model.safetensors")
        sent = dict(files.as_saved(Weights.pack(net.named_parameters(), 1)).named())
        assert sent.keys() == saved.keys()
        assert all(np.array_equal(sent[name].numpy(), array) for name, array in saved.items())
        assert pictures_of(str(files.directory), tokenizer).text == shows.text  # its preprocessor is there
    finally:
        files.remove()
    assert kind == "qwen3_vl" or files.names
