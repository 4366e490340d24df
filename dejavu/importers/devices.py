"""The source's names for devices, as names of the catalogue."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache

from dejavu.cluster.catalogue import catalogue, catalogue_rows
from dejavu.foundation.errors import InputError


@dataclass(frozen=True)
class DeviceNames:
    """Resolves a source's device names by the user's options, then the catalogue, then the format's usual device.

    Attributes:
        given: `A100` -> `A100-SXM4-40GB`, given by the user for this source.
        every: one device for all rows, whatever the source says.
        usual: the devices of the published files of this format.
        asked: the source's names that were resolved so far.
    """

    given: Mapping[str, str] = field(default_factory=dict)
    every: str | None = None
    usual: Mapping[str, str] = field(default_factory=dict)
    asked: set[str] = field(default_factory=set, compare=False, repr=False)

    @classmethod
    def of(cls, options: Sequence[str]) -> DeviceNames:
        """Parse `--device A100=A100-SXM4-40GB` (repeated) or `--device A100-SXM4-40GB`.

        Raises:
            InputError: the right side is no device of the catalogue, or two options contradict each other.
        """
        given: dict[str, str] = {}
        every: str | None = None
        for option in options:
            found, equals, wanted = option.rpartition("=")
            name = in_catalogue(wanted)
            if name is None:
                raise InputError(f"--device {option}: {catalogue().unknown(wanted)}")
            if (given.get(found) if equals else every) not in (None, name):
                raise InputError(f"--device {option}: there is another --device for the same; wanted one")
            if equals:
                given[found] = name
            else:
                every = name
        return cls(given, every)

    def knowing(self, usual: Mapping[str, str]) -> DeviceNames:
        """Return the same names, with a format's usual devices."""
        return replace(self, usual=usual)

    def found(self, found: str) -> str | None:
        """Return the catalogue's name of what the source calls `found`; None: unknown."""
        self.asked.add(found)
        return self.given.get(found) or self.every or in_catalogue(found) or self.usual.get(found)

    def resolve(self, found: str) -> str:
        """Return the catalogue's name of what the source calls `found`.

        Raises:
            InputError: unknown; the message names what was found and the nearest name.
        """
        name = self.found(found)
        if name is None:
            raise InputError(f"{catalogue().unknown(found)} (say which with --device '{found}=NAME')")
        return name

    def check_given(self) -> None:
        """Check, when a source is read, that it has every device of which the user said what it is.

        Raises:
            InputError: it has not; the rows would be of another device than the user thinks.
        """
        for name, wanted in self.given.items():
            if name not in self.asked:
                there = f"it has {', '.join(sorted(self.asked))}" if self.asked else "it names none"
                raise InputError(f"--device {name}={wanted}: the source has no device {name!r}; {there}")


def in_catalogue(found: str) -> str | None:
    """Return its name in dejavu/devices.csv, also for torch's (`Tesla V100-PCIE-32GB`); ignores case and marks."""
    return _by_plain_name().get(_plain(found))


@cache
def _by_plain_name() -> dict[str, str]:
    return {
        _plain(alias): row.device_type.name
        for row in catalogue_rows()
        for alias in (*row.reported_names, row.device_type.name)
    }


def _plain(name: str) -> str:
    return "".join(letter for letter in name.casefold() if letter.isalnum())
