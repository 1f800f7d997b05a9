"""Language models as workloads: a Hugging Face folder or a GGUF file, with a text for calibration and perplexity."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr
from dataclasses import dataclass
from importlib.util import find_spec
from io import StringIO
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bitwright.core.errors import Problem, WorkloadError, did_you_mean, first_line
from bitwright.workload.metrics import make_evaluate
from bitwright.workload.workload import Workload

__all__ = [
    "SCHEMES",
    "TextModel",
    "is_language_model",
    "language_model_problem",
    "load_language_model",
    "next_token_loss",
    "text_samples",
    "tokenizer_of",
    "with_text",
]

SCHEMES = ("hf", "gguf")
"""The beginnings of references: `hf:FOLDER` and `gguf:FILE`."""
_OPTIONS = {"text": "FILE", "sequence": "256", "samples": "32", "batch": "4"}
_OPTION = re.compile(rf",({'|'.join(_OPTIONS)})=")
_LARGEST = 1 << 20
_CHARACTERS = 16  # the maximum per token; only the beginning of a long text is read
_EXAMPLE = (2, 16)  # samples and tokens of the example call


@dataclass(frozen=True, kw_only=True)
class TextModel:
    """A reference such as `hf:FOLDER,text=wiki.txt,sequence=512` with its options.

    >>> TextModel.parse("gguf:model.gguf,text=wiki.txt,samples=8")
    TextModel(scheme='gguf', path=PosixPath('model.gguf'), text=PosixPath('wiki.txt'), sequence=256, samples=8, batch=4)
    """

    scheme: str
    path: Path
    text: Path | None = None
    """The file with the text. Its beginning is for the evaluation, the part that follows for calibration."""
    sequence: int = 256
    """Tokens of a sample."""
    samples: int = 32
    """The most samples for evaluation, and for calibration."""
    batch: int = 4
    """Samples of a batch."""

    @classmethod
    def parse(cls, ref: str) -> TextModel:
        """Read a reference."""
        scheme, _, rest = ref.partition(":")
        path, *pairs = _OPTION.split(rest)
        given = dict(zip(pairs[::2], pairs[1::2], strict=True))
        unknown = re.search(r",(\w+)=", path)
        if not path or (unknown is not None and not Path(path).expanduser().exists()):
            example = ",".join(f"{name}={value}" for name, value in _OPTIONS.items())
            raise WorkloadError(
                "the reference contains no model" if unknown is None else "unknown option of a language model",
                value=ref if unknown is None else unknown[1],
                fix=f"write {scheme}:PATH,{example}" if unknown is None else did_you_mean(unknown[1], _OPTIONS),
                code="invalid-reference" if unknown is None else "unknown-name",
            )
        text = given.pop("text", None)
        numbers = {name: _number(name, value) for name, value in given.items()}
        place = Path(path).expanduser()
        return cls(scheme=scheme, path=place, text=None if text is None else Path(text).expanduser(), **numbers)

    def require_model(self) -> None:
        """Raise an error if there is no such folder or file."""
        if not (self.path.is_dir() if self.scheme == "hf" else self.path.is_file()):
            kind = "a folder with config.json and weights" if self.scheme == "hf" else "a .gguf file"
            raise WorkloadError(
                f"{self.scheme}: takes {kind}",
                value=str(self.path),
                fix="download the model first, for example: hf download NAME --local-dir FOLDER",
                code="no-such-model",
            )


def _number(name: str, value: str) -> int:
    if not value.isdecimal() or not 1 <= int(value) <= _LARGEST:
        raise WorkloadError(
            f"{name} must be a positive integer",
            where=name,
            value=value,
            fix=f"write {name}={_OPTIONS[name]}",
            code="invalid-value",
        )
    return int(value)


def is_language_model(ref: str) -> bool:
    """Whether a reference to a workload begins with `hf:` or `gguf:`."""
    return ref.partition(":")[0] in SCHEMES and ":" in ref


def language_model_problem(ref: str) -> Problem | None:
    """The problem of a reference that can be found without loading the model."""
    try:
        TextModel.parse(ref).require_model()
    except WorkloadError as error:
        return error.problems[0]
    return None


def with_text(
    ref: str, *, text: str | Path | None = None, sequence: int | None = None, samples: int | None = None
) -> str:
    """Add options to a reference; they replace those that it has."""
    given = {"text": text, "sequence": sequence, "samples": samples}
    said = {name: value for name, value in given.items() if value is not None}
    if said and not is_language_model(ref):
        raise WorkloadError(
            f"only language models have {' and '.join(said)}",
            where=", ".join(said),
            value=ref,
            fix="write hf:FOLDER or gguf:FILE, or leave it out: other workloads define their data",
            code="ignored-option",
        )
    head, *pairs = _OPTION.split(ref)
    options = {**dict(zip(pairs[::2], pairs[1::2], strict=True)), **said}
    return ",".join([head, *(f"{name}={value}" for name, value in options.items())])


def load_language_model(ref: str) -> Workload:
    """The workload of `hf:FOLDER` or `gguf:FILE`, as `TextModel` describes. Weights are read in float32.

    Perplexity is measured on samples that don't overlap, each from an empty context. They begin with the token that the
    tokenizer puts at the beginning of texts, if there is one.
    """
    wanted = TextModel.parse(ref)
    model, tokenizer = _read(wanted)
    _tokenizers[model] = tokenizer
    name = wanted.path.stem if wanted.scheme == "gguf" else wanted.path.resolve().name
    vocabulary = int(model.get_input_embeddings().num_embeddings)
    generator = torch.Generator().manual_seed(0)
    example = {"input_ids": torch.randint(vocabulary, _EXAMPLE, generator=generator)}
    shared: dict[str, Any] = {"name": name, "model": model, "metric": "perplexity", "lower_is_better": True}
    if wanted.text is None:
        return Workload(inputs=example, calibration=_no_text, loss=next_token_loss, **shared)
    samples = _samples(wanted, tokenizer, limit=getattr(model.config, "max_position_embeddings", None))
    held = min(wanted.samples, len(samples) // 2)
    evaluation, rest = samples[:held], samples[held : held + wanted.samples]

    def pairs() -> Iterator[tuple[dict[str, Tensor], Tensor]]:
        for ids in evaluation.split(wanted.batch):
            yield {"input_ids": ids}, ids

    return Workload(
        inputs={"input_ids": rest[:2]},
        calibration=lambda: ({"input_ids": ids} for ids in rest.split(wanted.batch)),
        evaluation=pairs,
        evaluate=make_evaluate({"perplexity": {}}, pairs),
        training=lambda: [({"input_ids": ids}, ids) for ids in rest],
        loss=next_token_loss,
        **shared,
    )


def next_token_loss(output: Any, target: Tensor) -> Tensor:
    """The mean cross-entropy of each next token; `target` is the token ids that the model got."""
    logits: Tensor = getattr(output, "logits", output)
    return F.cross_entropy(logits[:, :-1].flatten(0, 1).float(), target[:, 1:].flatten())


def tokenizer_of(model: nn.Module) -> Any:
    """The tokenizer with which `load_language_model` read this model, or None."""
    return _tokenizers.get(model)


#: Tokenizers by model; an attribute of the model would be saved and copied with it.
_tokenizers: WeakKeyDictionary[nn.Module, Any] = WeakKeyDictionary()


def _no_text() -> Iterator[Any]:
    raise WorkloadError(
        "this language model has no text to calibrate with or to measure perplexity on",
        where="text",
        fix='give a text file: --text FILE, load_workload(ref, text=FILE), or "hf:FOLDER,text=FILE"',
        code="no-text",
    )


def _read(wanted: TextModel) -> tuple[Any, Any]:
    path = wanted.path
    needed = {"transformers": "huggingface", "gguf": "language-models"}
    for package in ("transformers",) if wanted.scheme == "hf" else ("transformers", "gguf"):
        if find_spec(package) is None:
            raise WorkloadError(
                f"{wanted.scheme}: needs the package {package}",
                value=str(path),
                fix=f"pip install 'bitwright[{needed[package]}]'",
                code="missing-package",
            )
    wanted.require_model()
    from transformers import AutoModelForCausalLM, AutoTokenizer

    place = path if wanted.scheme == "hf" else path.parent
    options: dict[str, Any] = {"local_files_only": True}
    if wanted.scheme == "gguf":
        options["gguf_file"] = path.name
    try:
        with quiet_transformers(), redirect_stderr(StringIO()):  # the bar of GGUF conversions has no switch
            tokenizer = AutoTokenizer.from_pretrained(place, **options)
            model = AutoModelForCausalLM.from_pretrained(place, dtype=torch.float32, **options)
    except Exception as error:  # transformers raises different types, also those of its dependencies
        raise WorkloadError(
            f"transformers can't load this model: {type(error).__name__}: {first_line(error)}",
            value=str(path),
            fix="call AutoModelForCausalLM.from_pretrained and AutoTokenizer.from_pretrained in Python",
            code="model-not-loadable",
        ) from error
    model.config.use_cache = False  # evaluation and calibration read complete samples
    nn.Module.eval(model)
    return model, tokenizer


@contextmanager
def quiet_transformers() -> Iterator[None]:
    """Silence progress bars and log lines of transformers in this block."""
    from transformers.utils import logging

    messages: Any = logging  # without types
    level, bars = messages.get_verbosity(), messages.is_progress_bar_enabled()
    messages.set_verbosity_error()
    messages.disable_progress_bar()
    try:
        yield
    finally:
        messages.set_verbosity(level)
        if bars:
            messages.enable_progress_bar()


def text_samples(wanted: TextModel, model: Any) -> Tensor:
    """The samples of a text, without the weights of the model."""
    from transformers import AutoTokenizer

    try:
        with quiet_transformers():
            tokenizer: Any = AutoTokenizer.from_pretrained(wanted.path, local_files_only=True)
    except Exception as error:  # transformers raises different types, also those of its dependencies
        raise WorkloadError(
            f"transformers can't load this tokenizer: {type(error).__name__}: {first_line(error)}",
            value=str(wanted.path),
            fix="call AutoTokenizer.from_pretrained in Python",
            code="model-not-loadable",
        ) from error
    return _samples(wanted, tokenizer, limit=getattr(model.config, "max_position_embeddings", None))


def _samples(wanted: TextModel, tokenizer: Any, *, limit: int | None) -> Tensor:
    """Samples of `sequence` tokens each, in the order of the text."""
    assert wanted.text is not None
    if limit is not None and wanted.sequence > limit:
        what, fix = f"the model has {limit} positions", f"use a sequence of at most {limit} tokens"
        raise WorkloadError(what, where="sequence", value=wanted.sequence, fix=fix, code="sequence-too-long")
    try:
        with wanted.text.open(encoding="utf-8") as file:
            text = file.read(2 * wanted.samples * wanted.sequence * _CHARACTERS)
    except (OSError, UnicodeDecodeError) as error:
        raise WorkloadError(
            f"the text can't be read: {first_line(error)}",
            where="text",
            value=str(wanted.text),
            fix="give a text file in UTF-8",
            code="unreadable-file",
        ) from error
    with quiet_transformers():
        begin = [token for token in tokenizer("a")["input_ids"][:1] if token == tokenizer.bos_token_id]
        tokens = torch.tensor(tokenizer(text, add_special_tokens=False)["input_ids"])
    each = wanted.sequence - len(begin)
    count = min(len(tokens) // each, 2 * wanted.samples) if each > 0 else 0
    if count < 2:
        raise WorkloadError(
            f"the text has {len(tokens)} tokens: too few for a sample to evaluate and one to calibrate",
            where="text",
            value=str(wanted.text),
            fix=f"give a longer text, or a sequence below {wanted.sequence} tokens",
            code="text-too-short",
        )
    rows = tokens[: count * each].view(count, each)
    return torch.cat([torch.tensor([begin] * count, dtype=rows.dtype), rows], dim=1) if begin else rows
