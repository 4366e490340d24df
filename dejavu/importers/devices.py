"""The source's names for devices, as names of the catalogue."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache

from dejavu.cluster.catalogue import catalogue, catalogue_rows
from dejavu.foundation.errors import InputError


@dataclass(frozen=True)
class DeviceNames:
    """What the names in a source mean: what the user says first, then the catalogue, then what the format is known for.

    Attributes:
        given: `A100` -> `A100-SXM4-40GB`, said by the user for this source.
        every: one device for all rows, whatever the source says.
        usual: what the published files of this format were measured on.
    """

    given: Mapping[str, str] = field(default_factory=dict)
    every: str | None = None
    usual: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def of(cls, options: Sequence[str]) -> DeviceNames:
        """From `--device A100=A100-SXM4-40GB` (repeated) or `--device A100-SXM4-40GB`.

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
        """The same, with what a format is known for."""
        return DeviceNames(self.given, self.every, usual)

    def resolve(self, found: str) -> str:
        """The catalogue's name of what the source calls `found`.

        Raises:
            InputError: nobody says; the message names what was found and what comes nearest.
        """
        name = self.given.get(found) or self.every or in_catalogue(found) or self.usual.get(found)
        if name is None:
            raise InputError(f"{catalogue().unknown(found)} (say which with --device '{found}=NAME')")
        return name


def in_catalogue(found: str) -> str | None:
    """Its name in dejavu/devices.csv, also for torch's names of it (`Tesla V100-PCIE-32GB`), case and marks aside."""
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
