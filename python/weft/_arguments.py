"""Arguments as C takes them: words and texts."""
from . import errors


def choice(value, choices, name):
    """The number of a word."""
    try:
        return choices[value]
    except (KeyError, TypeError):
        raise errors.BadArgumentError(f"{name} is {value!r}; expected one of {', '.join(map(repr, choices))}") from None


def text(value, name):
    """A string as C takes it; None stays."""
    if value is None:
        return None
    if not isinstance(value, str) or "\0" in value:
        raise errors.BadArgumentError(f"{name} is {value!r}; expected a string without zeros")
    try:
        return value.encode()
    except UnicodeEncodeError:
        raise errors.BadArgumentError(f"{name} is {value!r}; expected a string without surrogates") from None
