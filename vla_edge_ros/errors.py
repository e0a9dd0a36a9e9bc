"""
Errors a user can fix.

Rule of this leaf module: what a user can mend raises a subclass of ``VlaEdgeError`` whose
message names field, rule and value; a broken invariant of our own raises a plain
``RuntimeError`` or ``AssertionError``. A missed deadline or a stale frame is no error but a
value in ``StepResult``.
"""


SHOWN_CHARACTERS = 200


def one_line(error: Exception) -> str:
    """Return the message of a library's error in one line of bearable length."""
    text = ' '.join(str(error).split())
    return text if len(text) <= SHOWN_CHARACTERS else f'{text[:SHOWN_CHARACTERS]}...'


class VlaEdgeError(ValueError):
    """Base of every error a user can fix."""


class ConfigError(VlaEdgeError):
    """
    A parameter or configuration value breaks its rule: ``margin_ms must be >= 0, got -1.0``.

    ``details`` are more lines below that one.
    """

    def __init__(self, field: str, rule: str, value: object, details: str = ''):
        text = f'{field} {rule}, got {value!r}'
        super().__init__(f'{text}\n{details}' if details else text)
        self.field = field
        self.rule = rule
        self.value = value


class ShapeError(ConfigError):
    """An array has the wrong shape, dtype or layout for the operation it was given to."""


class WeightsError(ConfigError):
    """A checkpoint is missing, corrupt, or does not fit its configuration."""


class ImageError(ConfigError):
    """An image message cannot be decoded: encoding, size, step or content."""


class TransportError(ConfigError):
    """Shared memory, a topic or a bag cannot be used."""


class BackendUnavailable(ConfigError):
    """A compute or rendering backend was asked for that this machine does not offer."""
