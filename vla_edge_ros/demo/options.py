"""The demo's options, checked before a node starts, which would tell it late and in its log."""

from argparse import Namespace
from pathlib import Path

from vla_edge_ros.errors import ConfigError
from vla_edge_ros.outputs import check_folder

MAX_SECONDS = 86400.0


def check_options(options: Namespace, outputs: tuple[str, ...]) -> None:
    """
    Refuse what no node or no file could take.

    Parameters
    ----------
    options : Namespace
        Of ``vla-edge demo``.
    outputs : tuple of str
        Names of the files that will be written into ``--out``.

    Raises
    ------
    ConfigError
        Naming the option.

    """
    # Imported here: loading is what a stop signal may interrupt.
    from vla_edge_ros.sim.tasks import MAX_SEED, named_colour

    if not 1.0 <= options.seconds <= MAX_SECONDS:
        raise ConfigError('--seconds', f'must be in 1..{MAX_SECONDS:.0f} s', options.seconds)
    if not 0 <= options.seed <= MAX_SEED:
        raise ConfigError('--seed', f'must be in 0..{MAX_SEED}', options.seed)
    try:
        if options.instruction is not None:
            named_colour(options.instruction)
        _check_policy(options.policy, options.instruction)
    except ConfigError as error:
        if error.field not in ('instruction', 'policy'):
            raise
        raise ConfigError(f'--{error.field}', error.rule, error.value) from None
    check_folder('--out', options.out, *outputs)
    if options.record is not None:
        _check_record(options.record)


def _check_policy(folder: str, instruction: str | None) -> None:
    from vla_edge_ros.policy.policy import DEFAULT_POLICY, Policy
    from vla_edge_ros.policy.policy_config import PolicyConfig

    PolicyConfig.load(folder or DEFAULT_POLICY)
    # The embedded policy loads in no time; a large one is left to the node that will run it.
    if instruction is not None and not folder:
        Policy.load(backend='cpu').check_instruction(instruction)


def _check_record(path: Path) -> None:
    if path.exists():
        raise ConfigError('--record', 'must not exist yet', str(path))
    check_folder('--record', path)
