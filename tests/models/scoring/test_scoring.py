"""Networks that score: as transformers scores one sequence at a time, whatever lies beside it."""

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from rlinf.models.scoring import load_choices, load_classifier
from tests.models.scoring.saved import TOKENIZER, saved_classifier, saved_language_model

SEQUENCES = [np.random.default_rng(n).integers(2, 14, size).tolist() for n, size in enumerate((5, 1, 12, 5, 30, 2))]


def scores_one_by_one(path, label=None):
    model = AutoModelForSequenceClassification.from_pretrained(path).eval()
    with torch.no_grad():
        logits = [model(input_ids=torch.tensor([ids])).logits[0] for ids in SEQUENCES]
    return [float(one[0] if label is None else torch.log_softmax(one, -1)[label]) for one in logits]


@pytest.mark.parametrize("kind", ["qwen2", "llama", "bert"])
@pytest.mark.parametrize("tokens", [1, 40, 10_000])
def test_a_batch_is_scored_as_transformers_scores_each_alone(tmp_path, kind, tokens):
    path = saved_classifier(tmp_path, kind=kind)
    found = load_classifier(path, TOKENIZER).scores(SEQUENCES, tokens)
    assert np.std(found) > 0.01
    np.testing.assert_allclose(found, scores_one_by_one(path), atol=2e-6)


def test_one_of_several_labels_counts_by_its_log_probability(tmp_path):
    path = saved_classifier(tmp_path, labels=3)
    found = load_classifier(path, TOKENIZER, label=1).scores(SEQUENCES, 64)
    np.testing.assert_allclose(found, scores_one_by_one(path, 1), atol=2e-6)
    with pytest.raises(ValueError, match=r"3 labels: say"):
        load_classifier(path, TOKENIZER)
    with pytest.raises(ValueError, match="labels 0 to 2"):
        load_classifier(path, TOKENIZER, label=3)


def test_without_a_padding_token_sequences_are_computed_one_by_one(tmp_path):
    path = saved_classifier(tmp_path, pad_token_id=None)
    nameless = type(TOKENIZER)(tokenizer_object=TOKENIZER.backend_tokenizer)
    found = load_classifier(path, nameless).scores(SEQUENCES, 10_000)
    np.testing.assert_allclose(found, scores_one_by_one(path), atol=2e-6)


def test_a_model_without_a_head_is_refused_instead_of_given_a_random_one(tmp_path):
    with pytest.raises(ValueError, match=r"classification.*generative"):
        load_classifier(saved_language_model(tmp_path), TOKENIZER)


@pytest.mark.parametrize("tokens", [1, 10_000])
def test_choices_come_to_the_expected_value_under_their_probabilities(tmp_path, tokens):
    path = saved_language_model(tmp_path)
    worth = {"12": 1.0, "3": 0.25, ">": -1.0}
    found = load_choices(path, TOKENIZER, worth).scores(SEQUENCES, tokens)
    model = AutoModelForCausalLM.from_pretrained(path).eval()
    expected = []
    for ids in SEQUENCES:
        weights = []
        for reply in worth:
            more = TOKENIZER(reply, add_special_tokens=False)["input_ids"]
            with torch.no_grad():
                rows = torch.log_softmax(model(torch.tensor([[*ids, *more]])).logits[0].double(), -1)
            weights.append(sum(rows[len(ids) - 1 + k, token] for k, token in enumerate(more)).exp())
        expected.append(float(sum(w * v for w, v in zip(weights, worth.values(), strict=True)) / sum(weights)))
    assert np.std(expected) > 1e-3
    np.testing.assert_allclose(found, expected, atol=2e-6)
    with pytest.raises(ValueError, match=r"''.*token"):
        load_choices(path, TOKENIZER, {"": 1.0, "1": 0.0})
