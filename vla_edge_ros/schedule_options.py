"""The schedule as options of the commands that run the control loop in virtual time."""

from argparse import ArgumentParser, Namespace
from typing import Any

from vla_edge_ros.errors import ConfigError
from vla_edge_ros.parameters import describe
from vla_edge_ros.runtime.loop_parameters import ControlLoopParameters, ScheduleParameters

NAMES = tuple(name for name, _, _ in describe(ScheduleParameters))
ONLY_OVERLAP = ('overlap_percent', 'seam')


def add_schedule_arguments(parser: ArgumentParser) -> None:
    """Declare an option for each parameter of the schedule; None tells that it was not given."""
    for name, default, metadata in describe(ScheduleParameters):
        unit = f', {metadata["unit"]}' if metadata['unit'] else ''
        # argparse formats the help: a percent sign must be doubled.
        help_text = f'{metadata["description"]}{unit} (default: {default!r})'.replace('%', '%%')
        parser.add_argument(
            '--' + name.replace('_', '-'), type=type(default), help=help_text,
            choices=metadata['choices'] or None)


def loop_parameters(arguments: Namespace) -> ControlLoopParameters:
    """
    Return the parameters of the loop with the schedule that the options choose.

    Raises
    ------
    ConfigError
        A value breaks its rule, or would have no effect; the field is the parameter's name.

    """
    given: dict[str, Any] = {name: getattr(arguments, name) for name in NAMES}
    given = {name: value for name, value in given.items() if value is not None}
    parameters = ControlLoopParameters(**given)
    for name in ONLY_OVERLAP:
        if name in given and parameters.schedule != 'overlap':
            rule = 'must be given with --schedule overlap only'
            raise ConfigError(name, rule, given[name])
    return parameters
