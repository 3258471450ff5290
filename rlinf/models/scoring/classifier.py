"""A sequence-classification model of transformers as a reward model: token ids in, one score per sequence out.

The model's own forward is run, on batches padded on the right, so encoders and decoders of every architecture that
`AutoModelForSequenceClassification` has are scored as transformers scores them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import nn
from transformers import AutoModelForSequenceClassification, PreTrainedModel, PreTrainedTokenizerBase

from rlinf.data.tokenizer import pretrained
from rlinf.models.language.load import ONE_AT_A_TIME


class SequenceClassifier(nn.Module):
    """Scores of whole sequences.

    Args:
        model: the classification model.
        pad_id: the token that fills batches up; None computes one sequence at a time, since decoders look for it to
            find where a sequence ends.
        label: of a model with several labels, the one whose log-probability is the score; None: the model has a single
            label, and its logit is the score.

    Raises:
        ValueError: the model has several labels and none was chosen, or not the chosen one.
    """

    def __init__(self, model: PreTrainedModel, pad_id: int | None, label: int | None = None):
        super().__init__()
        count = int(model.config.num_labels or 1)
        if label is None and count > 1:
            raise ValueError(f"the model has {count} labels: say which one is scored, label: 0 to {count - 1}")
        if label is not None and not 0 <= label < count:
            raise ValueError(f"label: {label}: the model has labels 0 to {count - 1}")
        self.model, self._label, self._pad_id = model.eval(), label, pad_id
        if pad_id is not None:
            self.model.config.get_text_config().pad_token_id = pad_id

    @torch.no_grad()
    def scores(self, sequences: Sequence[Sequence[int]], micro_batch_tokens: int) -> list[float]:
        """The score of each sequence.

        Args:
            sequences: token ids, none empty.
            micro_batch_tokens: tokens (padding included) computed at once; a longer sequence stands alone.
        """
        device = next(self.parameters()).device
        found = [0.0] * len(sequences)
        for chosen in self._batches([len(sequence) for sequence in sequences], micro_batch_tokens):
            longest = max(len(sequences[index]) for index in chosen)
            ids = torch.full((len(chosen), longest), self._pad_id or 0)
            mask = torch.zeros_like(ids)
            for row, index in enumerate(chosen):
                ids[row, : len(sequences[index])] = torch.as_tensor(sequences[index])
                mask[row, : len(sequences[index])] = 1
            logits = self.model(input_ids=ids.to(device), attention_mask=mask.to(device)).logits.float()
            scored = logits[:, 0] if self._label is None else torch.log_softmax(logits, -1)[:, self._label]
            for index, score in zip(chosen, scored.tolist(), strict=True):
                found[index] = score
        return found

    def _batches(self, lengths: Sequence[int], most: int) -> Iterator[list[int]]:
        """Indices of sequences that are computed together, the shortest first, so that little is padded."""
        batch: list[int] = []
        for index in sorted(range(len(lengths)), key=lengths.__getitem__):
            if batch and (self._pad_id is None or (len(batch) + 1) * lengths[index] > most):
                yield batch
                batch = []
            batch.append(index)
        if batch:
            yield batch


def load_classifier(
    path: str,
    tokenizer: PreTrainedTokenizerBase,
    *,
    label: int | None = None,
    dtype: torch.dtype = torch.float32,
    device: torch.device | None = None,
) -> SequenceClassifier:
    """Load a saved classification model, without gradients.

    Args:
        path: a Hugging Face directory (or hub name).
        tokenizer: its own; gives the padding token where the model's configuration names none.
        label: see `SequenceClassifier`.
        dtype: of weights and computation.
        device: where it is put.

    Raises:
        ValueError: it is no classification model, or `label` does not fit it.
        OSError: there is none.
    """
    with ONE_AT_A_TIME:
        model, loading = pretrained(AutoModelForSequenceClassification, path, dtype=dtype, output_loading_info=True)
    if missing := sorted(loading["missing_keys"]):
        raise ValueError(
            f"{path} is no classification model: it has no {missing[0]}, so its scores would be random. Name a model "
            "that was trained to score, or set kind: generative"
        )
    pad_id = model.config.get_text_config().pad_token_id
    model.requires_grad_(False).to(device or "cpu")
    return SequenceClassifier(model, tokenizer.pad_token_id if pad_id is None else pad_id, label)
