from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from bitwright.profiling.cost_key import TensorSpec, describe


def test_keys_contain_everything_that_affects_cost() -> None:
    x, w = torch.randn(2, 3, 8, 8), nn.Parameter(torch.randn(4, 3, 3, 3))
    text = describe("conv2d", F.conv2d, (x, w, None, 1, 1), {}).key()
    assert text == "conv2d(input=f32[2,3,8,8], weight=f32[4,3,3,3]+, None, 1, 1)"
    others = [
        describe("conv2d", F.conv2d, (x, w, None, 2, 1), {}),
        describe("conv2d", F.conv2d, (x.bfloat16(), w, None, 1, 1), {}),
        describe("conv2d", F.conv2d, (x.clone().requires_grad_(), w, None, 1, 1), {}),
        describe("conv2d", F.conv2d, (x.contiguous(memory_format=torch.channels_last), w, None, 1, 1), {}),
        describe("conv2d", F.conv2d, (x[:1], w, None, 1, 1), {}),
    ]
    assert len({text, *(other.key() for other in others)}) == 6


def test_in_place_operators_have_their_own_key() -> None:
    x = torch.randn(4)
    assert describe("relu", torch.relu_, (x,), {}).key() == "relu_(input=f32[4])"
    assert describe("relu", F.relu, (x,), {"inplace": True}).inplace


def test_lists_of_tensors_and_ports_by_keyword() -> None:
    x = torch.randn(2, 2)
    assert (
        describe("cat", torch.cat, ([x, x[:1]],), {"dim": 0}).key() == "cat([input0=f32[2,2], input1=f32[1,2]], dim=0)"
    )
    norm = describe("layer_norm", F.layer_norm, (x, (2,)), {"weight": torch.ones(2), "eps": 1e-5})
    assert norm.key() == "layer_norm(input=f32[2,2], [2], eps=1e-05, weight=f32[2])"


def test_a_port_can_be_another_tensor() -> None:
    call = describe("add", torch.add, (torch.ones(2), torch.ones(2)), {})
    assert call.key({"input1": TensorSpec((2,), "bfloat16", True)}) == "add(input0=f32[2], input1=bf16[2]+)"


def test_bytes() -> None:
    assert TensorSpec.of(torch.ones(3, dtype=torch.bool)).bytes == 3
    assert TensorSpec.of(torch.ones(3, dtype=torch.bfloat16)).bytes == 6
    assert TensorSpec.of(torch.ones((), dtype=torch.int64)).bytes == 8
