"""A strict reader for the YAML files that users write: cluster.yaml and workload.yaml.

ruamel.yaml parses and knows each value's position, pydantic validates it against a schema without coercion. Added here:
scalars are YAML 1.2's (`no` and `12:30:45` are text, `1e9` is a number); tags, merge keys, duplicate keys, alias bombs
and huge files are rejected; and every rejection is an `InputError` as `cluster.yaml:12:13: count: found 'two', …`.
"""

import hashlib
import json
import math
import re
import typing
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, NamedTuple, NoReturn, TypeVar

from pydantic import BaseModel, ValidationError
from ruamel.yaml import YAML
from ruamel.yaml.composer import Composer
from ruamel.yaml.error import MarkedYAMLError
from ruamel.yaml.nodes import ScalarNode, SequenceNode
from ruamel.yaml.reader import ReaderError

from dejavu.foundation.errors import InputError
from dejavu.foundation.registry import did_you_mean

MAX_FILE_BYTES = 1 << 20
MAX_NODES = 50_000  # scalars, lists and mappings, aliases expanded; ten thousand hosts fit several times over
MAX_DEPTH = 20
MAX_PROBLEMS_SHOWN = 20

Location = tuple[str | int, ...]
Model = TypeVar("Model", bound=BaseModel)

_NAMED = {"": None, "~": None, "null": None, "true": True, "false": False}
_NAMED |= {word: value for name, value in _NAMED.items() for word in (name.title(), name.upper())}
_INTEGER = re.compile(r"[-+]?[0-9]+|0o[0-7]+|0x[0-9a-fA-F]+")
_FLOAT = re.compile(r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)")
_LEADING_ZERO = re.compile(r"[-+]?0[0-9]+([.eE].*)?")
_SURROGATE = re.compile("[\ud800-\udfff]")


class Mark(NamedTuple):
    """A place in the file; lines and columns count from 1."""

    line: int
    column: int


class Place(NamedTuple):
    """Positions of a value and its key (for a list's item the value itself), and the plain value."""

    key: Mark
    mark: Mark
    value: Any


@dataclass(frozen=True, eq=False)
class Document(Generic[Model]):
    """A file that passed its schema, with the position of each value.

    Attributes:
        path: as the caller gave it; messages start with it.
        value: the validated model.
        sha256: of the file's bytes, as hex.
        places: of each value, for located errors.
    """

    path: Path
    value: Model
    sha256: str
    places: dict[Location, Place]

    def mark(self, loc: Location, *, key: bool = False) -> Mark:
        """Return the position of the value at `loc` (with `key`, of its key), or of the nearest existing parent."""
        place = _nearest(self.places, loc)
        return place.key if key else place.mark

    def error(self, loc: Location, message: str, *, key: bool = False) -> InputError:
        """Make an error about the value (with `key`, the key) at `loc`, such as ("nodes", 0, "devices", "type")."""
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
    places = _places(path, content)
    try:
        # Through JSON, because pydantic's strict mode then still takes a list for a tuple and text for an enum.
        value = schema.model_validate_json(json.dumps(places[()].value), strict=True)
    except ValidationError as error:
        raise join_errors(_explain(path, places, schema, error)) from None
    if not allows_null:
        problem = "found nothing, wanted a value; without the key its default holds"
        nothing = [(place.key, loc[-1]) for loc, place in places.items() if place.value is None and loc]
        if empty := [_located(path, mark, f"{key}: {problem}") for mark, key in nothing if isinstance(key, str)]:
            raise join_errors(empty)
    return Document(path=path, value=value, sha256=hashlib.sha256(content).hexdigest(), places=places)


def join_errors(problems: list[InputError]) -> InputError:
    """Join problems into one error that lists the first `MAX_PROBLEMS_SHOWN`, one per line."""
    lines = list(dict.fromkeys(str(problem) for problem in problems))
    if len(lines) > MAX_PROBLEMS_SHOWN:
        lines[MAX_PROBLEMS_SHOWN:] = [f"... and {len(lines) - MAX_PROBLEMS_SHOWN} more problems"]
    return InputError("\n".join(lines))


def _located(path: Path, mark: Mark, message: str) -> InputError:
    return InputError(f"{path}:{mark.line}:{mark.column}: {message}")


def _quoted(text: str) -> str:
    return repr(text if len(text) <= 60 else text[:57] + "...")


def _read(path: Path) -> bytes:
    try:
        if path.exists() and not path.is_file():  # a pipe or a device could be read for ever
            raise InputError(f"{path}: is not a regular file; wanted a YAML file")
        size_bytes = path.stat().st_size
        content = path.read_bytes() if size_bytes <= MAX_FILE_BYTES else b""
    except OSError as error:
        raise InputError(f"{path}: cannot be read: {error.strerror or error}") from None
    if size_bytes > MAX_FILE_BYTES:
        wanted = f"the limit is {MAX_FILE_BYTES:,} (write equal hosts as a count)"
        raise InputError(f"{path}: the file has {size_bytes:,} bytes or more; {wanted}")
    return content


class _Refused(MarkedYAMLError):
    """Valid YAML that is not allowed here."""


def _refuse(at: Any, message: str) -> NoReturn:
    raise _Refused(problem=message, problem_mark=at.start_mark)


def _mark(mark: Any) -> Mark:
    return Mark(mark.line + 1, mark.column + 1)


def _end_of(text: str) -> Mark:
    return Mark(text.count("\n") + 1, len(text) - text.rfind("\n"))


class _Composer(Composer):
    """ruamel's composer, which rejects before memory is spent, and rejects what its nodes no longer show."""

    num_nodes = 0

    def compose_document(self) -> Any:
        self.warn_double_anchors = False
        event = self.parser.peek_event()
        if event.tags or (event.version and tuple(event.version) != (1, 2)):
            _refuse(event, "directives (%YAML, %TAG) are not supported; the file is read as YAML 1.2")
        return super().compose_document()

    def compose_node(self, parent: Any, index: Any) -> Any:
        event = self.parser.peek_event()
        self.num_nodes += 1
        if self.num_nodes > MAX_NODES:
            _refuse(event, f"more than {MAX_NODES:,} values; write equal hosts as a count")
        if self.depth > MAX_DEPTH:
            _refuse(event, f"nested more than {MAX_DEPTH} levels deep")
        if getattr(event, "tag", None) is not None:
            _refuse(event, f"the tag {_quoted(str(event.tag))} is not allowed; write the plain value")
        return super().compose_node(parent, index)


def _places(path: Path, content: bytes) -> dict[Location, Place]:
    """Return all values of the file, children before their parents."""
    text = ""
    places: dict[Location, Place] = {}
    yaml = YAML(typ="safe", pure=True)
    yaml.Composer = _Composer
    try:
        text = content.decode("utf-8").removeprefix("\ufeff")
        root = yaml.compose(text)
        if root is None or (root.value == "" and not root.style):
            raise _Refused(problem="the file is empty")
        _collect(root, (), _mark(root.start_mark), places)
        return places
    except UnicodeDecodeError as error:
        mark, what = _end_of(content[: error.start].decode("utf-8")), "the file is not UTF-8 text"
    except ReaderError as error:
        mark, what = _end_of(text[: error.position]), f"the character {text[error.position]!r} is not allowed in YAML"
    except MarkedYAMLError as error:
        at = error.problem_mark or error.context_mark
        mark, what = _mark(at) if at else Mark(1, 1), " ".join(filter(None, (error.context, error.problem)))
        what = what if isinstance(error, _Refused) else f"not valid YAML: {what}"
    except (ValueError, OverflowError) as error:  # ruamel leaks chr()'s on an escape such as "\UFFFFFFFF"
        mark, what = Mark(1, 1), f"not valid YAML: {error}"
    raise _located(path, mark, what) from None


def _collect(node: Any, loc: Location, key: Mark, places: dict[Location, Place]) -> Any:
    """Return the plain value of the node, and add it and all that is in it to `places`; aliases are expanded."""
    if len(loc) > MAX_DEPTH:  # an alias inside its own anchor too
        _refuse(node, f"nested more than {MAX_DEPTH} levels deep")
    value: Any
    if isinstance(node, ScalarNode):
        value = _scalar(node)
    elif isinstance(node, SequenceNode):
        value = []
        for index, child in enumerate(node.value):
            value.append(_collect(child, (*loc, index), _mark(child.start_mark), places))
    else:
        value = {}
        for key_node, child in node.value:
            name = _key(key_node)
            if name in value:
                line = places[*loc, name].key.line
                _refuse(key_node, f"the key {_quoted(name)} is here again; it is on line {line} already")
            value[name] = _collect(child, (*loc, name), _mark(key_node.start_mark), places)
    if len(places) >= MAX_NODES:
        _refuse(node, f"more than {MAX_NODES:,} values; write equal hosts as a count")
    places[loc] = Place(key, _mark(node.start_mark), value)
    return value


def _key(node: Any) -> str:
    if not isinstance(node, ScalarNode):
        _refuse(node, "a key must be plain text")
    if node.value == "<<" and not node.style:
        _refuse(node, "merge keys (<<) are not supported; write the keys out")
    if not isinstance(key := _scalar(node), str):
        _refuse(node, f"the key {node.value or 'null'} is not text; put it in quotes")
    return key


def _scalar(node: ScalarNode) -> str | int | float | bool | None:
    """Resolve a scalar by YAML 1.2's core schema, and reject what is more likely a mistake."""
    text: str = node.value
    if _SURROGATE.search(text):
        _refuse(node, "an escape that is no character (half of a surrogate pair)")
    if node.style:  # quoted or a block: text, whatever it looks like
        return text
    if text in _NAMED:
        return _NAMED[text]
    if not (is_integer := _INTEGER.fullmatch(text)) and not _FLOAT.fullmatch(text):
        return text
    if _LEADING_ZERO.fullmatch(text):
        _refuse(node, f"the number {_quoted(text)} has a leading zero; drop it, or put text in quotes")
    if is_integer:
        if len(text) > 40 or abs(int(text, 0)) >= 1 << 63:
            _refuse(node, f"the number {_quoted(text)} does not fit into 64 bits")
        return int(text, 0)
    number = float(text.lower().replace(".inf", "inf").replace(".nan", "nan"))
    if math.isinf(number) and "inf" not in text.lower():
        _refuse(node, f"the number {_quoted(text)} is too large")
    return number


def _existing(places: dict[Location, Place], loc: Location) -> Location:
    """Return `loc` without the parts that the file lacks (names of union members)."""
    here: Location = ()
    for part in loc:
        here = (*here, part) if (*here, part) in places else here
    return here


def _nearest(places: dict[Location, Place], loc: Location) -> Place:
    """Return the place of the value at `loc`."""
    return places[_existing(places, loc)]


def _named_in(where: Location) -> str:
    return next((f"{part}: " for part in reversed(where) if isinstance(part, str) and part.isidentifier()), "")


# Plain words for pydantic's error types.
_WANTED = {
    **dict.fromkeys(("int_type", "int_from_float"), "a whole number"),
    "float_type": "a number",
    "bool_type": "true or false",
    "string_type": "text (in quotes if it looks like a number)",
    **dict.fromkeys(("list_type", "tuple_type"), "a list"),
    **dict.fromkeys(("dict_type", "model_type", "model_attributes_type"), "a mapping of keys to values"),
    "greater_than": "more than {gt}",
    "less_than": "less than {lt}",
    "greater_than_equal": "at least {ge}",
    "less_than_equal": "at most {le}",
}
_AROUND_WHAT_IS_WANTED = re.compile(r"^[A-Z][a-z]+ should (be|have) | after validation, not .*$")


def _explain(
    path: Path, places: dict[Location, Place], schema: type[BaseModel], error: ValidationError
) -> list[InputError]:
    """Explain each of pydantic's errors in a sentence, with its position in the file, from top to bottom."""
    found: list[tuple[Mark, str]] = []
    wanted: dict[
        tuple[Location, str], list[str]
    ] = {}  # by place and what was found there: of each form that it may have
    errors = error.errors(include_url=False)
    inside = {
        place[:length] for item in errors for place in [_existing(places, item["loc"])] for length in range(len(place))
    }
    for item in errors:
        loc, kind, where = item["loc"], item["type"], _existing(places, item["loc"])
        place = places[where]
        name = _named_in(loc)
        if kind == "extra_forbidden":
            known = sorted(_known_keys(schema, loc[:-1]))
            hint = did_you_mean(str(loc[-1]), known) or f"; the keys here are {', '.join(known)}"
            found.append((place.key, f"unknown key {_quoted(str(loc[-1]))}{hint}"))
        elif kind == "missing":
            missing = f"{name}item {loc[-1] + 1}" if isinstance(loc[-1], int) else f"the key {loc[-1]!r}"
            found.append((place.mark, f"{missing} is missing"))
        elif kind == "value_error":
            found.append((place.mark, name + item["msg"].removeprefix("Value error, ")))
        elif where not in inside:  # else it has the form of another member, with the mistake in it
            said = f"{_named_in(where)}found {_described(item['input'])}, wanted "
            limits = {
                key: f"{value:g}" if isinstance(value, float) else value for key, value in item.get("ctx", {}).items()
            }
            one = _WANTED.get(kind, _AROUND_WHAT_IS_WANTED.sub("", item["msg"])).format(**limits)
            wanted.setdefault((where, said), []).append("a finite number" if one == "less than inf" else one)
    for (where, said), forms in wanted.items():
        *first, last = dict.fromkeys(forms)
        found.append((places[where].mark, said + (f"{', '.join(first)} or {last}" if first else last)))
    return [_located(path, mark, message) for mark, message in sorted(found, key=lambda entry: entry[0])]


def _described(value: Any) -> str:
    if isinstance(value, dict):
        return "a mapping"
    if isinstance(value, list):
        return f"a list of {len(value)}"
    return "nothing" if value is None else _quoted(value) if isinstance(value, str) else json.dumps(value)


def _known_keys(schema: type[BaseModel], loc: Location) -> set[str]:
    """Return the keys that the schema knows at `loc`."""
    models = [schema]
    for part in loc:  # an index, a key of a mapping and the name of a union's member lead to no other model: stay
        fields = [field for model in models for name, field in model.model_fields.items() if name == part]
        models = [inner for field in fields for inner in _models(field.annotation)] or models
    return {name for model in models for name in model.model_fields}


def _models(annotation: Any) -> Iterator[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for argument in typing.get_args(annotation):
        yield from _models(argument)
