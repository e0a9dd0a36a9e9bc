"""
Errors a user can fix.

Rule of this leaf module: what a user can mend raises a subclass of ``VlaEdgeError`` whose
message names field, rule and value; a broken invariant of our own raises a plain
``RuntimeError`` or ``AssertionError``. A missed deadline or a stale frame is no error but a
value in ``StepResult``.
"""


class VlaEdgeError(ValueError):
    """Base of every error a user can fix."""


class ConfigError(VlaEdgeError):
    """A parameter or configuration value breaks its rule: ``margin_ms must be >= 0, got -1.0``."""

    def __init__(self, field: str, rule: str, value: object):
        super().__init__(f'{field} {rule}, got {value!r}')
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
