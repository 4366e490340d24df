"""The two kinds of failure that a user can act on; their messages are whole sentences."""


class DejavuError(Exception):
    """Something failed while running; the message names the thing, the value found and the value wanted."""


class InputError(DejavuError):
    """A mistake in the user's input (a file, an option), found before anything starts; the command exits with 2.

    Attributes:
        field: the entry of the file, where known; the code that knows the file adds line and column.
    """

    def __init__(self, message: str, field: tuple[str | int, ...] = ()) -> None:
        super().__init__(message)
        self.field = field
