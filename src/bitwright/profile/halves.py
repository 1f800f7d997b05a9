"""Two plans out of one: every second operator, and the others.

An operator between neighbours of its own precision isn't timed as one between others: what it reads lies elsewhere in
caches and memory. Plans that are predicted are mixed, so operators are measured in company of both kinds.
"""

from __future__ import annotations

from dataclasses import replace

from bitwright.plan import Plan


def halves(plan: Plan) -> list[Plan]:
    """Of a resolved plan; fewer than two where there is nothing to divide."""
    names = [name for name, spec in plan.compute.items() if spec.low]
    names += list(dict.fromkeys(site.rpartition(":")[0] for site, _ in plan.quantized))
    chosen = (set(names[0::2]), set(names[1::2]))
    return [restricted(plan, own) for own in chosen if own and len(own) < len(names)]


def restricted(plan: Plan, operators: set[str]) -> Plan:
    """The plan without what other operators have; a quantizer that is shared or made of others goes with them."""
    sites = {
        site: spec
        for site, spec in plan.sites.items()
        if site.rpartition(":")[0] in operators and (spec.share is None or spec.share.rpartition(":")[0] in operators)
    }
    whole = {s: spec for s, spec in sites.items() if all(o in sites for o in spec.quantizer_options.get("of", []))}
    folds = {norm: fold for norm, fold in plan.fold.items() if plan.folds[norm].into in operators}
    compute = {name: spec for name, spec in plan.compute.items() if name in operators}
    return replace(plan, sites=whole, fold=folds, compute=compute)
