from __future__ import annotations

import torch

from bitwright.zoo.text import Pairs, Words, description_pairs, encode_pairs


def test_segments_mark_words_of_both_texts() -> None:
    words = Words.learn(["the cat sat", "the dog sat"], least=1)
    the, cat, sat, dog = (words.tokens[word] for word in ("the", "cat", "sat", "dog"))
    tokens, segments = encode_pairs(words, [("The cat sat", "the dog, sat")], 12)
    comma = 1  # an unknown word
    assert tokens.tolist() == [[2, the, cat, sat, 3, the, dog, comma, sat, 3, 0, 0]]
    assert segments.tolist() == [[0, 2, 0, 2, 0, 3, 1, 1, 3, 1, 0, 0]]


def test_long_pairs_truncate_the_longer_text() -> None:
    words = Words.learn(["a b c d e f"], least=1)
    tokens, _ = encode_pairs(words, [("a b c d e f", "a b")], 8)
    ids = [words.tokens[word] for word in "abc"]
    assert tokens.tolist() == [[2, *ids, 3, *ids[:2], 3]]


def test_training_pairs_are_swapped_at_random() -> None:
    words = Words.learn(["a b c"], least=1)
    pairs = Pairs(words, [("a", "b c")] * 64, [1] * 64, 8)
    torch.manual_seed(0)
    (tokens, segments), labels = pairs.__getitems__(list(range(64)))
    a, b, c = (words.tokens[word] for word in "abc")
    straight, swapped = [2, a, 3, b, c, 3, 0, 0], [2, b, c, 3, a, 3, 0, 0]
    counts = [sum(row == kind for row in tokens.tolist()) for kind in (straight, swapped)]
    assert sum(counts) == 64
    assert min(counts) > 16
    assert segments[tokens[:, 2] == 3].unique(dim=0).tolist() == [[0, 0, 0, 1, 1, 1, 0, 0]]
    assert labels.tolist() == [1] * 64


def test_parts_of_the_descriptions_are_disjoint() -> None:
    parts = {part: description_pairs(part) for part in ("training", "held-out", "test")}
    texts = {part: {text for pair in pairs for text in pair} for part, (pairs, _) in parts.items()}
    assert [len(pairs) for pairs, _ in parts.values()] == [1600, 320, 320]
    assert all(sum(labels) * 2 == len(labels) for _, labels in parts.values())
    assert not (texts["training"] | texts["test"]) & texts["held-out"]
    assert len(texts["training"] & texts["test"]) <= 1  # one description repeats a passage
