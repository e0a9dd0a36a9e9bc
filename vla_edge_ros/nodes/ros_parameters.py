"""
Parameter sets as ROS parameters, and back.

A node binds the parameter sets it needs: every field is declared under its own name with
description, unit, range and choices; overrides that name no field are refused; a change while
running is checked as a whole by the set's own rules before any part of it takes effect.
"""

import array
from collections.abc import Callable, Mapping, Sequence
import dataclasses
from typing import Any

from rcl_interfaces.msg import (
    FloatingPointRange,
    IntegerRange,
    ParameterDescriptor,
    SetParametersResult,
)
from rclpy.exceptions import ParameterNotDeclaredException
from rclpy.node import Node
from rclpy.parameter import Parameter

from vla_edge_ros.errors import ConfigError, VlaEdgeError
from vla_edge_ros.parameters import check_value, default_of, from_mapping

# rclpy declares or reads these by itself.
_ROS_PREFIXES = ('qos_overrides.',)


def descriptor_of(field: dataclasses.Field, read_only: bool = False) -> ParameterDescriptor:
    """Return the ROS description of one field; unit and choices stand as constraints."""
    metadata = field.metadata
    kind = type(default_of(field))
    constraints = []
    if metadata['unit']:
        constraints.append(f'unit: {metadata["unit"]}')
    if metadata['choices']:
        constraints.append(f'one of: {", ".join(map(str, metadata["choices"]))}')
    if metadata['read_only']:
        constraints.append('fixed while the node is configured')
    descriptor = ParameterDescriptor(
        name=field.name,
        description=metadata['description'],
        additional_constraints='; '.join(constraints),
        read_only=read_only,
        # An empty list has no element type to infer.
        dynamic_typing=kind is list,
    )
    if metadata['range'] is not None:
        low, high = metadata['range']
        if kind is int:
            descriptor.integer_range = [IntegerRange(from_value=int(low), to_value=int(high))]
        else:
            ends = {'from_value': float(low), 'to_value': float(high)}
            descriptor.floating_point_range = [FloatingPointRange(**ends)]
    return descriptor


def _plain(item: Parameter) -> Any:
    """Return the value of a parameter; rclpy keeps numbers in an ``array``."""
    return item.value.tolist() if isinstance(item.value, array.array) else item.value


class UnknownParameter(ParameterNotDeclaredException):
    """A parameter was set that the node does not have."""

    def __init__(self, name: str, text: str):
        super().__init__(name)
        self._text = text

    def __str__(self) -> str:
        return self._text


class RosParameters:
    """
    The parameter sets of one node, kept equal to its ROS parameters.

    Parameters
    ----------
    node : Node
        The node to declare on.
    classes : sequence of parameter sets
        Their field names must differ from each other.
    locked : callable, optional
        True while read-only fields must keep their value (a managed node that is configured).
        Without it they can never be changed after the node has started.

    Raises
    ------
    ConfigError
        An override is unknown or breaks its rule.

    """

    def __init__(
        self, node: Node, classes: Sequence[type], locked: Callable[[], bool] | None = None
    ):
        self._node = node
        self._locked = locked
        self._listeners: list[Callable[[], None]] = []
        self._checks: list[Callable[[Mapping[type, Any]], None]] = []
        self._fields: dict[str, tuple[type, dataclasses.Field]] = {}
        for cls in classes:
            for field in dataclasses.fields(cls):
                if field.name in self._fields:
                    raise RuntimeError(f'two parameter sets declare {field.name}')
                self._fields[field.name] = (cls, field)

        # rclpy keeps unknown overrides silently and offers no public way to list them.
        overrides = {name: _plain(item) for name, item in node._parameter_overrides.items()}
        self._refuse_unknown(overrides)
        given = {name: overrides[name] for name in self._fields if name in overrides}
        self._sets = {cls: from_mapping(cls, self._part(cls, given)) for cls in classes}
        for name, (cls, field) in self._fields.items():
            read_only = field.metadata['read_only'] and locked is None
            value = getattr(self._sets[cls], name)
            descriptor = descriptor_of(field, read_only)
            node.declare_parameter(name, value, descriptor, ignore_override=True)
        node.add_pre_set_parameters_callback(self._before_set)
        node.add_on_set_parameters_callback(self._check)
        node.add_post_set_parameters_callback(self._apply)

    def __getitem__(self, cls: type) -> Any:
        """Return the present values as an instance of ``cls``."""
        return self._sets[cls]

    def on_change(self, listener: Callable[[], None]) -> None:
        """Call ``listener`` after each change has taken effect."""
        self._listeners.append(listener)

    def add_check(self, check: Callable[[Mapping[type, Any]], None]) -> None:
        """
        Ask ``check`` before each change, with the sets as they would be, by class.

        It refuses with a ``VlaEdgeError``.
        """
        self._checks.append(check)

    def _refuse_unknown(self, overrides: dict[str, Any]) -> None:
        for name, value in overrides.items():
            is_ros = self._node.has_parameter(name) or name.startswith(_ROS_PREFIXES)
            if name not in self._fields and not is_ros:
                rule = f'is not a parameter of {self._node.get_name()}'
                known = ', '.join(sorted(self._fields))
                raise ConfigError(name, f'{rule} (known: {known})', value)

    def _part(self, cls: type, values: dict[str, Any]) -> dict[str, Any]:
        return {name: value for name, value in values.items() if self._fields[name][0] is cls}

    def _changed(self, parameters: list[Parameter]) -> dict[type, Any]:
        """Return the sets as they would be with ``parameters`` applied all at once."""
        values = {p.name: _plain(p) for p in parameters if p.name in self._fields}
        for name, value in values.items():
            cls, field = self._fields[name]
            is_new = check_value(field, value) != getattr(self._sets[cls], name)
            if field.metadata['read_only'] and is_new and self._locked and self._locked():
                rule = 'is fixed while the node is configured: clean it up first'
                raise ConfigError(name, rule, value)
        return {
            cls: dataclasses.replace(present, **self._part(cls, values))
            for cls, present in self._sets.items()
        }

    def _before_set(self, parameters: list[Parameter]) -> list[Parameter]:
        # rclpy refuses these as well, but loses their names; it expects this exception.
        try:
            self._refuse_unknown({item.name: _plain(item) for item in parameters})
        except ConfigError as error:
            raise UnknownParameter(error.field, str(error)) from None
        return self._widen_integers(parameters)

    def _widen_integers(self, parameters: list[Parameter]) -> list[Parameter]:
        """Take ``margin_ms 3`` for ``margin_ms 3.0``, as YAML files may write it."""
        widened = []
        for item in parameters:
            field = self._fields.get(item.name, (None, None))[1]
            is_float = field is not None and type(default_of(field)) is float
            if is_float and item.type_ == Parameter.Type.INTEGER:
                item = Parameter(item.name, Parameter.Type.DOUBLE, float(item.value))
            widened.append(item)
        return widened

    def _check(self, parameters: list[Parameter]) -> SetParametersResult:
        try:
            changed = self._changed(parameters)
            for check in self._checks:
                check(changed)
        except VlaEdgeError as error:
            return SetParametersResult(successful=False, reason=str(error))
        return SetParametersResult(successful=True)

    def _apply(self, parameters: list[Parameter]) -> None:
        if not any(item.name in self._fields for item in parameters):
            return
        self._sets = self._changed(parameters)
        for listener in self._listeners:
            listener()
