"""Names of operators and sites. They are stable, so that a plan stays valid.

- `layer1.0.conv1`: the primary operator of a module (the convolution of a Conv2d). Its k-th further call in one
  forward is `layer1.0.conv1#k`.
- `layer1.0/add#0`: the first `add` that the module `layer1.0` itself calls (`layer1.0#1/add#0` in the module's second
  call).
- `/add#0`: the first `add` in the model's own forward.
- `/add_int#0`: the first `add` without floating-point inputs. Such calls are counted separately.

A site is `operator:port`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

from torch import nn

from bitwright.core.errors import BitwrightError, PlanError, Problem

# The primary operator of each torch.nn module. Subclasses have the operator of their base class.
_PRIMARY: dict[type[nn.Module], str] = {
    nn.Conv1d: "conv1d",
    nn.Conv2d: "conv2d",
    nn.Conv3d: "conv3d",
    nn.ConvTranspose1d: "conv_transpose1d",
    nn.ConvTranspose2d: "conv_transpose2d",
    nn.ConvTranspose3d: "conv_transpose3d",
    nn.Linear: "linear",
    nn.Bilinear: "bilinear",
    nn.Embedding: "embedding",
    nn.EmbeddingBag: "embedding_bag",
    nn.LayerNorm: "layer_norm",
    nn.RMSNorm: "rms_norm",
    nn.GroupNorm: "group_norm",
    nn.modules.batchnorm._BatchNorm: "batch_norm",
    nn.modules.instancenorm._InstanceNorm: "instance_norm",
    nn.LSTM: "lstm",
    nn.GRU: "gru",
    nn.RNN: "rnn",
    nn.LSTMCell: "lstm_cell",
    nn.GRUCell: "gru_cell",
    nn.RNNCell: "rnn_cell",
    nn.PReLU: "prelu",
    nn.ReLU6: "hardtanh",
    nn.Hardtanh: "hardtanh",
    nn.LeakyReLU: "leaky_relu",
    nn.Upsample: "interpolate",
    nn.Dropout: "dropout",
    nn.Dropout1d: "dropout1d",
    nn.Dropout2d: "dropout2d",
    nn.Dropout3d: "dropout3d",
    nn.AlphaDropout: "alpha_dropout",
    nn.FeatureAlphaDropout: "feature_alpha_dropout",
    nn.Flatten: "flatten",
    nn.Unflatten: "unflatten",
    nn.PixelShuffle: "pixel_shuffle",
    nn.PixelUnshuffle: "pixel_unshuffle",
    nn.ChannelShuffle: "channel_shuffle",
    nn.Fold: "fold",
    nn.Unfold: "unfold",
    nn.Softmax: "softmax",
    nn.Softmax2d: "softmax",
    nn.Softmin: "softmin",
    nn.LogSoftmax: "log_softmax",
    nn.LocalResponseNorm: "local_response_norm",
    nn.CosineSimilarity: "cosine_similarity",
    nn.AdaptiveAvgPool1d: "adaptive_avg_pool1d",
    nn.AdaptiveAvgPool2d: "adaptive_avg_pool2d",
    nn.AdaptiveAvgPool3d: "adaptive_avg_pool3d",
    nn.AdaptiveMaxPool1d: "adaptive_max_pool1d",
    nn.AdaptiveMaxPool2d: "adaptive_max_pool2d",
    nn.AdaptiveMaxPool3d: "adaptive_max_pool3d",
    nn.AvgPool1d: "avg_pool1d",
    nn.AvgPool2d: "avg_pool2d",
    nn.AvgPool3d: "avg_pool3d",
    nn.LPPool1d: "lp_pool1d",
    nn.LPPool2d: "lp_pool2d",
    nn.LPPool3d: "lp_pool3d",
    nn.FractionalMaxPool2d: "fractional_max_pool2d",
    nn.FractionalMaxPool3d: "fractional_max_pool3d",
    nn.MaxPool1d: "max_pool1d",
    nn.MaxPool2d: "max_pool2d",
    nn.MaxPool3d: "max_pool3d",
    nn.ReLU: "relu",
    nn.GELU: "gelu",
    nn.SiLU: "silu",
    nn.Mish: "mish",
    nn.ELU: "elu",
    nn.SELU: "selu",
    nn.CELU: "celu",
    nn.Softplus: "softplus",
    nn.Sigmoid: "sigmoid",
    nn.Tanh: "tanh",
    nn.Hardswish: "hardswish",
    nn.Hardsigmoid: "hardsigmoid",
    nn.Hardshrink: "hardshrink",
    nn.LogSigmoid: "logsigmoid",
    nn.Softsign: "softsign",
    nn.Softshrink: "softshrink",
    nn.Tanhshrink: "tanhshrink",
    nn.Threshold: "threshold",
    nn.RReLU: "rrelu",
    nn.GLU: "glu",
    nn.modules.padding._ConstantPadNd: "pad",
    nn.modules.padding._ReflectionPadNd: "pad",
    nn.modules.padding._ReplicationPadNd: "pad",
    nn.modules.padding._CircularPadNd: "pad",
}


def primary_kind(module: nn.Module) -> str | None:
    """The kind of the module's primary operator; None if it has none."""
    for base in type(module).__mro__:
        if base in _PRIMARY:
            return _PRIMARY[base]
    return None


def operator_name(path: str, call: int, kind: str, index: int, primary: str | None) -> str:
    """The name of the `index`-th operator of that kind in the `call`-th call of the module at `path`."""
    scope = f"{path}#{call}" if call else path
    if kind == primary and index == 0 and path:
        return scope
    return f"{scope}/{kind}#{index}"


def site_name(operator: str, port: str) -> str:
    """`operator:port`."""
    return f"{operator}:{port}"


_SITE = re.compile(
    r"^(?P<path>[^#/:]*)(?:#(?P<call>\d+))?(?:/(?P<kind>[A-Za-z_]\w*)#(?P<index>\d+))?(?::(?P<port>\w+))?$"
)


def refuse_module_names(paths: Iterable[str]) -> None:
    """Raise an error if a module's name contains a separator of site names."""
    problems = [
        Problem(
            what="a module's name can't contain '#', '/' or ':'",
            where=path,
            fix=f"rename the module, e.g. to {re.sub('[#/:]', '_', path)!r}",
            code="module-name",
        )
        for path in dict.fromkeys(paths)
        if re.search("[#/:]", path)
    ]
    if problems:
        raise PlanError(problems, title="sites of this model can't be named")


@dataclass(frozen=True)
class SiteName:
    """The parts of a site's name. `kind` is None for the module's primary operator."""

    path: str
    call: int
    kind: str | None
    index: int
    port: str

    @staticmethod
    def parse(text: str) -> SiteName:
        """Parse a name.

        >>> SiteName.parse("layer1.0/add#0:input1")
        SiteName(path='layer1.0', call=0, kind='add', index=0, port='input1')
        """
        match = _SITE.match(text)
        if match is None or match["port"] is None or (not match["path"] and match["kind"] is None):
            raise BitwrightError(
                "not a valid site name",
                value=text,
                fix="write module.path:port or module.path/kind#n:port",
                code="invalid-site-name",
            )
        return SiteName(match["path"], int(match["call"] or 0), match["kind"], int(match["index"] or 0), match["port"])
