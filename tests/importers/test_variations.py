"""Files as people write them: other spellings, layouts and empty values of the keys that the peers accept."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from bitwright.backends import backend
from bitwright.core.documents import parse_yaml
from bitwright.core.errors import BitwrightError, Problem
from bitwright.core.registry import OBSERVERS, QUANTIZERS
from bitwright.importers.lpot import read_lpot, tune_settings
from bitwright.importers.lpot.transforms import ColorJitter, Pad
from bitwright.importers.mqbench import mqbench_settings, read_mqbench

PLAIN = """\
model: {name: net, framework: pytorch}
quantization:
  approach: quant_aware_training
  calibration:
    sampling_size: [50, 100]
    dataloader:
      batch_size: 8
      dataset: {ImageFolder: {root: train}}
      transform: {Resize: {size: 256}, Normalize: {mean: [0.5, 0.4, 0.3], std: [0.1, 0.2, 0.3]}}
  train:
    end_epoch: 2
    optimizer: {SGD: {learning_rate: 0.001, momentum: 0.9, nesterov: true, weight_decay: 0.0001}}
    criterion: {CrossEntropyLoss: {reduction: mean}}
  op_wise: {conv1: {activation: {dtype: [fp32]}, weight: {dtype: [fp32]}}}
tuning:
  strategy: {name: mse}
  accuracy_criterion: {relative: 0.01}
  exit_policy: {timeout: 0, max_trials: 50}
  random_seed: 9527
evaluation:
  accuracy:
    metric: {topk: 1}
    dataloader:
      batch_size: 8
      dataset: {ImageFolder: {root: train}}
      transform: {Resize: {size: 256}, Normalize: {mean: [0.5, 0.4, 0.3], std: [0.1, 0.2, 0.3]}}
"""
ANCHORED = """\
evaluation:
  accuracy:
    metric: {topk: 1}
    dataloader: *loader
"""
SPELLINGS: dict[str, tuple[tuple[str, str], ...]] = {
    "lists of mappings": (
        ("{relative: 0.01}", "[{relative: 0.01}]"),
        ("{timeout: 0, max_trials: 50}", "[{timeout: 0}, {max_trials: 50}]"),
        ("{ImageFolder: {root: train}}", "[{type: ImageFolder}, {root: train}]"),
        ("Resize: {size: 256}", "Resize: [{size: 256}]"),
        ("metric: {topk: 1}", "metric: [{topk: 1}]"),
    ),
    "texts instead of lists": (
        ("[50, 100]", "50, 100"),
        ("[0.5, 0.4, 0.3]", "0.5 0.4 0.3"),
        ("[0.1, 0.2, 0.3]", "'0.1, 0.2, 0.3'"),
        ("dtype: [fp32]", "dtype: fp32"),
    ),
    "numbers as texts": (
        ("0.001,", "1e-3,"),
        ("0.0001", "'1e-4'"),
        ("relative: 0.01", "relative: 1%"),
        ("9527", "'9527'"),
        ("timeout: 0", "timeout: '0'"),
        ("max_trials: 50", "max_trials: 50.0"),
        ("topk: 1", "topk: '1'"),
    ),
    "YAML 1.1": (("nesterov: true", "nesterov: Yes"), ("model:", "%YAML 1.1\n---\nmodel:")),
    "booleans": (("nesterov: true", "nesterov: on"),),
    "old places": (
        ("strategy: {name: mse}", "strategy: mse"),
        ("exit_policy: {timeout: 0, max_trials: 50}", "timeout: 0\n  max_trials: 50"),
        ("    metric: {topk: 1}\n", ""),
        ("tuning:\n", "tuning:\n  metric: {topk: 1}\n"),
    ),
    "other case": (("framework: pytorch", "framework: PyTorch"), ("{name: mse}", "{name: MSE}")),
    "a rule in one word": (("{activation: {dtype: [fp32]}, weight: {dtype: [fp32]}}", "fp32"),),
    "empty values": (
        ("model: {name: net,", "device:\npruning:\nmodel: {name: net, inputs: , outputs: ,"),
        ("tuning:\n", "tuning:\n  workspace:\n  diagnosis:\n  objective:\n"),
        ("quantization:\n", "quantization:\n  recipes:\n  model_wise:\n  optype_wise:\n"),
    ),
    "an anchor": (
        (
            "    dataloader:\n      batch_size: 8\n      dataset",
            "    dataloader: &loader\n      batch_size: 8\n      dataset",
        ),
        (PLAIN[PLAIN.index("evaluation:") :], ANCHORED),
    ),
    "a byte order mark and Windows lines": (("model:", "\ufeffmodel:"), ("\n", "\r\n")),
}


def settings(text: str) -> Any:
    config = read_lpot(parse_yaml(text, where="a.yaml"), where="a.yaml").config
    return tune_settings(config)


@pytest.mark.parametrize("name", SPELLINGS)
def test_other_spellings_of_a_file_mean_the_same(name: str) -> None:
    text = PLAIN
    for old, new in SPELLINGS[name]:
        assert old in text
        text = text.replace(old, new, 1 if "dataloader" in old else -1)
    assert settings(text) == settings(PLAIN)


def problem(text: str) -> Problem:
    """The only problem of a file."""
    with pytest.raises(BitwrightError) as caught:
        settings(text)
    (found,) = caught.value.problems
    return found


FRAMEWORKS = {
    "TensorFlow": ("tensorflow", "tensorflow_itex", "inteltensorflow"),
    "MXNet": ("mxnet",),
    "ONNX": ("onnxrt_qlinearops", "onnxrt_integerops", "onnxrt_qdqops", "onnxrt_integer", "onnxruntime"),
    "Neural Engine": ("engine",),
}


@pytest.mark.parametrize(("system", "name"), [(system, name) for system, names in FRAMEWORKS.items() for name in names])
@pytest.mark.parametrize("layout", ["model: {{name: net, framework: {}}}", "framework: [{{name: {}}}]"])
def test_files_for_other_frameworks_have_one_reason(system: str, name: str, layout: str) -> None:
    """Their other keys don't matter: transforms and recipes of those frameworks are not reported."""
    found = problem(layout.format(name) + "\nquantization: {recipes: {qdq: 1}}\ntuning: {unknown: 1}\n")
    assert found.where == ("model.framework" if layout.startswith("model") else "framework.name")
    assert system in found.what


@pytest.mark.parametrize(
    ("text", "where", "code"),
    [
        ("tuning: {strategy: {name: SigOpt}}", "tuning.strategy.name", "invalid-value"),
        ("model: net", "model", "invalid-value"),
        ("tuning: {diagnosis: true}", "tuning.diagnosis", "invalid-value"),
        ("model_conversion: {source: QAT, destination: default}", "model_conversion", "unsupported-key"),
        (
            "evaluation: {accuracy: {dataloader: {dataset: {ImageFolder: }}}}",
            "evaluation.accuracy.dataloader.dataset.ImageFolder.root",
            "missing-key",
        ),
        (
            "evaluation: {accuracy: {dataloader: {transform: {CenterCrop: 224}}}}",
            "evaluation.accuracy.dataloader.transform.CenterCrop",
            "not-a-mapping",
        ),
        (
            "evaluation: {accuracy: {dataloader: {transform: {ToTensor: 1}}}}",
            "evaluation.accuracy.dataloader.transform.ToTensor",
            "not-a-mapping",
        ),
        (
            "quantization: {calibration: {sampling_size: many}}",
            "quantization.calibration.sampling_size.0",
            "invalid-value",
        ),
    ],
)
def test_wrong_values_have_a_reason_without_names_of_classes(text: str, where: str, code: str) -> None:
    found = problem(text)
    assert (found.where, found.code) == (where, code)
    assert "instance of" not in found.what


def test_tabs_have_an_advice() -> None:
    found = problem("model: {name: net, framework: pytorch}\ntuning:\n\texit_policy: {timeout: 0}\n")
    assert found.code == "invalid-yaml"
    assert "tab" in (found.fix or "")


def test_margins() -> None:
    image = Image.fromarray(np.arange(4 * 6 * 3, dtype=np.uint8).reshape(4, 6, 3))
    random = np.random.default_rng(0)
    padded = np.array(Pad(padding=(2,), fill=9).apply(image, random))
    assert padded.shape == (8, 10, 3)
    assert (padded[:2] == 9).all()
    assert np.array_equal(padded[2:-2, 2:-2], np.array(image))
    sides = Pad(padding=(1, 0, 2, 3), padding_mode="reflect").apply(torch.rand(3, 4, 6), random)
    assert sides.shape == (3, 7, 9)
    assert torch.equal(sides[:, :, 0], sides[:, :, 2])
    assert np.array(Pad(padding=(1, 2)).apply(image.convert("L"), random)).shape == (8, 8)
    with pytest.raises(ValueError, match="padding"):
        Pad(padding=(1, 2, 3))


def test_color_jitter_is_repeatable_and_stays_within_its_strength() -> None:
    image = Image.fromarray(np.full((4, 4, 3), 100, np.uint8))
    step = ColorJitter(brightness=0.3)
    found = [np.array(step.apply(image, np.random.default_rng(seed))) for seed in (0, 0, 1)]
    assert np.array_equal(found[0], found[1])
    assert not np.array_equal(found[0], found[2])
    assert all(one.min() >= 69 and one.max() <= 131 for one in found)
    assert ColorJitter().apply(image, np.random.default_rng(0)) is image


# -- MQBench ----------------------------------------------------------------------------------------------------

METHODS = ("lsq", "pact", "dorefa", "dsq", "qil", "apot")
ZOO_BACKENDS = ("academic", "acl", "fbgemm", "snpe", "tensorrt", "tvm", "bnfold_ablation")
ZOO = """\
model: {{type: {model}, kwargs: {{bn: {{use_sync_bn: true, kwargs: {{}}}}, dropout: 0.2}}}}
dist: {{sync: false}}
qparams: {{w_method: {w}, a_method: {a}, bit: {bit}}}
backend: {backend}
bnfold: {fold}
optimizer:
  type: {optimizer}
  kwargs: {kwargs}
  pconfig: {{bn_b: {{weight_decay: 0.0}}, bn_w: {{weight_decay: 0}}}}
lr_scheduler:
  {{type: Cosine, kwargs: {{base_lr: 4.0e-3, warmup_lr: 4e-3, min_lr: 0.0, warmup_steps: 0, max_iter: 100}}}}
label_smooth: 0.1
ema: {{enable: false, kwargs: {{decay: 0.999}}}}
data:
  {{type: imagenet, read_from: mc, batch_size: 16, num_workers: 4, pin_memory: true, input_size: 224, test_resize: 256}}
saver: {{print_freq: 10, val_freq: 5000, save_many: false, pretrain: {{path: ckpt.pth, ignore: {{key: [optimizer]}}}}}}
"""


@pytest.mark.parametrize("target", ZOO_BACKENDS)
def test_every_combination_of_the_zoo_is_read(target: str) -> None:
    models = ("resnet18", "resnet50", "mobilenet_v2", "efficientnetlite_b0", "regnetx_600m", "regnetx_800m")
    kwargs = ("{nesterov: yes, momentum: 0.9, weight_decay: 1e-4}", "{weight_decay: '0.0001', betas: [0.9, 0.999]}")
    for number, (w, a, bit, fold) in enumerate(itertools.product(METHODS, METHODS, (2, 3, 4, 8), (-1, 0, 1, 2, 3, 4))):
        if number % 5:  # every combination of two keys occurs
            continue
        adam = number % 2
        text = ZOO.format(
            model=models[number // 5 % 6],
            w=w,
            a=a,
            bit=bit,
            backend=target,
            fold=fold,
            optimizer=("SGD", "Adam")[adam],
            kwargs=kwargs[adam],
        )
        config = read_mqbench(parse_yaml(text, where="config.yaml"), where="config.yaml").config
        found = mqbench_settings(config)
        assert found is not None
        assert found.activations == a
        assert found.bits == bit
        assert backend(found.backend).name == found.backend


TOOLKIT = """\
extra_prepare_dict:
  extra_qconfig_dict:
    w_observer: {w_observer}
    a_observer: {a_observer}
    w_fakequantize: {w}
    a_fakequantize: {a}
    w_qscheme: {{bit: {bit}, symmetry: True, per_channel: True, pot_scale: False, p: 2.4}}
    a_qscheme: {{bit: {bit}, symmetry: False, per_channel: False, pot_scale: False}}
quantize:
  quantize_type: {kind}
  cali_batchsize: 16
  backend: '{backend}'
  deploy: {{output_path: './', model_name: 'net', deploy_to_qlinear: false}}
  reconstruction:
    {{pattern: {pattern}, scale_lr: 4.0e-5, warm_up: 0.2, weight: 0.01, max_count: 20000, b_range: [20, 2],
     keep_gpu: True, round_mode: learned_hard_sigmoid, prob: {prob}}}
model: {{type: resnet18, kwargs: {{num_classes: 1000}}, path: /path-of-pretrained}}
data: {{path: /path-of-imagenet, batch_size: 64, num_workers: 4, pin_memory: True, input_size: 224, test_resize: 256}}
process: {{seed: 1005}}
"""
TOOLKIT_BACKENDS = (
    *("Academic", "Tensorrt", "SNPE", "PPLW8A16", "PPLCUDA", "NNIE", "Vitis"),
    *("ONNX_QNN", "OPENVINO", "STPU", "Tengine_u8", "academic", "tensorrt"),
)


@pytest.mark.parametrize("target", TOOLKIT_BACKENDS)
def test_every_combination_of_the_toolkit_is_read(target: str) -> None:
    weights = (
        "FixedFakeQuantize",
        "LearnableFakeQuantize",
        "AdaRoundFakeQuantize",
        "DSQFakeQuantize",
        "TqtFakeQuantize",
    )
    activations = ("FixedFakeQuantize", "LearnableFakeQuantize", "QDropFakeQuantize", "PACTFakeQuantize")
    observers = (
        "MinMaxObserver",
        "MSEObserver",
        "EMAMinMaxObserver",
        "EMAMSEObserver",
        "EMAQuantileObserver",
        "LSQObserver",
    )
    kinds = (("naive_ptq", "block", 1.0), ("advanced_ptq", "layer", 1.0), ("advanced_ptq", "block", 0.5))
    found = []
    for number, (w, a, observer, bit) in enumerate(itertools.product(weights, activations, observers, (2, 4, 8))):
        kind, pattern, prob = kinds[number % 3]
        values = {"w_observer": "MSEObserver", "a_observer": observer, "w": w, "a": a, "bit": bit}
        values |= {"kind": kind, "backend": target, "pattern": pattern, "prob": prob}
        config = read_mqbench(parse_yaml(TOOLKIT.format(**values), where="a"), where="a").config
        made = mqbench_settings(config)
        assert made is not None
        assert bool(made.steps) == (kind == "advanced_ptq")
        found.append(made)
    assert len(found) == 360
    assert {one.weights for one in found} | {one.activations for one in found} <= set(QUANTIZERS.names())
    assert {one.weight_observer for one in found} | {one.observer for one in found} <= set(OBSERVERS.names())
    (name,) = {one.backend for one in found}
    assert backend(name).name == name
