"""Answers to questions: SQuAD's files as features of a Hugging Face model, and the answers in its outputs."""

from __future__ import annotations

import json
import re
import string
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from bitwright.core.documents import read_text
from bitwright.core.errors import WorkloadError
from bitwright.importers.mqbench.toolkit import TextData
from bitwright.workload.data import call

__all__ = ["Encoder", "Question", "evaluate_answers", "random_features", "read_questions", "score_answer"]

_FIX = "give SQuAD's JSON, or JSON lines with question, context and answers"
_MOST_BYTES = 2**30


@dataclass(frozen=True, kw_only=True)
class Question:
    """A question about a text, with its right answers; none if the text doesn't answer it."""

    text: str
    context: str
    answers: tuple[str, ...]


def read_questions(path: Path) -> list[Question]:
    """The questions of a file: SQuAD's own layout, or one object for each question as Hugging Face stores them."""
    text = read_text(path, what="the questions", fix=_FIX, most=_MOST_BYTES).removeprefix("\ufeff")
    try:
        found = list(_questions(_rows(text)))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        what = f"the file doesn't have SQuAD's layout: {type(error).__name__}: {error}"
        raise WorkloadError(what, where=str(path), fix=_FIX, code="invalid-data") from error
    if not found:
        raise WorkloadError("the file has no questions", where=str(path), fix="add questions", code="no-data")
    return found


def _rows(text: str) -> list[Any]:
    try:
        whole = json.loads(text)
    except ValueError:
        whole = [json.loads(line) for line in text.splitlines() if line.strip()]
    if isinstance(whole, dict):
        whole = whole.get("data", [whole])
    if not isinstance(whole, list):
        raise ValueError("there is no list of questions")
    return whole


def _questions(rows: Iterable[Any]) -> Iterator[Question]:
    for row in rows:
        if "paragraphs" in row:
            for paragraph in row["paragraphs"]:
                for own in paragraph["qas"]:
                    yield _question(own, paragraph["context"])
        else:
            yield _question(row, row["context"])


def _question(row: Mapping[str, Any], context: Any) -> Question:
    given = row["answers"]
    texts = given["text"] if isinstance(given, Mapping) else [one["text"] for one in given]
    texts = [] if row.get("is_impossible") else texts
    if not all(isinstance(value, str) for value in (row["question"], context, *texts)):
        raise ValueError("a question, context or answer is not a text")
    return Question(text=row["question"].strip(), context=context, answers=tuple(texts))


@dataclass(frozen=True)
class _Feature:
    """A part of a context that fits into the model, with the characters of each token; None outside of the context."""

    question: int
    spans: list[tuple[int, int] | None]


class Encoder:
    """Makes features: a question with a part of its context. Long contexts have several parts, which overlap."""

    def __init__(self, tokenizer: Any, data: TextData) -> None:
        if not tokenizer.is_fast:
            what, fix = "answers need the positions of tokens, which only fast tokenizers know", "set it to true"
            raise WorkloadError(what, where="model.use_fast_tokenizer", value=False, fix=fix, code="cannot-run")
        self.tokenizer, self.data = tokenizer, data
        self.length = min(data.max_seq_length, int(min(tokenizer.model_max_length, 10**6)))
        # A question may leave room for one token of new context in each part.
        self.room = self.length - tokenizer.num_special_tokens_to_add(pair=True) - data.doc_stride - 1
        if self.room < 1:
            what = f"parts of {self.length} tokens are too short to overlap by doc_stride tokens"
            fix = "lower data.doc_stride, or raise data.max_seq_length"
            raise WorkloadError(what, where="data.doc_stride", value=data.doc_stride, fix=fix, code="invalid-value")

    def features(self, questions: Sequence[Question]) -> tuple[dict[str, Tensor], list[_Feature]]:
        """The inputs of all parts, and what each part shows."""
        right = self.tokenizer.padding_side == "right"
        texts, contexts = [self._shortened(question.text) for question in questions], [q.context for q in questions]
        made = self.tokenizer(
            *((texts, contexts) if right else (contexts, texts)),
            truncation="only_second" if right else "only_first",
            max_length=self.length,
            stride=self.data.doc_stride,
            return_overflowing_tokens=True,
            return_offsets_mapping=True,
            padding="max_length" if self.data.pad_to_max_length else "longest",
            return_tensors="pt",
        )
        owners = made.pop("overflow_to_sample_mapping").tolist()
        offsets = made.pop("offset_mapping").tolist()
        features = []
        for index, owner in enumerate(owners):
            context = int(right)
            spans = [
                (start, end) if sequence == context else None
                for (start, end), sequence in zip(offsets[index], made.sequence_ids(index), strict=True)
            ]
            features.append(_Feature(owner, spans))
        return dict(made), features

    def _shortened(self, question: str) -> str:
        """The part of a question that leaves room for the context."""
        spans = self.tokenizer(question, add_special_tokens=False, return_offsets_mapping=True)["offset_mapping"]
        return question if len(spans) <= self.room else question[: spans[self.room - 1][1]]

    def batches(
        self, questions: Sequence[Question], size: int
    ) -> Iterator[tuple[list[Question], dict[str, Tensor], list[_Feature]]]:
        """Some questions at a time, with all their features."""
        for start in range(0, len(questions), size):
            some = list(questions[start : start + size])
            yield some, *self.features(some)


def evaluate_answers(
    encoder: Encoder, questions: Sequence[Question], batch: int
) -> Callable[[Callable[..., Any]], dict[str, float]]:
    """A workload's `evaluate`: SQuAD's F1 and exact matches, in percent."""

    def evaluate(predict: Callable[..., Any]) -> dict[str, float]:
        f1 = exact = 0.0
        for some, inputs, features in encoder.batches(questions, batch):
            starts, ends = [], []
            for first in range(0, len(features), batch):
                part = {name: value[first : first + batch] for name, value in inputs.items()}
                start, end = _logits(call(predict, part))
                starts += list(start.float().numpy())
                ends += list(end.float().numpy())
            found = _answers(some, features, list(zip(starts, ends, strict=True)), encoder.data)
            for question, answer in zip(some, found, strict=True):
                scores = [score_answer(answer, right) for right in question.answers or ("",)]
                f1 += max(score for score, _ in scores)
                exact += max(same for _, same in scores)
        count = len(questions)
        return {"f1": 100 * f1 / count, "exact_match": 100 * exact / count, "n": float(count)}

    return evaluate


def _logits(output: Any) -> tuple[Tensor, Tensor]:
    """The scores of tokens as the first and the last of an answer."""
    pair: tuple[Any, ...] = ()
    if isinstance(output, Mapping) and "start_logits" in output:
        pair = (output["start_logits"], output["end_logits"])
    elif isinstance(output, tuple | list):
        pair = tuple(output[:2])
    if len(pair) != 2 or not all(isinstance(one, Tensor) and one.ndim == 2 for one in pair):
        what, fix = "the model has no scores of the first and the last token", "use a ForQuestionAnswering model"
        raise WorkloadError(what, where="model", fix=fix, code="invalid-output")
    return pair[0].detach().cpu(), pair[1].detach().cpu()


def _answers(
    questions: Sequence[Question], features: Sequence[_Feature], scores: Sequence[tuple[Any, Any]], data: TextData
) -> list[str]:
    """The best answer to each question over all parts of its context."""
    best: list[tuple[float, str]] = [(-np.inf, "")] * len(questions)
    none = [np.inf] * len(questions)
    for feature, (starts, ends) in zip(features, scores, strict=True):
        owner = feature.question
        none[owner] = min(none[owner], float(starts[0] + ends[0]))  # the first token stands for no answer
        found = _best_span(feature, starts, ends, data)
        if found is not None and found[0] > best[owner][0]:
            score, first, last = found
            best[owner] = score, questions[owner].context[first:last]
    if not data.version_2_with_negative:
        return [text for _, text in best]
    pairs = zip(best, none, strict=True)
    return ["" if empty - score > data.null_score_diff_threshold else text for (score, text), empty in pairs]


def _best_span(feature: _Feature, starts: Any, ends: Any, data: TextData) -> tuple[float, int, int] | None:
    """Score, first and last character of the best answer in a part of the context."""
    found: tuple[float, int, int] | None = None
    inside = [index for index, span in enumerate(feature.spans) if span is not None]
    tops = [[inside[i] for i in np.argsort(-own[inside], kind="stable")[: data.n_best_size]] for own in (starts, ends)]
    for first in tops[0]:
        for last in tops[1]:
            begin, end = feature.spans[first], feature.spans[last]
            if not (begin and end and 0 <= last - first < data.max_answer_length):
                continue
            score = float(starts[first] + ends[last])
            if found is None or score > found[0]:
                found = score, begin[0], end[1]
    return found


def score_answer(answer: str, right: str) -> tuple[float, bool]:
    """F1 of the shared words, and whether the answers are equal, without case, articles and punctuation.

    >>> score_answer("the red house", "A red, old house")
    (0.8, False)
    """
    ours, theirs = _words(answer), _words(right)
    if not ours or not theirs:
        return float(ours == theirs), ours == theirs
    shared = (Counter(ours) & Counter(theirs)).total()
    return 2 * shared / (len(ours) + len(theirs)), ours == theirs


def _words(text: str) -> list[str]:
    plain = "".join(letter for letter in text.lower() if letter not in string.punctuation)
    return re.sub(r"\b(a|an|the)\b", " ", plain).split()


def random_features(encoder: Encoder, questions: Sequence[Question], count: int, seed: int) -> dict[str, Tensor]:
    """So many features of random questions."""
    order = np.random.default_rng(seed).permutation(len(questions))[:count]
    inputs, _ = encoder.features([questions[index] for index in order])
    return {name: torch.as_tensor(value)[:count] for name, value in inputs.items()}
