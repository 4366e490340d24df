"""A strict reader for the YAML files that people write: cluster.yaml and workload.yaml.

YAML 1.2, so `no` and `12:30:45` are text and `1e9` is a number, and nothing is coerced on the way to the schema. What a
human file does not need is refused: tags, merge keys, duplicate keys, alias bombs, deep nesting, huge files. Every
refusal is an `InputError` of the form `cluster.yaml:12:13: what was found, what was wanted`.

The file is taken as a stream of events, not composed first: limits hold before memory is spent.
"""

import difflib
import hashlib
import json
import math
import re
import stat
import types
import typing
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, NoReturn, TypeVar

from pydantic import BaseModel, ValidationError
from ruamel.yaml import YAML
from ruamel.yaml.error import MarkedYAMLError, YAMLError
from ruamel.yaml.events import AliasEvent, DocumentStartEvent, MappingStartEvent, ScalarEvent, SequenceStartEvent

from dejavu.foundation.errors import InputError

MAX_FILE_BYTES = 1 << 20
MAX_NODES = 50_000  # scalars, lists and mappings, aliases expanded; ten thousand hosts fit several times over
MAX_DEPTH = 20
MAX_ALIASES = 20
MAX_PROBLEMS_SHOWN = 20
MAX_INTEGER = (1 << 63) - 1

Location = tuple[str | int, ...]
Model = TypeVar("Model", bound=BaseModel)

_NULL = {"", "~", "null", "Null", "NULL"}
_BOOL = {"true": True, "True": True, "TRUE": True, "false": False, "False": False, "FALSE": False}
_INTEGER = re.compile(r"[-+]?[0-9]+|0o[0-7]+|0x[0-9a-fA-F]+")
_FLOAT = re.compile(r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?")
_INFINITY_OR_NAN = re.compile(r"[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)")
_LEADING_ZERO = re.compile(r"[-+]?0[0-9]+([.eE].*)?")
_TAB_INDENT = re.compile(r"^ *\t[ \t]*(?=[^\s#])", re.MULTILINE)
_SURROGATE = re.compile("[\ud800-\udfff]")


@dataclass(frozen=True)
class Mark:
    """A place in the file; lines and columns count from 1."""

    line: int
    column: int


@dataclass(frozen=True, eq=False)
class Node:
    """One value of the file and where it stands; `value` holds child nodes for lists and mappings."""

    mark: Mark
    value: "dict[str, Node] | list[Node] | str | int | float | bool | None"
    written: str = ""  # a scalar as it was written
    key_marks: "dict[str, Mark] | None" = None
    size: int = 1  # nodes in it, itself included
    height: int = 0  # levels below it

    def plain(self) -> Any:
        if isinstance(self.value, dict):
            return {key: child.plain() for key, child in self.value.items()}
        if isinstance(self.value, list):
            return [child.plain() for child in self.value]
        return self.value

    def describe(self) -> str:
        if isinstance(self.value, dict):
            return "a mapping"
        if isinstance(self.value, list):
            return "a list"
        if self.value is None:
            return "nothing"
        return _quoted(self.value) if isinstance(self.value, str) else self.written


@dataclass(frozen=True, eq=False)
class Document(Generic[Model]):
    """A file that passed its schema, still knowing where each value stands.

    Attributes:
        path: as the caller gave it; messages start with it.
        value: the validated model.
        sha256: of the file's bytes, as hex.
        root: the marked values, for located errors.
    """

    path: Path
    value: Model
    sha256: str
    root: Node

    def mark(self, loc: Location, *, key: bool = False) -> Mark:
        """Where the value at `loc` stands (with `key`, its key); the nearest existing parent if it does not exist."""
        return _resolve(self.root, loc, key=key)[1]

    def error(self, loc: Location, message: str, *, key: bool = False) -> InputError:
        """An error about the value (with `key`, the key) at `loc`, such as ("nodes", 0, "devices", "type")."""
        return _located(self.path, self.mark(loc, key=key), message)


def load(path: Path, schema: type[Model], *, allows_null: bool = True) -> Document[Model]:
    """Read one file and validate it, without coercion: `"2"` is no number and `2.0` is no whole number.

    Args:
        path: the file.
        schema: a pydantic model with `extra="forbid"`, so that misspelt keys are found.
        allows_null: a key may be there without a value and mean its default.

    Raises:
        InputError: the file cannot be read, is not strict YAML, or does not fit; all misfits are listed, one a line.
    """
    path = Path(path)
    content = _read(path)
    root = _Composer(path, _decode(path, content)).compose()
    try:
        # Through JSON, because pydantic's strict mode then still takes a list for a tuple and text for an enum.
        value = schema.model_validate_json(json.dumps(root.plain()), strict=True)
    except ValidationError as error:
        raise join_errors(_explain(path, root, schema, error)) from None
    if not allows_null and (empty := list(_without_value(path, root))):
        raise join_errors(empty)
    return Document(path=path, value=value, sha256=hashlib.sha256(content).hexdigest(), root=root)


def join_errors(problems: list[InputError]) -> InputError:
    """One error that lists each problem on a line, the first `MAX_PROBLEMS_SHOWN` of them."""
    lines = list(dict.fromkeys(str(problem) for problem in problems))
    if len(lines) > MAX_PROBLEMS_SHOWN:
        lines[MAX_PROBLEMS_SHOWN:] = [f"... and {len(lines) - MAX_PROBLEMS_SHOWN} more problems"]
    return InputError("\n".join(lines))


def did_you_mean(word: str, known: list[str]) -> str:
    """`; did you mean 'x'?`, or nothing if no known word is like it."""
    folded = {name.casefold(): name for name in reversed(known)}
    match = difflib.get_close_matches(word.casefold(), folded, n=1)
    return f"; did you mean {folded[match[0]]!r}?" if match else ""


def _located(path: Path, mark: Mark, message: str) -> InputError:
    return InputError(f"{path}:{mark.line}:{mark.column}: {message}")


def _quoted(text: str) -> str:
    return repr(text if len(text) <= 60 else text[:57] + "...")


def _read(path: Path) -> bytes:
    try:
        status = path.stat()
        if not stat.S_ISREG(status.st_mode):  # a pipe or a device could be read for ever
            raise InputError(f"{path}: is not a regular file; wanted a YAML file")
        size_bytes = status.st_size
        if size_bytes <= MAX_FILE_BYTES:
            with path.open("rb") as file:
                content = file.read(MAX_FILE_BYTES + 1)  # it may grow after the stat
            size_bytes = len(content)
    except OSError as error:
        raise InputError(f"{path}: cannot be read: {error.strerror or error}") from None
    except ValueError as error:  # a null byte in the path
        raise InputError(f"{str(path)!r}: cannot be read: {error}") from None
    if size_bytes > MAX_FILE_BYTES:
        raise InputError(
            f"{path}: the file has {size_bytes:,} bytes or more; the limit is {MAX_FILE_BYTES:,} "
            "(write equal hosts as a count)"
        )
    return content


def _decode(path: Path, content: bytes) -> str:
    try:
        text = content.decode("utf-8").removeprefix("\ufeff")
    except UnicodeDecodeError as error:
        before = content[: error.start].decode("utf-8")
        raise _located(path, _mark_at(before, len(before)), "the file is not UTF-8 text") from None
    if tab := _TAB_INDENT.search(text):
        place = tab.start() + tab.group().index("\t")
        raise _located(path, _mark_at(text, place), "a tab in the indentation; indent with spaces")
    return text


def _mark_at(text: str, position: int) -> Mark:
    before = text[:position]
    return Mark(before.count("\n") + 1, position - before.rfind("\n"))


class _Composer:
    """Turns the parser's events into nodes; refuses as early as the stream allows."""

    def __init__(self, path: Path, text: str) -> None:
        self.path = path
        self.text = text
        self.num_nodes = 0
        self.num_aliases = 0
        self.anchors: dict[str, Node] = {}

    def compose(self) -> Node:
        yaml = YAML(typ="safe", pure=True)
        yaml.version = (1, 2)
        try:
            return self._document(yaml.parse(self.text))
        except MarkedYAMLError as error:
            at = error.problem_mark or error.context_mark
            mark = Mark(at.line + 1, at.column + 1) if at else Mark(1, 1)
            what = " ".join(str(part) for part in (error.context, error.problem) if part)
            raise _located(self.path, mark, f"not valid YAML: {what or 'syntax error'}") from None
        except YAMLError as error:  # the reader's own: a character that YAML does not allow
            position = getattr(error, "position", 0)
            mark = _mark_at(self.text, position)
            raise _located(self.path, mark, f"the character {self.text[position]!r} is not allowed in YAML") from None
        except (ValueError, OverflowError) as error:  # ruamel leaks chr()'s on an escape such as "\UFFFFFFFF"
            raise InputError(f"{self.path}:1:1: not valid YAML: {error}") from None

    def _refuse(self, event: Any, message: str) -> NoReturn:
        raise _located(self.path, _mark_of(event), message)

    def _document(self, events: Iterator[Any]) -> Node:
        root = None
        for event in events:
            if not isinstance(event, DocumentStartEvent):
                continue  # the start and end of the stream, the end of the document
            if root is not None:
                self._refuse(event, "a second document starts; wanted one")
            if event.tags or (event.version and tuple(event.version) != (1, 2)):
                self._refuse(event, "directives (%YAML, %TAG) are not supported; the file is read as YAML 1.2")
            root = self._node(next(events), events, depth=0)
        if root is None or (root.value is None and root.written == ""):
            raise InputError(f"{self.path}:1:1: the file is empty")
        return root

    def _node(self, event: Any, events: Iterator[Any], depth: int) -> Node:
        if isinstance(event, AliasEvent):
            return self._alias(event, depth)
        if event.tag is not None:
            self._refuse(event, f"the tag {_quoted(str(event.tag))} is not allowed; write the plain value")
        self._count(event, 1)
        if depth > MAX_DEPTH:
            self._refuse(event, f"nested more than {MAX_DEPTH} levels deep")
        if isinstance(event, ScalarEvent):
            node = self._scalar(event)
        elif isinstance(event, SequenceStartEvent):
            node = self._sequence(event, events, depth)
        else:
            node = self._mapping(event, events, depth)
        if event.anchor is not None:
            self.anchors[event.anchor] = node
        return node

    def _count(self, event: Any, size: int) -> None:
        self.num_nodes += size
        if self.num_nodes > MAX_NODES:
            self._refuse(event, f"more than {MAX_NODES:,} values; write equal hosts as a count")

    def _alias(self, event: AliasEvent, depth: int) -> Node:
        self.num_aliases += 1
        if self.num_aliases > MAX_ALIASES:
            self._refuse(event, f"more than {MAX_ALIASES} aliases")
        node = self.anchors.get(event.anchor)
        if node is None:
            self._refuse(event, f"the alias {_quoted('*' + event.anchor)} has no finished anchor before it")
        if depth + node.height > MAX_DEPTH:
            self._refuse(event, f"nested more than {MAX_DEPTH} levels deep")
        self._count(event, node.size)
        return node

    def _sequence(self, event: SequenceStartEvent, events: Iterator[Any], depth: int) -> Node:
        children: list[Node] = []
        while not _is_end(child := next(events)):
            children.append(self._node(child, events, depth + 1))
        size, height = _extent(children)
        return Node(_mark_of(event), children, size=size, height=height)

    def _mapping(self, event: MappingStartEvent, events: Iterator[Any], depth: int) -> Node:
        children: dict[str, Node] = {}
        marks: dict[str, Mark] = {}
        while not _is_end(key_event := next(events)):
            key = self._key(key_event)
            if key in children:
                self._refuse(
                    key_event, f"the key {_quoted(key)} is here again; it is on line {marks[key].line} already"
                )
            marks[key] = _mark_of(key_event)
            children[key] = self._node(next(events), events, depth + 1)
        size, height = _extent(list(children.values()))
        return Node(_mark_of(event), children, key_marks=marks, size=size, height=height)

    def _key(self, event: Any) -> str:
        if not isinstance(event, ScalarEvent):
            self._refuse(event, "a key must be plain text")
        if event.tag is not None or event.anchor is not None:
            self._refuse(event, "a key must be plain text, without tag or anchor")
        if event.implicit[0] and event.value == "<<":
            self._refuse(event, "merge keys (<<) are not supported; write the keys out")
        key = self._scalar(event).value
        if not isinstance(key, str):
            self._refuse(event, f"the key {event.value or 'null'} is not text; put it in quotes")
        return key

    def _scalar(self, event: ScalarEvent) -> Node:
        text: str = event.value
        mark = _mark_of(event)
        if _SURROGATE.search(text):
            self._refuse(event, "an escape that is no character (half of a surrogate pair)")
        if not event.implicit[0]:  # quoted or a block: text, whatever it looks like
            return Node(mark, text, written=text)
        return Node(mark, self._plain_scalar(event, text), written=text)

    def _plain_scalar(self, event: ScalarEvent, text: str) -> str | int | float | bool | None:
        """What YAML 1.2's core schema says, less what is more likely a mistake."""
        if text in _NULL:
            return None
        if text in _BOOL:
            return _BOOL[text]
        if _LEADING_ZERO.fullmatch(text) and _FLOAT.fullmatch(text):
            self._refuse(event, f"the number {_quoted(text)} has a leading zero; drop it, or put text in quotes")
        if _INTEGER.fullmatch(text):
            number = int(text, 0) if len(text) <= 40 else MAX_INTEGER + 1
            if abs(number) > MAX_INTEGER:
                self._refuse(event, f"the number {_quoted(text)} does not fit into 64 bits")
            return number
        if _FLOAT.fullmatch(text):
            value = float(text)
            if math.isinf(value):
                self._refuse(event, f"the number {_quoted(text)} is too large")
            return value
        if _INFINITY_OR_NAN.fullmatch(text):
            return float(text.replace(".", ""))
        return text


def _mark_of(event: Any) -> Mark:
    return Mark(event.start_mark.line + 1, event.start_mark.column + 1)


def _is_end(event: Any) -> bool:
    return type(event).__name__ in ("SequenceEndEvent", "MappingEndEvent")


def _extent(children: list[Node]) -> tuple[int, int]:
    return 1 + sum(child.size for child in children), 1 + max((child.height for child in children), default=0)


def _resolve(root: Node, loc: Location, *, key: bool = False) -> tuple[Node, Mark]:
    """The node at `loc` and where it stands. Parts that the file does not have (names of union members) are skipped."""
    node, mark = root, root.mark
    for part in loc:
        if isinstance(node.value, dict) and isinstance(part, str) and part in node.value:
            assert node.key_marks is not None
            mark, node = node.key_marks[part], node.value[part]
        elif isinstance(node.value, list) and isinstance(part, int) and part < len(node.value):
            node = node.value[part]
            mark = node.mark
    return node, mark if key else node.mark


_WANTED = {
    "int_type": "a whole number",
    "int_from_float": "a whole number",
    "float_type": "a number",
    "finite_number": "a finite number",
    "bool_type": "true or false",
    "string_type": "text (in quotes if it looks like a number)",
    "list_type": "a list",
    "tuple_type": "a list",
    "dict_type": "a mapping of keys to values",
    "model_type": "a mapping of keys to values",
    "model_attributes_type": "a mapping of keys to values",
    "greater_than": "more than {gt}",
    "greater_than_equal": "at least {ge}",
    "less_than": "less than {lt}",
    "less_than_equal": "at most {le}",
    "too_short": "at least {min_length}",
    "too_long": "at most {max_length}",
    "string_too_short": "text of at least {min_length} characters",
    "string_too_long": "text of at most {max_length} characters",
    "literal_error": "{expected}",
    "enum": "{expected}",
}


def _explain(path: Path, root: Node, schema: type[BaseModel], error: ValidationError) -> list[InputError]:
    """Each of pydantic's errors in a sentence, with its place in the file, from top to bottom."""
    found: list[tuple[Mark, str]] = []
    for item in error.errors(include_url=False):
        loc, kind, context = item["loc"], item["type"], item.get("ctx", {})
        node, mark = _resolve(root, loc, key=kind == "extra_forbidden")
        name = next((part for part in reversed(loc) if isinstance(part, str) and part.isidentifier()), "")
        if kind == "extra_forbidden":
            known = sorted(_known_keys(schema, loc[:-1]))
            hint = did_you_mean(str(loc[-1]), known) or f"; the keys here are {', '.join(known)}"
            message = f"unknown key {_quoted(str(loc[-1]))}{hint}"
        elif kind == "missing":
            message = f"the key {str(loc[-1])!r} is missing"
        elif kind == "value_error":
            message = f"{name}: {context['error']}" if name else str(context["error"])
        else:
            wanted = _WANTED[kind].format(**context) if kind in _WANTED else item["msg"]
            what = f"{context['actual_length']} of them" if "actual_length" in context else node.describe()
            message = f"{name + ': ' if name else ''}found {what}, wanted {wanted}"
        found.append((mark, message))
    found.sort(key=lambda entry: (entry[0].line, entry[0].column))
    return [_located(path, mark, message) for mark, message in found]


def _without_value(path: Path, node: Node) -> Iterator[InputError]:
    """An error for each key that has nothing behind it."""
    if isinstance(node.value, dict):
        for key, child in node.value.items():
            if child.value is None:
                message = f"{key}: found nothing, wanted a value; without the key its default holds"
                assert node.key_marks is not None
                yield _located(path, node.key_marks[key], message)  # nothing itself stands behind the comments
            yield from _without_value(path, child)
    elif isinstance(node.value, list):
        for child in node.value:
            yield from _without_value(path, child)


def _known_keys(schema: type[BaseModel], loc: Location) -> set[str]:
    """The keys that the schema knows at `loc`, through lists, mappings and unions."""
    candidates = _members(schema)
    for part in loc:
        inner: list[Any] = []
        for kind in candidates:
            arguments = typing.get_args(kind)
            if isinstance(kind, type) and issubclass(kind, BaseModel):
                fields = {field.alias or name: field.annotation for name, field in kind.model_fields.items()}
                inner += _members(fields[str(part)]) if part in fields else []
            elif arguments:
                inner += _members(arguments[-1] if arguments[-1] is not Ellipsis else arguments[0])
        candidates = inner or candidates  # the name of a union's member leads nowhere: stay
    models = [kind for kind in candidates if isinstance(kind, type) and issubclass(kind, BaseModel)]
    return {field.alias or name for model in models for name, field in model.model_fields.items()}


def _members(annotation: Any) -> list[Any]:
    origin = typing.get_origin(annotation)
    if origin in (typing.Union, types.UnionType):
        return [member for argument in typing.get_args(annotation) for member in _members(argument)]
    return _members(typing.get_args(annotation)[0]) if origin is typing.Annotated else [annotation]
