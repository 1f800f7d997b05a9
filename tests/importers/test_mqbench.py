"""MQBench's files become validated settings, and these become ours."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from bitwright.core.documents import parse_yaml
from bitwright.core.errors import BitwrightError, PlanError
from bitwright.core.formats import Format
from bitwright.core.registry import BACKENDS, OBSERVERS, QUANTIZERS
from bitwright.importers.key_table import rows
from bitwright.importers.mqbench import (
    HuggingFaceConfig,
    ToolkitConfig,
    ZooConfig,
    load_mqbench,
    mqbench_settings,
    read_mqbench,
)
from bitwright.importers.mqbench.settings import _BEGINNINGS, _OBSERVERS, _QUANTIZERS
from bitwright.importers.mqbench.toolkit import BACKENDS as THEIR_BACKENDS
from bitwright.ptq import read_steps
from bitwright.training.optimizer import GroupSettings

ZOO = """\
model:
  type: mobilenet_v2
  kwargs: {bn: {use_sync_bn: true, kwargs: {group_size: 4, var_mode: L2}}, dropout: 0.2}
dist: {sync: true}
qparams: {w_method: dsq, a_method: pact, bit: 4, a_observer: KLDObserver}
backend: fbgemm
bnfold: 3
optimizer:
  type: SGD
  kwargs: {nesterov: true, momentum: 0.9, weight_decay: 1.0e-05}
  pconfig: {bn_b: {weight_decay: 0.0}, bn_w: {weight_decay: 0.0}}
lr_scheduler: {type: Cosine, kwargs: {base_lr: 0.001, warmup_lr: 0.01, warmup_steps: 5, max_iter: 25, min_lr: 0.0001}}
label_smooth: 0.1
ema: {enable: true, kwargs: {decay: 0.99}}
data:
  type: imagenet
  read_from: mc
  use_dali: false
  batch_size: 32
  num_workers: 6
  train:
    root_dir: /train/
    meta_file: /train.txt
    sampler: {type: distributed_iteration}
    transforms: {type: STANDARD}
  test:
    root_dir: /val/
    meta_file: /val.txt
    transforms: {type: ONECROP}
    evaluator: {type: imagenet, kwargs: {topk: [1, 5]}}
saver: {print_freq: 10, val_freq: 500, pretrain: {path: ckpt.pth.tar, ignore: {key: {}, model: [fc.weight]}}}
"""
TOOLKIT = """\
extra_prepare_dict:
  extra_qconfig_dict:
    w_observer: MSEObserver
    a_observer: EMAMSEObserver
    w_fakequantize: AdaRoundFakeQuantize
    a_fakequantize: QDropFakeQuantize
    w_qscheme: {bit: 2, symmetry: false, per_channel: true, pot_scale: false, p: 2.4}
    a_qscheme: {bit: 4, symmetry: true, per_channel: false, pot_scale: true, p: 2.4}
  extra_quantizer_dict: {exclude_module_name: [layer1.0.conv1]}
quantize:
  quantize_type: advanced_ptq
  cali_batchsize: 16
  reconstruction: {pattern: block, scale_lr: 4.0e-5, max_count: 200, weight: 0.1, prob: 0.5, b_range: [20, 2]}
  deploy: {output_path: /out, model_name: res18, deploy_to_qlinear: true}
model: {type: resnet18, kwargs: {num_classes: 10}, path: /ckpt}
data: {path: /imagenet, batch_size: 64}
process: {seed: 7}
"""
TEXT = """\
quant:
  a_qconfig: {quantizer: FixedFakeQuantize, observer: EMAMinMaxObserver, bit: 8, symmetric: false, ch_axis: -1}
  w_qconfig: {quantizer: FixedFakeQuantize, observer: MinMaxObserver, bit: 8, symmetric: true, ch_axis: 0}
  calibrate: 128
  backend: academic
data: {task_name: mrpc, max_seq_length: 64}
model: {model_name_or_path: ./bert, use_fast_tokenizer: true}
train: {seed: 3, output_dir: out, per_device_eval_batch_size: 8}
progress: {log_level: passive}
"""


def config_of(text: str) -> Any:
    return read_mqbench(parse_yaml(text, where="a"), where="a").config


def problems_of(text: str) -> dict[str | None, str | None]:
    with pytest.raises(PlanError) as caught:
        read_mqbench(parse_yaml(text, where="a"), where="a")
    return {problem.where: problem.code for problem in caught.value.problems}


def test_every_setting_of_the_zoo_is_kept() -> None:
    config = config_of(ZOO)
    assert isinstance(config, ZooConfig)
    assert config.model is not None
    assert config.model.kwargs.bn.use_sync_bn
    assert config.model.kwargs.bn.kwargs.group_size == 4
    undecayed = GroupSettings(weight_decay=0.0)
    assert config.optimizer.groups == {"bn_b": undecayed, "bn_w": undecayed}
    assert config.optimizer.kwargs.nesterov
    assert (config.label_smooth, config.ema.enable, config.ema.kwargs.decay) == (0.1, True, 0.99)
    assert config.data.train is not None
    assert config.data.train.meta_file == "/train.txt"
    assert config.data.test is not None
    assert config.data.test.evaluator.kwargs.topk == (1, 5)
    assert config.saver.pretrain is not None
    assert config.saver.pretrain.ignore.key == ()
    assert config.saver.pretrain.ignore.model == ("fc.weight",)
    assert config.seed == 1000


def test_no_wd_covers_biases_and_norms() -> None:
    config = config_of(ZOO.replace("  pconfig: {bn_b: {weight_decay: 0.0}, bn_w:", "  no_wd: true\n  pconfig: {bn_w:"))
    assert set(config.optimizer.groups) == {"conv_b", "linear_b", "bn_w", "bn_b"}


def test_the_schedule_warms_up_and_then_follows_a_cosine() -> None:
    schedule = config_of(ZOO).lr_scheduler.rates
    assert [schedule.rate(n, 25) for n in (1, 3, 4)] == pytest.approx([0.001, 0.0055, 0.00775])
    assert schedule.rate(5, 25) == pytest.approx(0.01)
    assert schedule.rate(15, 25) == pytest.approx((0.01 + 0.0001) / 2)
    assert schedule.rate(25, 25) == pytest.approx(0.0001)
    assert schedule.rate(45, 45) == pytest.approx(0.0001)


@pytest.mark.parametrize(
    ("kind", "options", "rates"),
    [
        ("Step", "lr_steps: [3, 5], lr_mults: [0.1, 0.5]", [1.0, 1.0, 0.1, 0.1, 0.05]),
        ("StepDecay", "step_size: 2, decay: 0.5", [1.0, 0.5, 0.5, 0.25, 0.25]),
        ("Poly", "power: 1.0, max_iter: 5", [0.8, 0.6, 0.4, 0.2, 0.0]),
    ],
)
def test_other_schedules(kind: str, options: str, rates: list[float]) -> None:
    text = f"lr_scheduler: {{type: {kind}, kwargs: {{base_lr: 1.0, max_iter: 5, {options}}}}}"
    text = text.replace("max_iter: 5, power: 1.0, max_iter: 5", "power: 1.0, max_iter: 5")
    schedule = config_of(text + "\nqparams: {w_method: lsq, a_method: lsq, bit: 4}\nbackend: tvm\n").lr_scheduler.rates
    assert [schedule.rate(n, 5) for n in range(1, 6)] == pytest.approx(rates)


@pytest.mark.parametrize(
    ("backend", "ours", "fold"),
    [("fbgemm", "fbgemm", 3), ("academic", "academic", -1), ("bnfold_ablation", "academic_fold", 3)],
)
def test_the_zoo_in_our_names(backend: str, ours: str, fold: int) -> None:
    settings = mqbench_settings(config_of(ZOO.replace("fbgemm", backend)))
    assert settings is not None
    assert (settings.backend, settings.fold) == (ours, fold)
    assert (settings.weights, settings.activations) == ("dsq", "pact")
    assert (settings.weight_observer, settings.observer) == ("clip-std", "kl")
    assert (settings.bits, settings.first_last_bits) == (4, 8)


def test_every_setting_of_the_toolkit_is_kept() -> None:
    config = config_of(TOOLKIT)
    assert isinstance(config, ToolkitConfig)
    assert config.quantize is not None
    assert config.quantize.deploy is not None
    assert config.quantize.deploy.deploy_to_qlinear
    assert (config.quantize.cali_batchsize, config.process.seed, config.model.path) == (16, 7, "/ckpt")
    settings = mqbench_settings(config)
    assert settings is not None
    assert (settings.weight_format, settings.activation_format) == ("uint2/channel/asym", "int4/tensor/sym/pot")
    assert (settings.weight_observer, settings.observer, settings.norm) == ("mse", "ema-mse", 2.4)
    assert settings.keep_float == ("layer1.0.conv1",)
    (step,) = read_steps(settings.steps)
    assert step.model_dump().items() >= {"iterations": 200, "weight": 0.1, "drop": 0.5, "activation_lr": 4e-5}.items()


@pytest.mark.parametrize(
    ("pattern", "prob", "name"),
    [("layer", 1.0, "adaround"), ("layer", 0.5, "qdrop"), ("block", 1.0, "brecq"), ("block", 0.5, "qdrop")],
)
def test_reconstruction_is_one_of_three_steps(pattern: str, prob: float, name: str) -> None:
    text = TOOLKIT.replace("pattern: block", f"pattern: {pattern}").replace("prob: 0.5", f"prob: {prob}")
    text = text.replace("[20, 2]", "[10, 3]")
    settings = mqbench_settings(config_of(text))
    assert settings is not None
    (step,) = read_steps(settings.steps)
    assert step.name == name
    options = {"start": 10.0, "end": 3.0, "decay": "linear", "lr": 0.001, "batch": 64, "activation_lr": 4e-5}
    assert step.model_dump().items() >= {**options, "activation_scale": "linear"}.items()
    assert getattr(step, "pattern", pattern) == pattern


def test_only_some_backends_read_the_schemes() -> None:
    settings = mqbench_settings(config_of(TOOLKIT.replace("  cali_batchsize: 16\n", "  backend: SNPE\n")))
    assert settings is not None
    assert (settings.weight_format, settings.activation_format, len(settings.notes)) == (None, None, 1)


def test_backends_have_their_own_quantizers() -> None:
    text = TOOLKIT.replace("  cali_batchsize: 16\n", "  backend: Vitis\n")
    for line in ("w_observer: MSEObserver", "a_observer: EMAMSEObserver"):
        text = text.replace(f"    {line}\n", "")
    settings = mqbench_settings(config_of(text.replace("    w_fakequantize: AdaRoundFakeQuantize\n", "")))
    assert settings is not None
    assert (settings.weights, settings.activations) == ("tqt", "fixed")
    assert (settings.weight_observer, settings.observer) == ("pot-floor", "pot-mode")


def test_a_file_without_quantization_is_a_float_run() -> None:
    config = config_of("model: {type: resnet50, path: /p}\ndata: {path: /d}\nprocess: {seed: 1}\n")
    assert config.is_float
    assert mqbench_settings(config) is None


def test_text_models_are_read() -> None:
    found = read_mqbench(parse_yaml(TEXT, where="a"), where="a")
    assert isinstance(found.config, HuggingFaceConfig)
    assert found.config.train["per_device_eval_batch_size"] == 8
    assert [note.where for note in found.notes] == ["progress"]
    settings = mqbench_settings(found.config)
    assert settings is not None
    assert settings.backend == "academic_nlp"
    assert (settings.weight_format, settings.activation_format) == ("int8/channel/sym", "uint8/tensor/asym")


def test_a_root_file_gives_the_missing_sections(tmp_path: Path) -> None:
    (tmp_path / "base.yaml").write_text("data: {path: /d}\nprocess: {seed: 1}\n")
    (tmp_path / "a.yaml").write_text("root: base.yaml\nmodel: {type: resnet50}\nprocess: {seed: 2}\n")
    config = load_mqbench(tmp_path / "a.yaml").config
    assert (config.data.path, config.process.seed) == ("/d", 2)
    (tmp_path / "base.yaml").write_text("root: a.yaml\n")
    with pytest.raises(BitwrightError) as caught:
        load_mqbench(tmp_path / "a.yaml")
    assert caught.value.codes == ["cyclic-root"]


@pytest.mark.parametrize(
    ("old", "new", "where", "code"),
    [
        ("w_method: dsq", "w_method: dsk", "qparams.w_method", "invalid-value"),
        ("bit: 4", "bitt: 4", "qparams.bitt", "unknown-key"),
        ("KLDObserver", "FancyObserver", "qparams.a_observer", "invalid-value"),
        ("backend: fbgemm", "backend: gpu", "backend", "invalid-value"),
        ("bnfold: 3", "bnfold: 5", "bnfold", "invalid-value"),
        ("nesterov: true", "betas: [0.9, 0.9]", "optimizer", "invalid-value"),
        ("warmup_steps: 5", "warmup_steps: 1", "lr_scheduler.kwargs", "invalid-value"),
        ("type: Cosine", "type: Step", "lr_scheduler", "invalid-value"),
        ("type: STANDARD", "type: AUTOAUG", "data.train.transforms.type", "invalid-value"),
        ("label_smooth: 0.1", "mixup: 0.2", "mixup", "unsupported-key"),
        ("bn_b: {weight_decay: 0.0}", "bn_c: {weight_decay: 0.0}", "optimizer.pconfig.bn_c", "unknown-key"),
    ],
)
def test_problems_have_their_path(old: str, new: str, where: str, code: str) -> None:
    assert problems_of(ZOO.replace(old, new)).items() >= {where: code}.items()


def test_problems_of_the_toolkit_have_their_path() -> None:
    text = TOOLKIT.replace("resnet18", "[1]").replace("cali_batchsize", "cali_batch").replace("bit: 2", "bit: 40")
    assert problems_of(text) == {
        "quantize.cali_batch": "unknown-key",
        "extra_prepare_dict.extra_qconfig_dict.w_qscheme.bit": "invalid-value",
        "model.type": "invalid-value",
    }
    text = TOOLKIT.replace("  cali_batchsize: 16\n", "  backend: Tensort\n")
    assert problems_of(text) == {"quantize.backend": "invalid-value"}


def test_every_name_has_a_counterpart() -> None:
    assert set(_OBSERVERS.values()) <= set(OBSERVERS.names())
    assert {name for pair in _BEGINNINGS.values() for name in pair} <= set(OBSERVERS.names())
    assert set(_QUANTIZERS.values()) <= set(QUANTIZERS.names())
    for name in THEIR_BACKENDS:
        settings = mqbench_settings(config_of(TOOLKIT.replace("  cali_batchsize: 16\n", f"  backend: {name}\n")))
        assert settings is not None
        assert settings.backend in BACKENDS
    for table in (ZooConfig, ToolkitConfig, HuggingFaceConfig):
        assert all(row.text for row in rows(table))


@pytest.mark.realdata
@pytest.mark.parametrize("part", ["zoo", "application"])
def test_published_files_are_read_completely(data_dir: Path, part: str) -> None:
    files = sorted((data_dir / "peers" / "mqbench" / part).glob("*.yaml"))
    if not files:
        pytest.skip("no published files")
    configs = [load_mqbench(file).config for file in files]
    assert {type(config) for config in configs} <= {ZooConfig if part == "zoo" else ToolkitConfig, HuggingFaceConfig}
    for config in configs:
        settings = mqbench_settings(config)
        assert (settings is None) == (isinstance(config, ToolkitConfig) and config.is_float)
        if settings is not None:
            read_steps(settings.steps)
            assert settings.backend in BACKENDS
            for text in (settings.weight_format, settings.activation_format):
                assert text is None or str(Format.parse(text)) == text
