"""The command `harp prune`."""

from pathlib import Path
from typing import Annotated

from typer import Option

from harp.cli import options
from harp.cli.run import execute
from harp.system.distributed.environment import Machines


def prune(
    model: options.Model,
    data: Annotated[
        str, Option(help="Data: a name (`harp list data`), or a folder of images or file.npz of your own.")
    ],
    keep: Annotated[str, options.KEEP],
    method: options.Method = None,
    strategy: options.Strategy = None,
    channels: options.Channels = False,
    budget: options.Budget = None,
    multiple: options.Multiple = 1,
    weights: options.Weights = None,
    size: options.Size = None,
    normalize: options.Normalize = None,
    data_dir: options.DataDir = None,
    out: options.Out = Path("runs"),
    objective: Annotated[str, options.OBJECTIVE] = "pgd",
    epsilon: Annotated[str | None, Option(help="Attack budget, like 8/255; default: usual for the data.")] = None,
    pretrain: Annotated[int | None, Option(min=0, help="Epochs of pre-training (none if weights are given).")] = None,
    prune_epochs: Annotated[int | None, Option("--prune", min=0, help="Epochs of pruning.")] = None,
    finetune: Annotated[int | None, Option(min=0, help="Epochs of fine-tuning.")] = None,
    protocol: Annotated[str, options.PROTOCOL] = "given",
    batch: Annotated[int, Option(min=1, help="Images a batch.")] = 128,
    seed: Annotated[int, Option(min=0, help="Seed of everything random.")] = 0,
    ignore: Annotated[list[str], Option(help="Layers to leave dense, by name pattern.")] = [],  # noqa: B006 (same)
    include: Annotated[list[str], Option(help="Parameters to prune too: embeddings, bare ones.")] = [],  # noqa: B006
    changes: options.Set = [],  # noqa: B006 (typer copies it)
    devices: options.Devices = 1,
    accelerator: options.Accelerator = "auto",
    nodes: options.Nodes = 1,
    node_rank: options.NodeRank = 0,
    main_address: options.MainAddress = None,
    minutes: options.Minutes = 10.0,
    keep_states: options.KeepStates = 2,
    max_minutes: options.MaxMinutes = None,
    workers: options.Workers = None,
    as_json: options.Json = False,
) -> None:
    """Prune a model to an exact budget and prove its robustness: a recipe from flags.

    Example: harp prune resnet18 --data cifar10 --data-dir ~/data --keep 1%

    Channels: harp prune resnet18 --data cifar10 --data-dir ~/data --keep 25% --channels

    The method is tandem, or magnitude for channels, unless another is named.
    """
    from harp.experiments import presets
    from harp.experiments.image_size import image_size
    from harp.experiments.recipe import parse

    best = presets.BEST["channels" if channels else "weights"]
    content = presets.recipe(
        model,
        data,
        keep,
        method=method or best,
        strategy=strategy,
        objective=objective,
        epsilon=epsilon,
        weights=None if weights is None else str(weights),
        epochs=(pretrain, prune_epochs, finetune),
        batch=batch,
        seed=seed,
        ignore=ignore,
        include=include,
        channels=channels,
        budget=budget,
        multiple=multiple,
        size=None
        if any(change.startswith("data.size=") for change in changes)
        else image_size(data, data_dir, size, model),
        normalize=normalize,
        protocol=protocol,
    )
    machines = Machines(devices, accelerator, nodes, node_rank, main_address)
    note = f"method: {best}, the best measured (benchmarks/README.md); --method names another"
    shown = note if method is None else ""
    execute(
        parse(content, changes),
        out,
        data_dir,
        machines,
        minutes,
        keep_states,
        max_minutes,
        workers,
        shown,
        as_json=as_json,
    )
