"""Commands whose options and help come from the families: what is added to a family is there by itself.

Families are imported when a person asks for help or for an import, and never before: that takes a second or two.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from importlib import import_module
from typing import Annotated, Any, ClassVar

import typer
import typer.main
from typer.core import TyperCommand, TyperGroup

KNOWN = "; known: "
ALSO = {"schedule": ("chimera",)}  # no member: two copies of the model are on the ranks


class Commands(TyperGroup):
    """The commands, which also tell the value that an option does not take: the library says only what it takes."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except typer.BadParameter as error:
            from pydantic import ValidationError  # has been imported where one was raised

            if isinstance(error.__cause__, ValidationError):
                error.message += f"; found {error.__cause__.errors()[0]['input']!r}"
            raise


class Listing(TyperCommand):
    """A command whose help lists the members that an option chooses from.

    Attributes:
        families: where the members are, by the option's name.
    """

    families: ClassVar[dict[str, tuple[str, str]]] = {
        "search": ("dejavu.search", "SEARCHES"),
        "schedule": ("dejavu.plans.schedule", "SCHEDULES"),
        "model": ("dejavu.workload.models", "MODELS"),
    }

    def format_help(self, ctx: Any, formatter: Any) -> None:
        for parameter in self.params:
            told: Any = parameter
            if parameter.name in self.families:
                module, family = self.families[parameter.name]
                members = ", ".join([*getattr(import_module(module), family), *ALSO.get(parameter.name, ())])
                told.help = f"{told.help.partition(KNOWN)[0]}{KNOWN}{members}"
        super().format_help(ctx, formatter)


class Importing(Listing):
    """The command that imports: it also takes what any importer takes, and finds it in `ctx.obj`."""

    families: ClassVar[dict[str, tuple[str, str]]] = {"format": ("dejavu.importers", "IMPORTERS")}
    _params: list[Any]
    _theirs: Sequence[Any] = ()

    @property
    def params(self) -> list[Any]:
        if not self._theirs:
            self._theirs = _importers_options()
            self._params += self._theirs
        return self._params  # always the same list: the library adds `--help` to it

    @params.setter
    def params(self, own: list[Any]) -> None:
        self._params = own

    def invoke(self, ctx: Any) -> Any:
        ctx.obj = {option.name: ctx.params.pop(option.name) for option in self._theirs}
        return super().invoke(ctx)


def _importers_options() -> Sequence[Any]:
    """Typer's options for the fields of all importers; those that are left out are None."""
    from dejavu.importers import importers_options

    def taken(**options: object) -> None:
        """Stands for a command that takes them."""

    annotations = [Annotated[one.type | None, typer.Option(help=one.help)] for one in importers_options()]
    taken.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
        [
            inspect.Parameter(one.name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation)
            for one, annotation in zip(importers_options(), annotations, strict=True)
        ]
    )
    taken.__annotations__ = {
        one.name: annotation for one, annotation in zip(importers_options(), annotations, strict=True)
    }
    app = typer.Typer(add_completion=False)
    app.command()(taken)
    return typer.main.get_command(app).params
