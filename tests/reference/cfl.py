"""CFL with a tree of objects, and splits by trying all of them (Sattler et al. 2020)."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import combinations

import torch
from torch import Tensor

from tests.reference.problem import Problem
from tests.reference.sgd import descend, mean


def cosine(one: Tensor, other: Tensor) -> float:
    return float(one @ other) / math.sqrt(float(one @ one) * float(other @ other))


def least_similar(similar: Sequence[Sequence[float]]) -> tuple[set[int], float]:
    """The part with the first client in the split whose largest similarity across is the least, and that similarity."""
    n = len(similar)
    best, least = {0}, math.inf
    for size in range(n - 1):
        for others in combinations(range(1, n), size):
            part = {0, *others}
            across = max(similar[i][j] for i in part for j in range(n) if j not in part)
            if across < least:
                best, least = part, across
    return best, least


def completely_linked(similar: Sequence[Sequence[float]]) -> set[int]:
    """Join the two groups whose least similar members are the most similar, until there are two."""
    groups = [{i} for i in range(len(similar))]
    while len(groups) > 2:
        pairs = combinations(range(len(groups)), 2)
        a, b = max(pairs, key=lambda pair: min(similar[i][j] for i in groups[pair[0]] for j in groups[pair[1]]))
        groups[a] |= groups.pop(b)
    return groups[0] if 0 in groups[0] else groups[1]


@dataclass
class Node:
    """A cluster; once it is split, the model of before, its parts and their mean directions."""

    model: Tensor
    peak: float = 0.0
    parts: list["Node"] = field(default_factory=list)
    ways: list[Tensor] = field(default_factory=list)


@dataclass
class SlowCFL:
    """All rounds, with each client's node and the start of every descent."""

    problem: Problem
    eps_1: float
    eps_2: float
    lr: float
    gamma: float = 0.0
    relative: bool = True
    complete: bool = False
    equal: bool = False
    nodes: dict[int, Node] = field(default_factory=dict)
    begun: dict[tuple[int, int], Tensor] = field(default_factory=dict)
    walked: int = 0  # descents of clients that had missed a split

    def trained(self, i: int, start: Tensor, number: int) -> Tensor:
        def slope(at: Tensor, chosen: Tensor | None) -> Tensor:
            return self.problem.slope(i, at, chosen)[1]

        return descend(slope, start, self.problem.order(number, i), lr=self.lr)[0]

    def leaf(self, i: int) -> Node:
        node = self.nodes[i]
        while node.parts:
            change = self.trained(i, node.model, 0) - node.model
            first, second = (cosine(change, way) for way in node.ways)
            node = node.parts[0] if first >= second else node.parts[1]
            self.walked += 1
        return node

    def run(self, rounds: list[list[int]]) -> None:
        root = Node(self.problem.initial)
        self.nodes = dict.fromkeys(range(len(self.problem.samples)), root)
        for number, participants in enumerate(rounds, 1):
            clusters: dict[int, tuple[Node, list[int]]] = {}
            for i in participants:
                node = self.leaf(i)
                clusters.setdefault(id(node), (node, []))[1].append(i)
            for node, members in clusters.values():
                self.step(number, node, members)

    def step(self, number: int, node: Node, members: list[int]) -> None:
        weight = {i: 1.0 if self.equal else float(self.problem.samples[i]) for i in members}
        change = {}
        for i in members:
            self.begun[number, i] = node.model
            change[i] = self.trained(i, node.model, number) - node.model
            self.nodes[i] = node
        moved = mean([*change.values()], [*weight.values()])
        node.peak = max(node.peak, float(moved.norm()))
        unit = node.peak if self.relative else 1.0
        still = float(moved.norm()) < self.eps_1 * unit
        apart = max(float(one.norm()) for one in change.values()) > self.eps_2 * unit
        if len(members) > 2 and still and apart:
            similar = [[cosine(change[i], change[j]) for j in members] for i in members]
            part, across = least_similar(similar)
            if self.complete:
                part = completely_linked(similar)
                across = max(similar[i][j] for i in part for j in range(len(members)) if j not in part)
            if math.sqrt((1 - across) / 2) > self.gamma:
                for chosen in (part, {*range(len(members))} - part):
                    names = [members[k] for k in sorted(chosen)]
                    step = mean([change[i] for i in names], [weight[i] for i in names])
                    node.parts.append(Node(node.model + step, node.peak))
                    directions = [change[i] / change[i].norm() for i in names]
                    node.ways.append(torch.stack(directions).sum(0) / len(names))
                    self.nodes |= dict.fromkeys(names, node.parts[-1])
                return
        node.model = node.model + moved
