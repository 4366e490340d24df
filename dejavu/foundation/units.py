"""Quantities as people write them, into base units and back: seconds, bytes, bytes per second, FLOP/s.

A number without a unit is rejected, and so are an ambiguous unit (`Gb/s`) and a number with a leading zero, which some
read as octal. Prefixes are exact: 1 GB is 10^9 bytes, 1 GiB is 2^30, 1 Gbit is 10^9 / 8.
"""

import difflib
import math
import re
from collections.abc import Callable, Mapping, Sequence
from fractions import Fraction
from typing import Any

_DECIMAL = {"": 1, "k": 10**3, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12, "P": 10**15, "E": 10**18}
_BINARY = {"Ki": 2**10, "Mi": 2**20, "Gi": 2**30, "Ti": 2**40, "Pi": 2**50}

_BYTES = {f"{prefix}B": Fraction(factor) for prefix, factor in (_DECIMAL | _BINARY).items()}
_BYTES_PER_SECOND = (
    {f"{unit}/s": factor for unit, factor in _BYTES.items()}
    | {f"{prefix}bit/s": Fraction(factor, 8) for prefix, factor in (_DECIMAL | _BINARY).items()}
    | {f"{prefix}bps": Fraction(factor, 8) for prefix, factor in _DECIMAL.items() if prefix}
)
_SECONDS = {
    "ns": Fraction(1, 10**9),
    "us": Fraction(1, 10**6),
    "µs": Fraction(1, 10**6),  # the micro sign
    "μs": Fraction(1, 10**6),  # the Greek letter: looks the same, is another character
    "ms": Fraction(1, 10**3),
    "s": Fraction(1),
    "min": Fraction(60),
    "h": Fraction(3600),
}
_TIMES = {"ns": 1e-9, "µs": 1e-6, "ms": 1e-3, "s": 1.0, "min": 60.0, "h": 3600.0}  # as they are shown
_FLOPS_PER_SECOND = {
    f"{prefix}{word}": Fraction(factor) for prefix, factor in _DECIMAL.items() for word in ("FLOP/s", "FLOPS")
}

_NUMBER_AND_UNIT = re.compile(r"([-+]?(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][-+]?[0-9]{1,2})?)\s*(\S*)")
_AMBIGUOUS = re.compile(r"([kKMGTPE]i?)b(/s)?")
PROVED_TO = 1e-6  # of a bound: it is a billionth lower than what it proves
_MAX_CHARACTERS = 60
_MAX_BYTES = 2**63 - 1


def parse_bytes(text: str) -> int:
    """Parse `"141 GiB"` to bytes, rounded to a whole byte. Raises ValueError if it is no size, or less than a byte."""
    size_bytes = round(_parse(text, _BYTES, "a size such as '141 GiB'"))
    if not 1 <= size_bytes <= _MAX_BYTES:
        raise ValueError(f"{text!r} is not between 1 byte and 2^63 bytes; wanted a size such as '141 GiB'")
    return size_bytes


def parse_bytes_per_second(text: str) -> float:
    """Parse `"300 GB/s"` or `"25 Gbit/s"` to bytes per second. Raises ValueError if it is no rate above zero."""
    return _positive(text, _BYTES_PER_SECOND, "a rate such as '300 GB/s' or '25 Gbit/s'")


def parse_flops_per_second(text: str) -> float:
    """Parse `"312 TFLOP/s"` to FLOP/s. Raises ValueError if it is no rate above zero."""
    return _positive(text, _FLOPS_PER_SECOND, "a rate such as '312 TFLOP/s'")


def parse_seconds(text: str) -> float:
    """Parse `"5 us"`, `"1.5 ms"`, `"10 min"` to seconds; zero is allowed. Raises ValueError if it is no duration."""
    return float(_parse(text, _SECONDS, "a duration such as '5 us' or '1.5 ms'"))


def parse_price(text: str) -> tuple[float, str]:
    """Parse `"2.10 USD/hour"` to an amount an hour and its currency. Raises ValueError if it is no price above zero."""
    wanted = "a price such as '2.10 USD/hour'"
    found = re.search(r"(?<![A-Za-z])([A-Z]{3})/hour\s*$", text) if isinstance(text, str) else None
    currency = found[1] if found else "USD"
    return _positive(text, {f"{currency}/hour": Fraction(1)}, wanted), currency


def _positive(text: str, units: Mapping[str, Fraction], wanted: str) -> float:
    value = float(_parse(text, units, wanted))
    if value == 0:
        raise ValueError(f"{text!r} is zero; wanted {wanted}")
    return value


def _parse(text: Any, units: Mapping[str, Fraction], wanted: str) -> Fraction:
    if isinstance(text, int | float) and not isinstance(text, bool):
        raise ValueError(f"{text!r} {'has no unit' if math.isfinite(text) else 'is not finite'}; wanted {wanted}")
    if not isinstance(text, str):
        raise ValueError(f"found {'nothing' if text is None else repr(text)[:40]}; wanted {wanted}")
    if len(text) > _MAX_CHARACTERS:
        raise ValueError(f"{text[:20]!r}... is too long; wanted {wanted}")
    match = _NUMBER_AND_UNIT.fullmatch(text.strip())
    if match is None:
        finite = not re.match(r"\s*[-+]?\.?(nan|inf)", text, re.IGNORECASE)
        raise ValueError(f"{text!r} is not a {'quantity' if finite else 'finite number'}; wanted {wanted}")
    number_text, unit = match.groups()
    if not unit:
        raise ValueError(f"{text!r} has no unit; wanted {wanted}")
    if unit not in units:
        raise ValueError(f"{text!r} has the unknown unit {unit!r}{_unit_hint(unit, units)}; wanted {wanted}")
    if re.match(r"[-+]?0[0-9]", number_text):
        raise ValueError(f"{text!r} has a leading zero; wanted {wanted}")
    number = Fraction(number_text)  # exact; its exponent has two digits at most
    if number < 0 or number_text.startswith("-"):
        raise ValueError(f"{text!r} is negative; wanted {wanted}")
    return number * units[unit]


def _unit_hint(unit: str, units: Mapping[str, Fraction]) -> str:
    if ambiguous := _AMBIGUOUS.fullmatch(unit):
        prefix, per_second = ambiguous.group(1), ambiguous.group(2) or ""
        readings = [f"{prefix}{word}{per_second}" for word in ("bit", "B")]
        if all(reading in units for reading in readings):
            return f" (bits or bytes? write {' or '.join(readings)})"
    same_letters = [known for known in units if known.casefold() == unit.casefold()]
    near = same_letters or difflib.get_close_matches(unit, units, n=1)
    return f" (did you mean {near[0]!r}?)" if near else ""


def format_seconds(duration_seconds: float, digits: int = 3) -> str:
    """Format with three digits, or so many, in a suitable unit: `0.0451` -> `45.1 ms`."""
    return _format(duration_seconds, _TIMES, zero="0 s", digits=digits)


def format_bound(duration_seconds: float, best_seconds: float = math.inf) -> str:
    """Format a lower bound with three digits, to a millionth never above it: `0.04519` -> `45.1 ms`.

    Args:
        best_seconds: the least that is known to be possible; a bound that reaches it is written as it is.
    """
    if duration_seconds >= best_seconds * (1 - PROVED_TO):
        return format_seconds(best_seconds)
    return _format(duration_seconds * (1 + PROVED_TO), _TIMES, zero="0 s", digits=3, down=True)


def format_gap(share: float) -> str:
    """Format the most that a share can be, to a millionth never below it: `0.0511` -> `5.2%`."""
    return f"{math.ceil(1000 * (share - PROVED_TO)) / 10:.1f}%"


def format_bytes(size_bytes: float, digits: int = 3) -> str:
    """Format with three digits, or so many, and binary prefixes: `151397597184` -> `141 GiB`."""
    return _format(size_bytes, {"B": 1.0} | {f"{p}B": float(f) for p, f in _BINARY.items()}, zero="0 B", digits=digits)


def format_bytes_per_second(rate_bytes_per_second: float, digits: int = 3) -> str:
    """Format with three digits, or so many, and decimal prefixes: `3e11` -> `300 GB/s`."""
    return _format(rate_bytes_per_second, _decimal_units("B/s"), zero="0 B/s", digits=digits)


def format_flops_per_second(rate_flops_per_second: float, digits: int = 3) -> str:
    """Format with three digits, or so many, and decimal prefixes: `3.12e14` -> `312 TFLOP/s`."""
    return _format(rate_flops_per_second, _decimal_units("FLOP/s"), zero="0 FLOP/s", digits=digits)


def told_apart(first: float, second: float, form: Callable[[float, int], str]) -> tuple[str, str]:
    """Format two quantities with three digits, or as many as it takes to see which of them is which.

    Args:
        form: of a quantity and a number of digits.
    """
    shown = form(first, 3), form(second, 3)
    for digits in range(4, 18):  # 17 tell any two numbers apart
        if first == second or shown[0] != shown[1]:
            break
        shown = form(first, digits), form(second, digits)
    return shown


def scale_of_seconds(largest_seconds: float) -> tuple[float, str]:
    """Return the factor and the name of the unit in which an axis reads well that ends here: `0.2` -> `(1e3, "ms")`."""
    return _scale(largest_seconds, {"ns": 1e-9, "µs": 1e-6, "ms": 1e-3, "s": 1.0})


def scale_of_bytes(largest_bytes: float) -> tuple[float, str]:
    """Return the factor and the name of the unit in which an axis of sizes reads well, with binary prefixes."""
    return _scale(largest_bytes, {"B": 1.0} | {f"{p}B": float(f) for p, f in _BINARY.items()})


def _scale(largest: float, units: Mapping[str, float]) -> tuple[float, str]:
    """`units` from small to large."""
    smallest = next(iter(units))
    name = max((name for name, unit in units.items() if unit <= largest), key=units.__getitem__, default=smallest)
    return 1.0 / units[name], name


def _decimal_units(word: str) -> dict[str, float]:
    return {f"{prefix}{word}": float(factor) for prefix, factor in _DECIMAL.items() if prefix != "K"}


def _format(value: float, units: Mapping[str, float], zero: str, digits: int, *, down: bool = False) -> str:
    """`units` from small to large; `down`: a positive value is rounded down."""
    if value == 0:
        return zero
    if not math.isfinite(value):
        return f"{value} {zero.split()[1]}"
    names = list(units)
    index = max((i for i, unit in enumerate(units.values()) if unit <= abs(value)), default=0)
    number = _rounded(value / units[names[index]], digits, down=down)
    # 999.7 ms rounds to 1000 ms: that is 1 s.
    if index + 1 < len(names) and abs(float(number)) * units[names[index]] >= units[names[index + 1]] * (1 - 1e-12):
        index += 1
        number = _rounded(value / units[names[index]], digits, down=down)
    return f"{number} {names[index]}"


def _rounded(value: float, digits: int, *, down: bool = False) -> str:
    decimals = max(0, digits - 1 - math.floor(math.log10(abs(value))))
    if down:
        value = math.floor(value * 10**decimals) / 10**decimals
    text = f"{value:.{decimals}f}"
    return text.rstrip("0").rstrip(".") if "." in text else text


def plural(count: int, word: str) -> str:
    """Return `1 stage`, `2 stages`, `2 batches`, `2 classes`."""
    return f"{count} {word}{'' if count == 1 else 'es' if word.endswith(('ch', 's')) else 's'}"


def in_microbatches(count: int, runs: int) -> str:
    """Return `8 microbatches`, or `4 runs of 8 microbatches` where a schedule runs several times in a step."""
    return (f"{runs} runs of " if runs > 1 else "") + plural(count, "microbatch")


def counted_devices(counts: Mapping[str, int]) -> str:
    """Write how many devices of each kind there are: `16 × L4, 8 × T4`."""
    return ", ".join(f"{count} × {kind}" for kind, count in counts.items())


def kind_of_devices(device_type: str, groups: Sequence[str]) -> str:
    """Return the name of devices of a type on these groups of nodes; on none named: on any.

    Example:
        >>> kind_of_devices("T4", ("left", "right"))
        'T4 in left and right'
    """
    return f"{device_type} in {' and '.join(groups)}" if groups else device_type
