"""A reader of pickles that runs nothing: it interprets the opcodes on plain data, and one class becomes a plain record.

Unlike a subclass of `pickle.Unpickler` it has no Python object to call: names in the pickle stay names, and the three
calls that NumPy's and `collections`' own objects need are recognised by their form and evaluated here:
`defaultdict(list)` is an empty dict, `dtype("f8", …)` a name, `scalar(dtype, bytes)` a number. Every other class, call,
persistent id, extension code or object state is rejected with its byte position.
"""

from __future__ import annotations

import pickletools
import struct
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from dejavu.foundation.errors import InputError

# Limits. Alpa's own database of six meshes has 0.34 MB and 85,000 opcodes; these allow fifty times as much.
MOST_BYTES = 64 * 2**20
MOST_OPCODES = 5_000_000
MOST_KEYS = 100_000  # of one dict: keys that were made to collide cost their square
MOST_KEY_PARTS = 100_000  # of one key that is a tuple, shared parts counted each time
MOST_KEY_DEPTH = 8  # Python's hash of a tuple recurses without a check

_CODES = {"f8": "d", "f4": "f", "f2": "e", "i8": "q", "i4": "i", "i2": "h", "u8": "Q", "u4": "I", "b1": "?"}
_DEFAULTDICT, _LIST, _DTYPE = "collections.defaultdict", "builtins.list", "numpy.dtype"
_SCALARS = ("numpy.core.multiarray.scalar", "numpy._core.multiarray.scalar")
_HARMLESS = (_DEFAULTDICT, _LIST, "__builtin__.list", _DTYPE, *_SCALARS)


@dataclass(frozen=True)
class Record:
    """An object of the one allowed class: its name, and the attributes that the pickle gives it."""

    name: str
    attributes: dict[str, Any]


@dataclass(frozen=True)
class _Name:
    name: str


@dataclass
class _Dtype:
    code: str
    order: str = "<"


class _Mark:
    pass


class _Refused(Exception):
    pass


def read_plain(data: bytes, record: str, where: str) -> Any:
    """Read the pickle as numbers, text, tuples, lists, dicts and `Record`s of the class named `record`.

    Raises:
        InputError: it contains or does anything else, or exceeds a limit; the message names the byte and its content.
    """
    if len(data) > MOST_BYTES:
        raise InputError(f"{where} has {len(data):,} bytes; wanted at most {MOST_BYTES:,}")
    machine = _Machine(record)
    position = 0
    try:
        for number, (opcode, argument, at) in enumerate(pickletools.genops(data)):
            position = at or 0
            if number >= MOST_OPCODES:
                raise _Refused(f"more than {MOST_OPCODES:,} opcodes")
            machine.run(opcode.name, argument)
        if position + 1 != len(data):
            raise _Refused("more data after the end of the pickle")
        return machine.result()
    except _Refused as error:
        problem = str(error)
    except (ValueError, OverflowError, EOFError, LookupError, struct.error, TypeError) as error:
        problem = f"broken: {type(error).__name__} ({str(error)[:120]})"
    raise InputError(
        f"{where}: byte {position}: {problem}; wanted a pickle of numbers and {record} only. Nothing in it was run"
    )


class _Machine:
    """The pickle's stack and memo. Nothing here calls what the pickle names."""

    def __init__(self, record: str) -> None:
        self.record = record
        self.stack: list[Any] = []
        self.memo: dict[int, Any] = {}

    def run(self, opcode: str, argument: Any) -> None:
        if opcode in _CONSTANTS:
            self.stack.append(_CONSTANTS[opcode] if argument is None else argument)
        elif opcode in _ACTIONS:
            _ACTIONS[opcode](self, argument)
        else:
            raise _Refused(f"opcode {opcode}" + ("" if argument is None else f" {str(argument)[:80]!r}"))

    def result(self) -> Any:
        if len(self.stack) != 1:
            raise _Refused(f"{len(self.stack)} values are left at the end")
        return self.stack[0]

    def pop(self) -> Any:
        if not self.stack or isinstance(self.stack[-1], _Mark):
            raise _Refused("a value is missing")
        return self.stack.pop()

    def top(self, type_: type) -> Any:
        if not self.stack or not isinstance(self.stack[-1], type_):
            raise _Refused(f"no {type_.__name__} to add to")
        return self.stack[-1]

    def to_mark(self) -> list[Any]:
        for start in range(len(self.stack) - 1, -1, -1):
            if isinstance(self.stack[start], _Mark):
                items = self.stack[start + 1 :]
                del self.stack[start:]
                return items
        raise _Refused("a mark is missing")

    def discard(self) -> None:
        self.pop()

    def discard_to_mark(self) -> None:
        self.to_mark()

    def put(self, index: int) -> None:
        if not self.stack or isinstance(self.stack[-1], _Mark):
            raise _Refused("nothing to remember")
        self.memo[index] = self.stack[-1]

    def get(self, index: int) -> None:
        if index not in self.memo:
            raise _Refused(f"nothing was remembered as {index}")
        self.stack.append(self.memo[index])

    def tuple_of(self, count: int) -> None:
        self.stack.append(tuple(reversed([self.pop() for _ in range(count)])))

    def append(self, items: list[Any]) -> None:
        self.top(list).extend(items)

    def set_items(self, items: list[Any]) -> None:
        target = self.top(dict)
        if len(items) % 2:
            raise _Refused("a key without a value")
        for key, value in zip(items[::2], items[1::2], strict=True):
            _check_key(key)
            target[key] = value
        if len(target) > MOST_KEYS:
            raise _Refused(f"a dict of more than {MOST_KEYS:,} keys")

    def name(self, full: str) -> None:
        if full != self.record and full not in _HARMLESS:
            raise _Refused(f"it names {full[:200]!r}")
        self.stack.append(_Name(_LIST if full == "__builtin__.list" else full))

    def stack_global(self) -> None:
        name, module = self.pop(), self.pop()
        if not isinstance(name, str) or not isinstance(module, str):
            raise _Refused("a name that is no text")
        self.name(f"{module}.{name}")

    def call(self) -> None:
        arguments, function = self.pop(), self.pop()
        self.stack.append(_called(function, arguments))

    def new_object(self) -> None:
        arguments, class_ = self.pop(), self.pop()
        if class_ != _Name(self.record) or arguments != ():
            raise _Refused(f"an object of {_described(class_)} with arguments {_described(arguments)}")
        self.stack.append(Record(self.record, {}))

    def build(self) -> None:
        state, target = self.pop(), self.stack[-1] if self.stack else None
        if isinstance(target, Record):
            # A state of a dict and slots, as objects with __slots__ have, would be a tuple: rejected.
            if type(state) is not dict or not all(type(key) is str and key.isidentifier() for key in state):
                raise _Refused(f"the state of {self.record} is {_described(state)}, expected a dict of attributes")
            target.attributes.update(state)
        elif isinstance(target, _Dtype) and type(state) is tuple and len(state) > 1 and state[1] in ("<", ">", "|"):
            target.order = "<" if state[1] == "|" else state[1]
        else:
            raise _Refused(f"it sets the state of {_described(target)}")


def _called(function: Any, arguments: Any) -> Any:
    name = function.name if isinstance(function, _Name) else None
    if type(arguments) is tuple:
        if name == _DEFAULTDICT and arguments == (_Name(_LIST),):
            return {}
        if name == _DTYPE and arguments and type(arguments[0]) is str and arguments[0] in _CODES:
            return _Dtype(arguments[0])
        if name in _SCALARS and len(arguments) == 2:
            dtype, content = arguments
            if isinstance(dtype, _Dtype) and type(content) is bytes:
                return struct.unpack(dtype.order + _CODES[dtype.code], content)[0]
    raise _Refused(f"it calls {_described(function)} with {_described(arguments)}")


def _check_key(key: Any) -> None:
    """Check that keys are text, or tuples with few parts: a hash visits shared parts again and again."""
    if type(key) is str:
        return
    if type(key) is not tuple:
        raise _Refused(f"a key is {_described(key)}; wanted text or a tuple")
    parts = 0
    waiting: list[tuple[Any, int]] = [(key, 0)]
    while waiting:
        part, depth = waiting.pop()
        if type(part) is tuple:
            parts += 1 + len(part)
            if parts > MOST_KEY_PARTS or depth > MOST_KEY_DEPTH:
                raise _Refused(f"a key of more than {MOST_KEY_PARTS:,} parts or deeper than {MOST_KEY_DEPTH} tuples")
            waiting.extend((inner, depth + 1) for inner in part)
        elif type(part) not in (str, int, bool, float, bytes, type(None)):
            raise _Refused(f"a part of a key is {_described(part)}; wanted text or numbers")


def _described(value: Any) -> str:
    """Describe a value briefly, whatever it is: a hostile pickle's may be endless to print."""
    if isinstance(value, _Name):
        return value.name
    if isinstance(value, str):
        return repr(value[:60])
    if type(value) is tuple:
        inside = ", ".join(part.name if isinstance(part, _Name) else type(part).__name__ for part in value[:4])
        return f"({inside}{', …' if len(value) > 4 else ''})"
    return type(value).__name__


_CONSTANTS: dict[str, Any] = {
    "NONE": None,
    "NEWTRUE": True,
    "NEWFALSE": False,
    **dict.fromkeys(("INT", "BININT", "BININT1", "BININT2", "LONG", "LONG1", "LONG4", "FLOAT", "BINFLOAT")),
    **dict.fromkeys(("UNICODE", "BINUNICODE", "SHORT_BINUNICODE", "BINUNICODE8")),
    **dict.fromkeys(("BINBYTES", "SHORT_BINBYTES", "BINBYTES8")),
}
_ACTIONS: dict[str, Callable[[_Machine, Any], None]] = {
    **dict.fromkeys(("PROTO", "FRAME", "STOP"), lambda machine, argument: None),
    "MARK": lambda machine, argument: machine.stack.append(_Mark()),
    "POP": lambda machine, argument: machine.discard(),
    "POP_MARK": lambda machine, argument: machine.discard_to_mark(),
    "EMPTY_TUPLE": lambda machine, argument: machine.stack.append(()),
    "EMPTY_LIST": lambda machine, argument: machine.stack.append([]),
    "EMPTY_DICT": lambda machine, argument: machine.stack.append({}),
    "TUPLE1": lambda machine, argument: machine.tuple_of(1),
    "TUPLE2": lambda machine, argument: machine.tuple_of(2),
    "TUPLE3": lambda machine, argument: machine.tuple_of(3),
    "TUPLE": lambda machine, argument: machine.stack.append(tuple(machine.to_mark())),
    "LIST": lambda machine, argument: machine.stack.append(machine.to_mark()),
    "APPEND": lambda machine, argument: machine.append([machine.pop()]),
    "APPENDS": lambda machine, argument: machine.append(machine.to_mark()),
    "SETITEM": lambda machine, argument: machine.set_items([machine.pop(), machine.pop()][::-1]),
    "SETITEMS": lambda machine, argument: machine.set_items(machine.to_mark()),
    **dict.fromkeys(("PUT", "BINPUT", "LONG_BINPUT"), lambda machine, argument: machine.put(argument)),
    "MEMOIZE": lambda machine, argument: machine.put(len(machine.memo)),
    **dict.fromkeys(("GET", "BINGET", "LONG_BINGET"), lambda machine, argument: machine.get(argument)),
    "GLOBAL": lambda machine, argument: machine.name(argument.replace(" ", ".", 1)),
    "STACK_GLOBAL": lambda machine, argument: machine.stack_global(),
    "REDUCE": lambda machine, argument: machine.call(),
    "NEWOBJ": lambda machine, argument: machine.new_object(),
    "BUILD": lambda machine, argument: machine.build(),
}
