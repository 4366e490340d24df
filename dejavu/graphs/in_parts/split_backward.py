"""A backward pass in two parts, for any graph: the gradients of the inputs now, those of the weights later.

For each group of weights the first part keeps the gradients that arrive at the nodes where its part begins, as torch's
`stage_backward_input` does, and the second part continues from there. Where a weight is used twice, one node lies
downstream of the other: its later part would walk the graph between them again, which another group has freed by then.
Such weights, and those that torch finds no group for (no input requires a gradient), get their gradients in the first
part, accumulated once.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import GradientEdge, Node
from torch.distributed.pipelining._backward import (
    _get_grad_fn_or_grad_acc,
    construct_reverse_graph,
    get_param_groups,
)

Groups = list[dict[str, Any]]  # torch's own: params, intermediates and their grads
__all__ = ["Groups", "backward_input", "backward_weight", "node_of", "own_tensor"]


def backward_input(
    outputs: Sequence[torch.Tensor],
    arriving: Sequence[torch.Tensor] | None,
    inputs: Sequence[Any],
    parameters: Iterable[nn.Parameter],
    *,
    retains: bool = False,
) -> tuple[tuple[torch.Tensor | None, ...], Groups]:
    """Return the inputs' gradients (None where not required), and what `backward_weight` needs for the rest.

    Like torch's `stage_backward_input`, but gradients that cannot wait for the second part are accumulated here.

    Args:
        outputs: none of them a view; see `own_tensor`.
        arriving: the outputs' gradients; None: they are losses.
        retains: what autograd saved stays, also where none of these gradients is left for later.
    """
    ends = [k for k, output in enumerate(outputs) if output.requires_grad]
    gradients = [torch.ones_like(outputs[k]) if arriving is None else arriving[k] for k in ends]
    wanted = [k for k, x in enumerate(inputs) if isinstance(x, torch.Tensor) and x.requires_grad]
    nodes = {node_of(parameter): parameter for parameter in parameters if parameter.requires_grad}
    reverse = construct_reverse_graph([node_of(outputs[k]) for k in ends])
    groups = get_param_groups([node_of(inputs[k]) for k in wanted], list(nodes), reverse)
    # The other groups share no node with these: torch joins weights that begin at one node.
    later = [group for group in groups if len(group["intermediates"]) == 1]
    waiting = {node for group in later for node in group["params"]}
    now = [parameter for node, parameter in nodes.items() if node not in waiting]
    sought = [*(inputs[k] for k in wanted), *now]
    with ExitStack() as hooks:
        for group in later:
            (node,) = group["intermediates"] = list(group["intermediates"])
            hooks.callback(node.register_prehook(_keeps(group)).remove)
        if ends and sought:  # each weight's gradient is added as it comes: together they would be as large as the stage
            retains = retains or bool(later)
            torch.autograd.backward([outputs[k] for k in ends], gradients, retain_graph=retains, inputs=sought)
    found = [inputs[k].grad for k in wanted]
    for k in wanted:
        inputs[k].grad = None
    for k in ends:
        outputs[k].detach_()  # frees the graph between the outputs and the groups' nodes
    of_inputs = dict(zip(wanted, found, strict=True))
    return tuple(of_inputs.get(k) for k in range(len(inputs))), later


def backward_weight(parameters: Iterable[nn.Parameter], groups: Groups) -> None:
    """Accumulate the weights' gradients that `backward_input` left for later.

    Like torch's `stage_backward_weight` of groups with one node each, but a first gradient is a copy (`_accumulate`),
    and a weight of which an operator of one's own gives no gradient has none.
    """
    weights = {node_of(parameter): parameter for parameter in parameters if parameter.requires_grad}
    for group in groups:
        (node,), (arriving,) = group.pop("intermediates"), group.pop("grads", [()])
        ends = [(GradientEdge(node, k), gradient) for k, gradient in enumerate(arriving) if gradient is not None]
        if not ends:
            continue
        nodes = list(group["params"])
        edges, gradients = zip(*ends, strict=True)
        found = list(torch.autograd.grad(edges, [GradientEdge(one, 0) for one in nodes], gradients, allow_unused=True))
        while found:
            _accumulate(weights[nodes.pop()], found.pop())


def _accumulate(parameter: nn.Parameter, gradient: torch.Tensor | None) -> None:
    """Add to a weight's gradient, or make it: a copy, as others may have the tensor that autograd gives, too.

    All terms of a sum get what arrived itself, which is sent upstream, or lies where the next step's will arrive; and
    all elements of what was expanded are one.
    """
    if gradient is None:
        return
    if parameter.grad is None:
        parameter.grad = gradient.clone(memory_format=torch.contiguous_format)
    else:
        parameter.grad.add_(gradient)


def own_tensor(output: torch.Tensor) -> torch.Tensor:
    """Return an output as no view, of the same elements: `backward_input` detaches it in place, as no view can be."""
    if not (output.requires_grad and output._is_view()):
        return output
    owned: torch.Tensor = _OwnTensor.apply(output)  # type: ignore[no-untyped-call]
    return owned


class _OwnTensor(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.data

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:
        return gradients[0]


def node_of(tensor: torch.Tensor) -> Node:
    """Return the node of the graph that makes a tensor's gradient."""
    node = _get_grad_fn_or_grad_acc(tensor)
    assert node is not None, "the tensor wants a gradient"
    return node


def _keeps(group: dict[str, Any]) -> Any:
    """Return a hook that stores the gradient arriving at the group's node."""

    def keep(arriving: Any) -> None:
        group["grads"] = [arriving]

    return keep
