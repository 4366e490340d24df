"""What operators of a traced graph do: whose memory their results are, what they write to, the lines they are from."""

from __future__ import annotations

import operator
import re
from pathlib import Path

import torch
from torch import fx

TORCH = Path(torch.__file__).parent
# Operators whose result may be their input's memory, though they do not declare it.
_MAY_ALIAS = {"reshape", "contiguous", "to", "flatten", "dropout", "expand_as", "type_as", "view_as"}


def written_by(node: fx.Node) -> list[fx.Node]:
    """Return the tensors that an operator writes to."""
    schema = getattr(node.target, "_schema", None)
    if node.op != "call_function" or schema is None:
        return []
    found = []
    for number, argument in enumerate(schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = node.args[number] if number < len(node.args) else node.kwargs.get(argument.name)
            found += [value] if isinstance(value, fx.Node) else []
    return found


def root_of(node: fx.Node) -> fx.Node:
    """Return the tensor whose memory a node's result may be."""
    while node.op == "call_function" and node.all_input_nodes:
        schema = getattr(node.target, "_schema", None)
        if schema is None:
            shares = node.target is operator.getitem
        else:
            shares = any(one.alias_info for one in schema.returns) or schema.name.split("::")[-1] in _MAY_ALIAS
        if not shares:
            break
        node = node.all_input_nodes[0]
    return node


def is_assertion(node: fx.Node) -> bool:
    name = getattr(node.target, "__name__", "")
    return name.startswith(("_assert", "sym_constrain"))


def describe(node: fx.Node) -> str:
    """Return the user's line that made a value."""
    if node.op == "placeholder":
        return f"the input `{node.name}`"
    lines = re.findall(r'File "([^"]+)", line (\d+), in .*\n(.*)', node.meta.get("stack_trace") or "")
    own = [(file, line, text) for file, line, text in lines if TORCH not in Path(file).parents]
    if not own:
        return f"`{node.name}`"
    file, line, text = own[-1]
    return f"`{text.strip()}` ({file}:{line})"
