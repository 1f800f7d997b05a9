"""Reference models and data sets for examples, tests and benchmarks."""

from bitwright.zoo.imagenet import (
    ResNeSt,
    efficientnetlite_b0,
    mobilenet_v2,
    regnetx_600m,
    regnetx_800m,
    resnest50,
    resnet18,
    resnet50,
    vgg16,
)
from bitwright.zoo.networks import EfficientNetLite0, ResNet20
from bitwright.zoo.workloads import DigitsNet, digits, efficientnet_lite0_imagenet, resnet20_cifar10, train_digits

__all__ = [
    "DigitsNet",
    "EfficientNetLite0",
    "ResNeSt",
    "ResNet20",
    "digits",
    "efficientnet_lite0_imagenet",
    "efficientnetlite_b0",
    "mobilenet_v2",
    "regnetx_600m",
    "regnetx_800m",
    "resnest50",
    "resnet18",
    "resnet20_cifar10",
    "resnet50",
    "train_digits",
    "vgg16",
]
