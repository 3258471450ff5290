"""Chunks as FAST's tokens, beside scipy and by properties, and pi0-FAST, which says them. That it computes what
LeRobot's does: `make test-peers`."""

import json

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy import fft
from torch.nn import functional

from rlinf.models.policy.build import load_policy, save_policy
from rlinf.models.policy.vla.fast_tokens import FastTokens, dct
from rlinf.models.policy.vla.pi0_fast import Pi0FastConfig
from tests.models.policy.vla.flow.contract import pi0_fast

HORIZON, NUMBERS, SCALE = 6, 3, 8.0


def chunks(count, seed=0, horizon=HORIZON):
    draw = torch.Generator().manual_seed(seed)
    ends, along = torch.rand(2, count, 1, NUMBERS, generator=draw) * 2 - 1, torch.linspace(0, 1, horizon)[:, None]
    return (1 - along) * ends[0] + along * ends[1]


FAST = FastTokens.fit(chunks(200), scale=SCALE, size=256)
BOUND = 0.5 / SCALE * HORIZON**0.5
"""How far numbers can move when each of H coefficients is rounded: the transform is orthonormal."""


@given(st.integers(1, 40), st.integers(0, 2**16))
def test_the_transform_is_scipy_s_and_its_transpose_takes_it_back(count, seed):
    x = torch.rand(count, 3, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    slow = dct(count) @ x
    torch.testing.assert_close(slow, torch.from_numpy(fft.dct(x.numpy(), axis=0, norm="ortho")), atol=1e-12, rtol=0)
    torch.testing.assert_close(dct(count).T @ slow, x, atol=1e-12, rtol=0)


@given(st.integers(0, 2**16))
def test_a_chunk_comes_back_within_the_rounding_of_its_coefficients_in_fewer_tokens(seed):
    shown = chunks(4, seed)
    rows = FAST.encode(shown)
    again, broken = FAST.decode(rows, HORIZON, NUMBERS)
    assert not broken.any()
    assert (again - shown).abs().max() <= BOUND + 1e-6
    assert FAST.encode(again) == rows  # what tokens say is said by the same
    assert max(map(len, rows)) < HORIZON * NUMBERS


def test_what_is_read_back_from_files_says_the_same():
    read = FastTokens.of_files(FAST.files(), "here")
    assert read.encode(chunks(5, 3)) == FAST.encode(chunks(5, 3))
    assert (read.scale, read.least, read.size) == (FAST.scale, FAST.least, FAST.size)
    with pytest.raises(ValueError, match=r"here.*processor_config\.json"):
        FastTokens.of_files({"tokenizer.json": b"{}"}, "here")
    with pytest.raises(ValueError, match=r"here.*damaged"):
        FastTokens.of_files({**FAST.files(), "processor_config.json": b"{}"}, "here")


@given(st.lists(st.integers(0, FAST.size - 1), max_size=12))
def test_too_few_or_too_many_coefficients_are_padded_or_cut_or_nothing_at_all(row):
    count = HORIZON * NUMBERS
    said = [ord(each) + FAST.least for token in row for each in FAST._tokenizer.decode([token])]
    padded, broken = FAST.decode([row], HORIZON, NUMBERS)
    slow = functional.pad(torch.tensor(said[:count], dtype=torch.float64), (0, max(0, count - len(said))))
    wanted = fft.idct((slow / SCALE).view(HORIZON, NUMBERS).numpy(), axis=0, norm="ortho")
    torch.testing.assert_close(padded[0], torch.from_numpy(wanted).float())
    assert broken.tolist() == [len(said) != count]
    if broken:
        assert not FAST.decode([row], HORIZON, NUMBERS, "zeros")[0].any()


def test_numbers_off_the_scale_are_said_as_near_as_can_be(caplog):
    rows = FAST.encode(chunks(2) * 100)
    again, broken = FAST.decode(rows, HORIZON, NUMBERS)
    assert not broken.any()
    assert again.abs().max() > 1
    assert "no token says coefficient" in caplog.text


def test_more_coefficients_than_tokens_are_refused():
    with pytest.raises(ValueError, match=r"size=8.*scale less than 8"):
        FastTokens.fit(chunks(20), scale=8.0, size=8)


# The policy -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def known(tmp_path):
    return pi0_fast(tmp_path / "authors")


def test_answers_are_drawn_among_fast_s_tokens_until_the_end_and_rows_do_not_depend_on_others(known):
    policy, seeds = load_policy(known.path, known.config), torch.arange(5)
    with torch.no_grad():  # so that rows end at once, late, or not at all
        policy._paligemma.lm_head.weight[policy.vocabulary.end] += 0.1
    whole = policy.act(known.observation(), instructions=known.texts(), generator=seeds)
    words, own = whole.stored["actions"], policy.vocabulary
    assert {*words.flatten().tolist()} <= {0, *own.choices.tolist()}
    for row in words.tolist():
        said = row[: row.index(own.end) + 1] if own.end in row else row
        assert not any(row[len(said) :])
    one = {name: each[2:3] for name, each in known.observation().items()}
    alone = policy.act(one, instructions=known.texts()[2:3], generator=seeds[2:3])
    assert torch.equal(alone.stored["actions"], words[2:3])
    torch.testing.assert_close(alone.logprobs, whole.logprobs[2:3], atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("reads_bos", [True, False])
def test_the_loss_is_the_cross_entropy_of_a_pass_without_a_cache(known, reads_bos):
    policy = load_policy(known.path, {**known.config, "reads_bos": reads_bos})
    seen = policy.inputs(known.observation(3), known.texts(3))
    actions = torch.rand(3, 4, 7, generator=torch.Generator().manual_seed(1)) * 2 - 1
    stored = policy.demonstrated(known.observation(3), actions, known.texts(3))
    words = policy._answers(stored["actions"])
    prefix, lost, count = policy._prefix(seen["rgb"], seen["text"]), 0.0, 0
    for row in range(3):
        hidden, _ = policy._read(prefix, words[:, :1], prefix.cache)
        before = policy._read(prefix, words[:, :1], prefix.cache)[1]
        for place in range(1, words.shape[1]):
            if words[row, place]:
                logits = policy._paligemma.lm_head(hidden[row, -1])
                lost, count = lost - logits.log_softmax(-1)[words[row, place]].item(), count + 1
            hidden, before = policy._read(prefix, words[:, place : place + 1], before, place)
    assert policy.imitate(stored).mean().item() == pytest.approx(lost / count, abs=1e-4)


def test_actions_behind_an_end_are_copies_of_the_last_and_rows_that_do_not_count_change_no_loss(known):
    policy = load_policy(known.path, known.config)
    actions = torch.rand(3, 4, 7, generator=torch.Generator().manual_seed(1)) * 2 - 1
    copied, real = actions.clone(), torch.tensor([[True, True, False, False], [True] * 4, [False] * 4])
    copied[0, 2:] = copied[0, 1]

    def lost(actions, rows, mask):
        seen = {name: each[rows] for name, each in known.observation(3).items()}
        return policy.imitate(policy.demonstrated(seen, actions[rows], known.texts(3)[rows]), mask).mean()

    wanted = lost(copied, slice(2), None)
    torch.testing.assert_close(lost(actions, slice(2), real[:2]), wanted)
    torch.testing.assert_close(lost(actions, slice(3), real), wanted)


def test_fast_s_files_are_taken_from_where_the_run_or_the_checkpoint_says_and_go_along(known, tmp_path):
    (known.path / "fast").rename(tmp_path / "elsewhere")
    with pytest.raises(ValueError, match=r"FAST.*physical-intelligence/fast.*policy\.settings\.fast"):
        load_policy(known.path, known.config)
    policy = load_policy(known.path, {**known.config, "fast": str(tmp_path / "elsewhere")})
    save_policy(policy, tmp_path / "saved")
    wanted = (tmp_path / "elsewhere/tokenizer.json").read_bytes()
    (tmp_path / "elsewhere").rename(tmp_path / "gone")
    assert (tmp_path / "saved/fast/tokenizer.json").read_bytes() == wanted
    assert load_policy(tmp_path / "saved").vocabulary.fast.size == policy.vocabulary.fast.size
    about = json.loads((known.path / "config.json").read_text()) | {"action_tokenizer_name": str(tmp_path / "gone")}
    (known.path / "config.json").write_text(json.dumps(about))
    assert load_policy(known.path, known.config).vocabulary.fast.size == policy.vocabulary.fast.size


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"level": "token"}, r"level=token.*chunk"),
        ({"value_level": "action"}, r"value_level=action.*chunk"),
        ({"chunk": 51}, r"chunk=51.*chunk_size=50"),
        ({"temperature": 0.0}, r"temperature=0\.0.*more than 0"),
    ],
)
def test_what_it_cannot_be_is_refused(settings, said):
    with pytest.raises(ValueError, match=said):
        Pi0FastConfig(**{"image": (8, 8, 3), "action_size": 2, "chunk": 2, **settings})


def test_tokens_that_would_be_words_of_prompts_are_refused(known):
    about = json.loads((known.path / "config.json").read_text()) | {"fast_skip_tokens": 4}
    (known.path / "config.json").write_text(json.dumps(about))
    with pytest.raises(ValueError, match=r"fast_skip_tokens=4"):
        load_policy(known.path, known.config)
