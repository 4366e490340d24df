"""The YAML reader: what it takes, what it refuses and where it says so."""

import hashlib
import json
import math
import os
import tracemalloc
from pathlib import Path
from typing import Any, Literal

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pydantic import BaseModel, ConfigDict, RootModel

from dejavu.foundation import strict_yaml
from dejavu.foundation.errors import InputError

few = settings(
    max_examples=60, derandomize=True, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)


class Anything(RootModel[Any]):
    pass


class Part(BaseModel):
    model_config = ConfigDict(extra="forbid")
    size: int
    kind: Literal["small", "large"] = "small"


class Whole(BaseModel):
    model_config = ConfigDict(extra="forbid")
    title: str
    ratio: float = 1.0
    parts: list[Part] = []
    named: dict[str, Part] = {}
    pair: tuple[int, int] | None = None


@pytest.fixture
def read(tmp_path):
    path = tmp_path / "a.yaml"

    def read(text: str | bytes, schema: type[BaseModel] = Anything) -> strict_yaml.Document[Any]:
        path.write_bytes(text if isinstance(text, bytes) else text.encode("utf-8", "surrogatepass"))
        return strict_yaml.load(path, schema)

    return read


@pytest.fixture
def refusal(read, tmp_path):
    def refusal(text: str | bytes, schema: type[BaseModel] = Anything) -> str:
        with pytest.raises(InputError) as caught:
            read(text, schema)
        return str(caught.value).replace(f"{tmp_path}{os.sep}", "")

    return refusal


@pytest.mark.parametrize(
    ("written", "value"),
    [
        ("no", "no"),
        ("yes", "yes"),
        ("on", "on"),
        ("12:30:45", "12:30:45"),
        ("2020-01-01", "2020-01-01"),
        ("1_000", "1_000"),
        ("=", "="),
        ("'012'", "012"),
        ("'<<'", "<<"),
        ("1e9", 1e9),
        (".5", 0.5),
        ("-.inf", -math.inf),
        ("-5", -5),
        ("0x1F", 31),
        ("0o17", 15),
        ("true", True),
        ("~", None),
        ("", None),
    ],
)
def test_scalars_are_of_yaml_1_2(read, written, value):
    found = read(f"a: {written}").value.root["a"]
    assert found == value
    assert type(found) is type(value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a: 012", "a.yaml:1:4: the number '012' has a leading zero"),
        ("a: -00.5", "a.yaml:1:4: the number '-00.5' has a leading zero"),
        ("a: 1e999", "a.yaml:1:4: the number '1e999' is too large"),
        ("a: 9" + "9" * 5000, "a.yaml:1:4: the number '99"),
        ("a: 1\nb: 2\na: 3", "a.yaml:3:1: the key 'a' is here again; it is on line 1 already"),
        ("a: {x: 1,\n  'x': 2}", "a.yaml:2:3: the key 'x' is here again; it is on line 1 already"),
        ("b: !!python/object/apply:os.system [true]", "a.yaml:1:4: the tag 'tag:yaml.org,2002:python/object/apply"),
        ("!!map {a: 1}", "a.yaml:1:1: the tag"),
        ("a: !local 3", "a.yaml:1:4: the tag '!local' is not allowed"),
        ("a: &x {b: 1}\nc:\n  <<: *x", "a.yaml:3:3: merge keys (<<) are not supported"),
        ("a: *x", "a.yaml:1:4: not valid YAML: found undefined alias 'x'"),
        ("a: &a [*a]", "a.yaml:1:4: nested more than 20 levels deep"),
        ("a: 1\n---\nb: 1", "a.yaml:2:1: not valid YAML: expected a single document in the stream"),
        ("", "a.yaml:1:1: the file is empty"),
        ("# nothing\n", "a.yaml:1:1: the file is empty"),
        ("---\n...\n", "a.yaml:1:1: the file is empty"),
        ("%YAML 1.1\n---\na: no", "a.yaml:2:1: directives"),
        ("a:\n\t- b", "a.yaml:2:1: not valid YAML: while scanning for the next token found character '\\t'"),
        ("a:\t1", "a.yaml:1:3: not valid YAML"),
        ("a: [1", "a.yaml:1:6: not valid YAML"),
        ("a: b: c", "a.yaml:1:5: not valid YAML"),
        ("a: \x07", "a.yaml:1:4: the character '\\x07' is not allowed"),
        ('a: "\\ud800"', "a.yaml:1:4: an escape that is no character"),
        ('a: "\\UFFFFFFFF"', "a.yaml:1:1: not valid YAML"),
        (b"a: 1\nb: caf\xe9", "a.yaml:2:7: the file is not UTF-8 text"),
        ("a: 1".encode("utf-16"), "a.yaml:1:1: the file is not UTF-8 text"),
        ("5: x", "a.yaml:1:1: the key 5 is not text"),
        ("? [1]\n: 2", "a.yaml:1:3: a key must be plain text"),
        ("[" * 500_000, "a.yaml:1:22: nested more than 20 levels deep"),
        ("- " * 500_000, "a.yaml:1:43: nested more than 20 levels deep"),
        ("{a: " * 5000, "nested more than 20 levels deep"),
    ],
)
def test_refuses(refusal, text, message):
    assert message in refusal(text)


def test_refuses_alias_bombs(refusal):
    laughs = "a0: &a0 [ha, ha, ha]\n" + "".join(
        f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]\n" for i in range(1, 20)
    )
    assert "more than 50,000 values" in refusal(laughs)
    broad = f"a: &a [{'x, ' * 9000}]\n" + "".join(f"b{i}: *a\n" for i in range(15))
    assert "more than 50,000 values" in refusal(broad)
    deep = "a0: &a0 [x]\n" + "".join(f"a{i}: &a{i} [[*a{i - 1}]]\n" for i in range(1, 15))
    assert "nested more than 20 levels deep" in refusal(deep)


def test_takes_a_few_aliases(read):
    assert read("a: &x {b: 1}\nc: [*x, *x]").value.root == {"a": {"b": 1}, "c": [{"b": 1}, {"b": 1}]}


def test_refuses_huge_files_unread(tmp_path):
    path = tmp_path / "a.yaml"
    with path.open("wb") as file:
        file.truncate(1 << 30)  # sparse: no disk is used
    tracemalloc.start()
    with pytest.raises(InputError, match="1,073,741,824 bytes or more; the limit is 1,048,576"):
        strict_yaml.load(path, Anything)
    peak_bytes = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak_bytes < 1 << 20


def test_refuses_many_values(refusal):
    assert "more than 50,000 values" in refusal("a: [" + "h," * 500_000 + "]")


def test_refuses_what_is_no_file(tmp_path):
    with pytest.raises(InputError, match="No such file"):
        strict_yaml.load(tmp_path / "absent.yaml", Anything)
    with pytest.raises(InputError, match="not a regular file"):
        strict_yaml.load(tmp_path, Anything)
    os.mkfifo(tmp_path / "pipe.yaml")
    with pytest.raises(InputError, match="not a regular file"):
        strict_yaml.load(tmp_path / "pipe.yaml", Anything)


@few
@given(st.text(alphabet="ab01:-[]{},&*!|>'\"%#@~.\\ \n\txuU<?\x00\ufeff", max_size=60))
def test_any_text_loads_or_is_an_input_error(read, text):
    try:
        read(text)
    except InputError as error:
        assert "a.yaml" in str(error)


values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**62), 2**62)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(st.characters(codec="utf-8", exclude_categories=["C"]), max_size=10),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text("abcXYZ<>019 ", max_size=6), inner, max_size=4),
    max_leaves=15,
)


@few
@given(st.dictionaries(st.text("abc", min_size=1), values, min_size=1, max_size=4))
def test_json_reads_as_itself(read, value):
    assert read(json.dumps(value, ensure_ascii=False)).value.root == value


def test_lists_all_misfits_with_their_places(refusal):
    text = """\
titel: x
ratio: "2"
parts:
  - {size: two}
  - {size: 2.0, kind: huge}
  - {sise: 2}
  - 5
named:
  a: {size: 1, knid: small}
  b: {size: true}
pair: [1]
"""
    assert refusal(text, Whole).splitlines() == [
        "a.yaml:1:1: the key 'title' is missing",
        "a.yaml:1:1: unknown key 'titel'; did you mean 'title'?",
        "a.yaml:2:8: ratio: found '2', wanted a number",
        "a.yaml:4:12: size: found 'two', wanted a whole number",
        "a.yaml:5:12: size: found 2.0, wanted a whole number",
        "a.yaml:5:23: kind: found 'huge', wanted 'small' or 'large'",
        "a.yaml:6:5: the key 'size' is missing",
        "a.yaml:6:6: unknown key 'sise'; did you mean 'size'?",
        "a.yaml:7:5: parts: found 5, wanted a mapping of keys to values",
        "a.yaml:9:16: unknown key 'knid'; did you mean 'kind'?",
        "a.yaml:10:13: size: found true, wanted a whole number",
        "a.yaml:11:7: pair: item 2 is missing",
    ]


def test_many_misfits_are_cut_short(refusal):
    lines = refusal("title: x\nparts: [" + "5, " * 100 + "]", Whole).splitlines()
    assert len(lines) == strict_yaml.MAX_PROBLEMS_SHOWN + 1
    assert lines[-1] == "... and 80 more problems"


def test_the_document_locates_values_and_keys(read, tmp_path):
    text = "title: x\nnamed:\n  a: {size: 1}\n  b:\n    size: 2\n"
    document = read(text, Whole)
    assert document.value.named["b"].size == 2
    assert document.sha256 == hashlib.sha256(text.encode()).hexdigest()
    assert str(document.error(("named", "b", "size"), "too big")) == f"{tmp_path / 'a.yaml'}:5:11: too big"
    assert document.mark(("named", "b", "size"), key=True) == strict_yaml.Mark(5, 5)
    assert document.mark(("named", "absent")) == document.mark(("named",)) == strict_yaml.Mark(3, 3)


def test_the_path_is_shown_as_given(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("cluster.yaml").write_text("a: [")
    with pytest.raises(InputError, match=r"^cluster\.yaml:1:5: "):
        strict_yaml.load(Path("cluster.yaml"), Anything)
