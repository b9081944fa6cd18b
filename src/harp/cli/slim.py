"""The command `harp slim`."""

from pathlib import Path
from typing import Annotated

from typer import Argument, Option

from harp.cli import options
from harp.cli.output import echo, print_json


def slim(
    target: Annotated[str, Argument(help="A run's folder, or a model as in `harp doctor`.")],
    out: Annotated[Path, Option(help="Folder for the small network; must not be there yet.")],
    keep: Annotated[
        str | None, Option(help="Of a model, keep the strongest channels, this share of the budget.")
    ] = None,
    budget: Annotated[str, Option(help="What --keep counts: flops, macs, parameters or memory.")] = "flops",
    multiple: Annotated[int, Option(min=1, help="Keep multiples of so many channels, as hardware likes.")] = 1,
    data: options.ShapeData = None,
    data_dir: options.DataDir = None,
    weights: options.Weights = None,
    classes: options.Classes = None,
    shape: options.Shape = None,
    size: options.Size = None,
    normalize: options.Normalize = None,
    as_json: options.Json = False,
) -> None:
    """Cut out what is pruned: smaller tensors, the same answers.

    Example: harp slim runs/mine-0123456789ab --out small

    Of a run that pruned channels, its small network. Of a run that pruned weights, or a model with zeros, the network
    without the channels that are dead: nobody reads them, or they are constant. Of a model with --keep, the network
    without its weakest channels.

    The folder holds model.safetensors, slim.json and rebuild.py, which loads them into the architecture and needs
    torch and safetensors only.
    """
    from harp.deploy.slim import by_magnitude, check_free, of_run, without_dead_channels
    from harp.errors import RecipeError
    from harp.experiments import plan
    from harp.system import numbers
    from harp.system.progress import Terminal

    check_free(out)
    if Path(target).is_dir():
        if keep is not None:
            raise RecipeError(f"--keep {keep}: a run has its budget in its recipe; --keep is for models")
        shrunk = of_run(Path(target), shape)
    else:
        subject = plan.Subject(target, data, data_dir, weights, classes, shape, size=size, normalize=normalize)
        source = subject.source()
        model, (images, _) = subject.model(source), subject.images(source)
        if keep is None:
            shrunk = without_dead_channels(model, images[:2])
        else:
            share = numbers.share(keep)
            shrunk = by_magnitude(model, images[:2], share, budget=budget, multiple=multiple)
    shrunk.save(out)
    facts = {**shrunk.facts(), "folder": str(out)}
    if as_json:
        print_json(facts)
        return
    rows = [[name, *("x".join(map(str, shape)) for shape in shapes)] for name, shapes in facts["shapes"].items()]
    Terminal().table("tensors that shrank", ("tensor", "before", "after"), rows)
    names = {"parameters": "parameters", "macs": "MACs", "bytes_dense": "bytes"}
    pairs = {name: facts[key] for key, name in names.items()}
    totals = [[name, f"{before:,}", f"{after:,}", f"{after / before:.1%}"] for name, (before, after) in pairs.items()]
    Terminal().table("", ("", "before", "after", ""), totals)
    echo(f"removed   {facts['removed']}")
    echo(f"written   {out} (model.safetensors, slim.json, rebuild.py)")
