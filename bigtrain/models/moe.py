"""Mixture-of-experts blocks as ZeRO-3 leaf modules.

ZeRO-3 gathers parameters in the order in which modules run. Experts run or not depending on the data, differently on each
rank; inside a leaf module everything is gathered at once, so that every rank takes part in every collective.
"""

from __future__ import annotations

import logging

import torch

from bigtrain import zero

logger = logging.getLogger(__name__)


def set_moe_leaf_modules(model: torch.nn.Module) -> list[str]:
    """Mark every block that routes over expert modules as a leaf; returns the blocks' names.

    The rule looks at structure, not at names: a module (not the whole model) that holds a list of at least two modules of
    one class, E of them, and beside it a router: a matrix of E rows over the experts' input width. Or, as in DBRX, one module that
    is called for each expert: all its parameters are E matrices on top of each other over that width. Experts that are fused
    in the module that routes, as elsewhere in transformers 5, always run and need nothing.
    """
    found: dict[str, torch.nn.Module] = {}
    for name, module in model.named_modules():
        inside = any(name.startswith(outer + ".") for outer in found)
        if name and not inside and _routes(module):
            found[name] = module
    for module in found.values():
        zero.mark_leaf(module)
    if found:
        logger.info("ZeRO-3 leaf modules (experts): %d, first %s", len(found), next(iter(found)))
    return list(found)


def routes_inside(module: torch.nn.Module) -> bool:
    """Whether the module, or one in it, routes over a list of expert modules."""
    return any(_routes(inner) for inner in module.modules())


def _routes(module: torch.nn.Module) -> bool:
    return any(_routes_over(module, c, e) for c, e in _expert_lists(module)) or _calls_stacked_experts(module)


def _calls_stacked_experts(module: torch.nn.Module) -> bool:
    """Whether a child holds just gate, up and down of E experts, each a matrix of E * n rows, and another child is the router of (E, width)."""
    shapes = [[zero.full_shape(p) for p in child.parameters()] for child in module.children()]
    routers = [s[0] for s in shapes if len(s) == 1 and len(s[0]) == 2 and s[0][0] > 1]
    stacks = [s[0] for s in shapes if len(s) == 3 and len(set(s)) == 1 and len(s[0]) == 2]
    return any(rows % count == 0 and rows > count and width == wide for count, width in routers for rows, wide in stacks)


def _expert_lists(module: torch.nn.Module) -> list[tuple[str, list[torch.nn.Module]]]:
    """(child's name, its experts) for every direct child that is a list of two or more modules of one class."""
    lists = []
    for name, child in module.named_children():
        if isinstance(child, (torch.nn.ModuleList, torch.nn.ModuleDict)):
            experts = list(child.children())
            if len(experts) > 1 and len({type(e) for e in experts}) == 1 and next(experts[0].parameters(), None) is not None:
                lists.append((name, experts))
    return lists


def _routes_over(module: torch.nn.Module, list_name: str, experts: list[torch.nn.Module]) -> bool:
    widths = {n for p in experts[0].parameters() if len(zero.full_shape(p)) == 2 for n in zero.full_shape(p)}
    beside = [p for p in module.parameters(recurse=False)]
    for name, child in module.named_children():
        if name != list_name and not isinstance(child, torch.nn.Embedding):
            beside += child.parameters()
    shapes = [zero.full_shape(p) for p in beside]
    return any(len(s) == 2 and s[0] == len(experts) and s[1] in widths for s in shapes)
