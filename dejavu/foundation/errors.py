"""The two kinds of failure that a user can act on, whose messages are whole sentences; and what an interrupt became."""


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


OWN_CODE = (Exception, SystemExit)  # what code of a person's own may raise; an exit is a script's, and no end of ours


def was_interrupted(error: BaseException | None) -> bool:
    """Return whether an error is an interrupt, or was raised while one was handled: a library may fail at it."""
    return interrupt_of(error) is not None


def interrupt_of(error: BaseException | None) -> KeyboardInterrupt | None:
    """Return the interrupt that an error is, or was raised upon; its message, if it has one, says what came."""
    while error is not None and not isinstance(error, KeyboardInterrupt):
        error = error.__context__
    return error
