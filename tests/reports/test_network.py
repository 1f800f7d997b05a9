"""The places of operators in the drawing."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from bitwright.graph import capture
from bitwright.reports import network
from bitwright.reports.record import lay_out


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.side = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(x)
        return self.second(self.first(x)) + self.side(x)


def test_producers_come_before_and_no_place_is_taken_twice() -> None:
    nodes = {node.name: node for node in network(capture(Residual(), (torch.randn(2, 4),)))}
    assert [node.kind for node in nodes.values()] == ["relu", "linear", "linear", "linear", "add"]
    for node in nodes.values():
        assert all(nodes[name].level < node.level for name in node.inputs)
    places = [(node.level, node.lane) for node in nodes.values()]
    assert len(set(places)) == len(places)
    main = [nodes[name].lane for name in ("/relu#0", "first", "second", "/add#0")]
    assert main == [0, 0, 0, 0]  # the longest way is straight
    assert nodes["side"].lane == 1
    assert set(nodes["/add#0"].inputs) == {"second", "side"}
    assert nodes["first"].macs == 2 * 4 * 4
    assert nodes["first"].shape == (2, 4)


def test_many_branches_have_lanes_of_their_own() -> None:
    branches = tuple(f"b{n}" for n in range(5))
    places = lay_out([("root", ()), *((name, ("root",)) for name in branches), ("join", branches)])
    assert sorted(places[name][1] for name in branches) == [0, 1, 2, 3, 4]
    assert places["join"] == (2, 0)
