"""Quantities: exact, never without a unit, and back."""

import io
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console
from rich.table import Table

from dejavu.foundation import units
from dejavu.foundation.tables import print_whole

few = settings(max_examples=200, derandomize=True, deadline=None)

BYTES, RATE, SECONDS, FLOPS = (
    units.parse_bytes,
    units.parse_bytes_per_second,
    units.parse_seconds,
    units.parse_flops_per_second,
)
every_parser = pytest.mark.parametrize(
    ("parse", "unit"), [(BYTES, "GiB"), (RATE, "GB/s"), (SECONDS, "ms"), (FLOPS, "TFLOP/s")]
)
every_format = pytest.mark.parametrize(
    ("parse", "show", "least"),
    [
        (BYTES, units.format_bytes, 1000.0),
        (RATE, units.format_bytes_per_second, 1.0),
        (SECONDS, units.format_seconds, 1e-9),
        (FLOPS, units.format_flops_per_second, 1.0),
    ],
)


@pytest.mark.parametrize(
    ("parse", "text", "value"),
    [
        (BYTES, "141 GiB", 141 * 2**30),
        (BYTES, "141GiB", 141 * 2**30),
        (BYTES, "80 GB", 80 * 10**9),
        (BYTES, "0.1 GB", 10**8),
        (BYTES, "0.5 KiB", 512),
        (BYTES, "1e3 B", 1000),
        (RATE, "300 GB/s", 300e9),
        (RATE, "25 Gbit/s", 3.125e9),
        (RATE, "25 Gbps", 3.125e9),
        (RATE, "1 Gibit/s", 2**27),
        (RATE, "8 bit/s", 1.0),
        (RATE, "1 TiB/s", 2.0**40),
        (SECONDS, "5 us", 5e-6),
        (SECONDS, "5 µs", 5e-6),
        (SECONDS, "5 μs", 5e-6),
        (SECONDS, "1.5 ms", 1.5e-3),
        (SECONDS, "10 min", 600.0),
        (SECONDS, "0 s", 0.0),
        (FLOPS, "312 TFLOP/s", 312e12),
        (FLOPS, "312 TFLOPS", 312e12),
        (FLOPS, "1.5 PFLOP/s", 1.5e15),
    ],
)
def test_reads(parse, text, value):
    assert parse(text) == value


@every_parser
@pytest.mark.parametrize(
    ("written", "message"),
    [
        ("5", "has no unit"),
        (5, "has no unit"),
        (1e9, "has no unit"),
        ("-5 {unit}", "is negative"),
        ("-0 {unit}", "is negative"),
        ("nan {unit}", "is not a finite number"),
        ("inf {unit}", "is not a finite number"),
        ("-.inf {unit}", "is not a finite number"),
        (math.nan, "is not finite"),
        ("{unit}", "is not a quantity"),
        ("1,000 {unit}", "is not a quantity"),
        ("1_000 {unit}", "is not a quantity"),
        ("1 000 {unit}", "is not a quantity"),
        ("١ {unit}", "is not a quantity"),
        ("5 parsec", "unknown unit 'parsec'"),
        ("1e999999999 {unit}", "is not a quantity"),
        ("1" * 500 + " {unit}", "is too long"),
        (None, "found nothing"),
        (True, "found True"),
        ([], "found \\[\\]"),
        ("", "is not a quantity"),
    ],
)
def test_refuses_and_says_what_is_wanted(parse, unit, written, message):
    text = written.format(unit=unit) if isinstance(written, str) else written
    with pytest.raises(ValueError, match=message) as caught:
        parse(text)
    assert "; wanted a " in str(caught.value)


@pytest.mark.parametrize(("parse", "text"), [(BYTES, "0 GiB"), (BYTES, "0.1 B"), (RATE, "0 GB/s"), (FLOPS, "0 FLOP/s")])
def test_refuses_zero_where_it_makes_no_sense(parse, text):
    with pytest.raises(ValueError, match=r"zero|not between"):
        parse(text)


@pytest.mark.parametrize(
    ("parse", "text", "hint"),
    [
        (RATE, "25 Gb/s", "write Gbit/s or GB/s"),
        (RATE, "300 gb/s", "did you mean 'GB/s'"),
        (RATE, "300 GB", "did you mean 'GB/s'"),
        (BYTES, "80 gib", "did you mean 'GiB'"),
        (FLOPS, "312 TFLOPs", "did you mean"),
        (SECONDS, "5 usec", "did you mean 'us'"),
    ],
)
def test_hints_at_the_unit(parse, text, hint):
    with pytest.raises(ValueError, match=hint):
        parse(text)


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        (units.format_seconds(0.0451), "45.1 ms"),
        (units.format_seconds(0.9997), "1 s"),
        (units.format_seconds(0), "0 s"),
        (units.format_seconds(5e-6), "5 µs"),
        (units.format_seconds(90), "1.5 min"),
        (units.format_seconds(59.99), "1 min"),
        (units.format_seconds(1e7), "2778 h"),
        (units.format_seconds(-0.0451), "-45.1 ms"),
        (units.format_seconds(math.inf), "inf s"),
        (units.format_bytes(141 * 2**30), "141 GiB"),
        (units.format_bytes(1023.9), "1 KiB"),
        (units.format_bytes(1010), "1010 B"),
        (units.format_bytes_per_second(3.125e9), "3.12 GB/s"),
        (units.format_flops_per_second(3.12e14), "312 TFLOP/s"),
    ],
)
def test_shows_three_digits(text, shown):
    assert text == shown


@every_format
@few
@given(exponent=st.floats(0, 14))
def test_what_is_shown_reads_back(parse, show, least, exponent):
    value = least * 10**exponent
    text = show(value)
    assert parse(text) == pytest.approx(value, rel=0.0051)
    assert show(parse(text)) == text


@few
@given(st.integers(1, 2**53))
def test_bytes_and_bits_are_exact(number):
    assert units.parse_bytes(f"{number} B") == number
    assert units.parse_bytes_per_second(f"{number} bit/s") * 8 == number
    assert units.parse_bytes_per_second(f"{number} KiB/s") == number * 1024


@few
@given(
    amount=st.decimals(min_value="0.01", max_value="99999", places=2),
    currency=st.sampled_from(["USD", "EUR", "JPY", "XTS"]),
    spaces=st.tuples(*[st.sampled_from(["", " ", "  "])] * 3),
)
def test_a_price_is_read_in_its_own_currency_with_or_without_a_space(amount, currency, spaces):
    before, between, after = spaces
    assert units.parse_price(f"{before}{amount}{between}{currency}/hour{after}") == (float(amount), currency)


@few
@given(value=st.floats(1e-6, 1e15), other=st.floats(1e-6, 1e15), exponent=st.integers(1, 12))
def test_two_quantities_are_told_apart(value: float, other: float, exponent: int) -> None:
    forms = (
        units.format_bytes,
        units.format_bytes_per_second,
        units.format_seconds,
        units.format_flops_per_second,
    )
    for form in forms:
        assert units.told_apart(value, value, form) == (form(value), form(value))
        for second in (other, value * (1 + 10.0**-exponent)):
            first_shown, second_shown = units.told_apart(value, second, form)
            assert value == second or first_shown != second_shown
            if form(value) != form(second):
                assert (first_shown, second_shown) == (form(value), form(second))


@pytest.mark.parametrize("title", [True, False], ids=["title", "no title"])
@pytest.mark.parametrize("wraps", [True, False], ids=["wraps", "whole"])
@pytest.mark.parametrize("name", ["lab [a100]", "[red]lab", "lab [/b]", "[link=x]y[/link]", r"\[x]", ":smile:", "[]"])
def test_names_in_tables_are_shown_as_they_are(name: str, wraps: bool, title: bool) -> None:
    """Rich reads what is in brackets as a style."""
    said, table = io.StringIO(), Table(title=name if title else None)
    table.add_column(name, no_wrap=not wraps)
    table.add_column("number", justify="right")
    table.add_row(name, "1")
    print_whole(Console(width=80, file=said), table)
    assert said.getvalue().count(name) == 2 + title


@few
@given(st.floats(1e-8, 1e7), st.sampled_from([0.0, 1e-9, 1e-4, 1e-3, 0.04, 0.3, 0.9]))
def test_a_bound_is_rounded_down_and_a_gap_up(seconds: float, gap: float) -> None:
    """To a millionth, and by no more than the last digit; the bound of a proved best is written as the best is."""
    bound = seconds * (1 - gap)
    sizes = {"ns": 1e-9, "µs": 1e-6, "ms": 1e-3, "s": 1.0, "min": 60.0, "h": 3600.0}
    number, unit = units.format_bound(bound).split()
    assert 0.989 * bound <= float(number) * sizes[unit] <= bound * (1 + 1.01e-6)
    assert units.format_bound(bound, seconds) == (units.format_seconds(seconds) if gap < 1e-6 else f"{number} {unit}")
    share = float(units.format_gap(gap).removesuffix("%")) / 100
    assert gap - 1.01e-6 <= share <= gap + 1e-3
