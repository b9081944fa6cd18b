"""The command `harp slim`."""

import json
from pathlib import Path
from typing import Annotated

import typer

from harp.cli.options import Classes, DataDir, Json, Shape, Weights


def slim(
    target: Annotated[str, typer.Argument(help="A run's folder, or a model as in `harp doctor`.")],
    out: Annotated[Path, typer.Option(help="Folder for the small network; must not be there yet.")],
    keep: Annotated[
        str | None, typer.Option(help="Of a model, keep the strongest channels within this share of the budget.")
    ] = None,
    budget: Annotated[str, typer.Option(help="What --keep counts: flops, macs, parameters or memory.")] = "flops",
    multiple: Annotated[int, typer.Option(min=1, help="Keep multiples of so many channels, as hardware likes.")] = 1,
    data: Annotated[str | None, typer.Option(help="Data set that decides classes and image shape.")] = None,
    data_dir: DataDir = None,
    weights: Weights = None,
    classes: Classes = None,
    shape: Shape = None,
    as_json: Json = False,
) -> None:
    """Cut out what is pruned: smaller tensors, the same answers.

    Of a run that pruned channels, its small network. Of a run that pruned weights, or a model with zeros, the network
    without the channels that are dead: nobody reads them, or they are constant. Of a model with --keep, the network
    without its weakest channels.

    The folder holds model.safetensors, slim.json and rebuild.py, which loads them into the architecture and needs
    torch and safetensors only.
    """
    from harp.deploy.slim import by_magnitude, check_free, of_run, without_dead_channels
    from harp.errors import RecipeError
    from harp.experiments import plan, presets
    from harp.system.progress import Terminal

    check_free(out)
    if Path(target).is_dir():
        if keep is not None:
            raise RecipeError(f"--keep {keep}: a run has its budget in its recipe; --keep is for models")
        shrunk = of_run(Path(target), shape)
    else:
        subject = plan.Subject(target, data, data_dir, weights, classes, shape)
        source = subject.source()
        model, (images, _) = subject.model(source), subject.images(source)
        if keep is None:
            shrunk = without_dead_channels(model, images[:2])
        else:
            share = presets.read_number("keep", keep)
            shrunk = by_magnitude(model, images[:2], share, budget=budget, multiple=multiple)
    shrunk.save(out)
    facts = {**shrunk.facts(), "folder": str(out)}
    if as_json:
        typer.echo(json.dumps(facts, indent=2))
        return
    rows = [
        [name, "x".join(map(str, before)), "x".join(map(str, after))]
        for name, (before, after) in facts["shapes"].items()
    ]
    Terminal().table("tensors that shrank", ("tensor", "before", "after"), rows)
    names = {"parameters": "parameters", "macs": "MACs", "bytes_dense": "bytes"}
    totals = [
        [word, f"{facts[k][0]:,}", f"{facts[k][1]:,}", f"{facts[k][1] / facts[k][0]:.1%}"] for k, word in names.items()
    ]
    Terminal().table("", ("", "before", "after", ""), totals)
    typer.echo(f"removed   {facts['removed']}")
    typer.echo(f"written   {out} (model.safetensors, slim.json, rebuild.py)")
