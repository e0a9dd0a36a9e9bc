"""
Parameters, declared once.

A parameter set is a frozen, slotted dataclass whose fields are made by :func:`parameter`;
``__post_init__`` calls :func:`validate`. Nodes turn the metadata into ROS descriptors,
docs/parameters.md is generated from it, and unknown keys are refused by :func:`from_mapping`.
"""

from collections.abc import Iterator, Mapping
import dataclasses
import math
from typing import Any

from vla_edge_ros.errors import ConfigError


def parameter(
    default: Any,
    description: str,
    *,
    unit: str = '',
    range: tuple[float, float] | None = None,  # noqa: A002 - ROS calls it so
    choices: tuple[Any, ...] = (),
    read_only: bool = False,
) -> Any:
    """
    Declare one field of a parameter set.

    Parameters
    ----------
    default : bool, int, float, str or list of str
        Value used when the user gives none; its type is the parameter's type.
    description : str
        One sentence, without the unit.
    unit : str
        SI symbol or '' when there is none.
    range : (low, high), optional
        Inclusive bounds of a number.
    choices : tuple
        The allowed values of an enumeration.
    read_only : bool
        True when a change needs the node to be configured again.

    """
    metadata = {
        'description': description,
        'unit': unit,
        'range': range,
        'choices': choices,
        'read_only': read_only,
    }
    if isinstance(default, list):
        return dataclasses.field(default_factory=lambda: list(default), metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)


def default_of(field: dataclasses.Field) -> Any:
    """Return the default value of a parameter field."""
    if field.default_factory is not dataclasses.MISSING:
        return field.default_factory()
    return field.default


def check_value(field: dataclasses.Field, value: Any) -> Any:
    """
    Return ``value`` converted to the field's type.

    Raises
    ------
    ConfigError
        The type is wrong, the number is not finite, or it lies outside range or choices.

    """
    kind = type(default_of(field))
    if kind is float and type(value) is int:
        value = float(value)
    if kind is list and isinstance(value, (list, tuple)):
        value = list(value)
    if type(value) is not kind:
        raise ConfigError(field.name, f'must be of type {kind.__name__}', value)
    if kind is float and not math.isfinite(value):
        raise ConfigError(field.name, 'must be finite', value)
    low_high = field.metadata['range']
    if low_high is not None and not low_high[0] <= value <= low_high[1]:
        unit = field.metadata['unit']
        rule = f'must be in {low_high[0]}..{low_high[1]}{" " + unit if unit else ""}'
        raise ConfigError(field.name, rule, value)
    choices = field.metadata['choices']
    if choices and value not in choices:
        raise ConfigError(field.name, f'must be one of {", ".join(map(str, choices))}', value)
    return value


def validate(instance: Any) -> None:
    """Check every field of a frozen parameter set in place; raises ``ConfigError``."""
    for field in dataclasses.fields(instance):
        value = check_value(field, getattr(instance, field.name))
        object.__setattr__(instance, field.name, value)


def from_mapping(cls: type, mapping: Mapping[str, Any]) -> Any:
    """
    Build a parameter set from a mapping.

    Raises
    ------
    ConfigError
        A key is unknown, or a value breaks its rule.

    """
    known = {field.name for field in dataclasses.fields(cls)}
    for key in mapping:
        if key not in known:
            rule = f'is not a parameter of {cls.__name__} (known: {", ".join(sorted(known))})'
            raise ConfigError(str(key), rule, mapping[key])
    return cls(**mapping)


def describe(cls: type) -> Iterator[tuple[str, Any, Mapping[str, Any]]]:
    """Yield ``(name, default, metadata)`` for every parameter of a set, in declared order."""
    for field in dataclasses.fields(cls):
        yield field.name, default_of(field), field.metadata
