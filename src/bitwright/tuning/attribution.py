"""Which sites an operator answers for: those that vanish from the plan when it stays float.

A tensor's quantizer stands where the tensor is made, but it is there because of who reads it: only the backend's own
rules can tell what goes away with an operator.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

from bitwright.graph import Graph, Source
from bitwright.plan import Plan


def own_sites(plan: Plan) -> set[str]:
    """Sites with a quantizer of their own."""
    return {site for site, spec in plan.quantized if spec.share is None}


def credit(values: Mapping[str, float], gone: Mapping[str, Collection[str]], graph: Graph) -> dict[str, float]:
    """What each operator suffers, from what each site does.

    `gone` has the sites that vanish with each operator. A site that no single operator takes away belongs in equal
    parts to all that read its tensor.
    """
    sums = {name: sum(values.get(site, 0.0) for site in sites) for name, sites in gone.items()}
    alone = {site for sites in gone.values() for site in sites}
    for site, value in values.items():
        if site in alone:
            continue
        readers = _readers(site, graph, sums)
        for name in readers:
            sums[name] += value / len(readers)
    return sums


def _readers(site: str, graph: Graph, known: Mapping[str, float]) -> set[str]:
    """The operators that read what a site quantizes, also behind operators that are never quantized."""
    operator, _, port = site.rpartition(":")
    if operator not in graph.by_name:
        return set()
    if port != "output":
        return {operator} & set(known)
    found: set[str] = set()
    queue, seen = [Source("op", operator)], set[Source]()
    while queue:
        source = queue.pop()
        if source in seen:
            continue
        seen.add(source)
        for reader, _ in graph.consumers.get(source, ()):
            if reader.name in known:
                found.add(reader.name)
            else:
                queue.append(Source("op", reader.name))
    return found
