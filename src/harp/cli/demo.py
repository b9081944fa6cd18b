"""The command `harp demo`."""

from pathlib import Path

from harp.cli import options
from harp.cli.run import execute
from harp.system.distributed.environment import Machines


def demo(
    out: options.Out = Path("runs"),
    changes: options.Set = [],  # noqa: B006 (typer copies it)
    as_json: options.Json = False,
) -> None:
    """Pre-train, prune to 1 % by HARP, fine-tune and attack a small network, in a few minutes on two cores.

    Example: harp demo --out runs
    """
    import torch

    from harp.experiments.compose import load

    torch.set_num_threads(1)  # for so small a network a second thread costs more than it gains
    execute(load("demo", changes), out, None, Machines(), as_json=as_json)
