"""The command line: thin commands over the library. Nothing heavy is imported before a command needs it."""

import json
import logging
import os
import shlex
import signal
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from harp import __version__
from harp.errors import HarpError, Interrupted

app = typer.Typer(
    name="harp",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    help="Make robust neural networks small: holistic adversarially robust pruning for any PyTorch model.",
    epilog="Start with `harp demo`. Then `harp doctor MODEL` and `harp prune MODEL --data DATA --keep 1%`.",
)

_DataDir = Annotated[Path | None, typer.Option("--data-dir", help="Folder that holds the data set's published files.")]
_Out = Annotated[Path, typer.Option("--out", help="Folder for runs; finished stages in it are reused.")]
_Set = Annotated[
    list[str], typer.Option("--set", help="Change a value of the recipe, like stages.prune.epochs=5; may be repeated.")
]
_Json = Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")]
_Devices = Annotated[int, typer.Option(help="Processes (and GPUs) to train on.")]
_Accelerator = Annotated[str, typer.Option(help="cpu, cuda, mps or auto.")]
_Weights = Annotated[Path | None, typer.Option(help="Trained weights: safetensors, or a torch checkpoint.")]
_Classes = Annotated[int | None, typer.Option(help="Number of classes, where no data set says it.")]
_Shape = Annotated[str | None, typer.Option(help="Image shape like 3x32x32, where no data set says it.")]
_Model = Annotated[
    str, typer.Argument(help="A name (`harp list models`), torchvision:NAME, timm:NAME or path/to/file.py:function.")
]


def _version(show: bool) -> None:
    if show:
        typer.echo(f"harp {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and exit.")
    ] = False,
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="Say more.")] = False,
) -> None:
    logging.getLogger("harp").setLevel(logging.DEBUG if verbose else logging.INFO)


@app.command()
def demo(out: _Out = Path("runs"), changes: _Set = []) -> None:  # noqa: B006 (typer copies it)
    """Pre-train, prune to 1 % by HARP, fine-tune and attack a small network, in a few minutes on two cores."""
    import torch

    torch.set_num_threads(1)  # so small a network spends more on waking a second thread than it gains
    _run("demo", out, None, changes)


@app.command()
def run(
    recipe: Annotated[str, typer.Argument(help="A YAML file, or the name of a shipped recipe (`harp list recipes`).")],
    out: _Out = Path("runs"),
    data_dir: _DataDir = None,
    changes: _Set = [],  # noqa: B006 (typer copies it)
    devices: _Devices = 1,
    accelerator: _Accelerator = "auto",
    minutes: Annotated[float, typer.Option(help="Save the state at least this often.")] = 10.0,
) -> None:
    """Run a recipe: train its stages, evaluate, report. Interrupted? The same command goes on where it stopped."""
    _run(recipe, out, data_dir, changes, devices, accelerator, minutes)


@app.command()
def prune(
    model: _Model,
    data: Annotated[str, typer.Option(help="Data set: a name (`harp list data`) or a file.npz of your own.")],
    keep: Annotated[str, typer.Option(help="Share of the weights to keep: 1%, 0.01 or 1/100.")],
    method: Annotated[str, typer.Option(help="Pruning method (`harp list methods`).")] = "harp",
    strategy: Annotated[
        str | None, typer.Option(help="Where the budget goes: uniform, erk, lamp, igq, boosted, global; HARP's start.")
    ] = None,
    weights: _Weights = None,
    data_dir: _DataDir = None,
    out: _Out = Path("runs"),
    objective: Annotated[str, typer.Option(help="Training objective: pgd, trades, mart or natural.")] = "pgd",
    epsilon: Annotated[str | None, typer.Option(help="Attack budget, like 8/255; default: usual for the data.")] = None,
    pretrain: Annotated[int | None, typer.Option(help="Epochs of pre-training (none if weights are given).")] = None,
    prune_epochs: Annotated[int | None, typer.Option("--prune", help="Epochs of pruning.")] = None,
    finetune: Annotated[int | None, typer.Option(help="Epochs of fine-tuning.")] = None,
    batch: Annotated[int, typer.Option(help="Images a batch.")] = 128,
    seed: Annotated[int, typer.Option(help="Seed of everything random.")] = 0,
    ignore: Annotated[list[str], typer.Option(help="Layers to leave dense, by name pattern.")] = [],  # noqa: B006 (same)
    changes: _Set = [],  # noqa: B006 (typer copies it)
    devices: _Devices = 1,
    accelerator: _Accelerator = "auto",
) -> None:
    """Prune a model to an exact budget and prove its robustness: a recipe from flags.

    Example: harp prune resnet18 --data cifar10 --data-dir ~/data --keep 1%
    """
    from harp import presets
    from harp.recipe import parse

    content = presets.recipe(
        model,
        data,
        keep,
        method=method,
        strategy=strategy,
        objective=objective,
        epsilon=epsilon,
        weights=None if weights is None else str(weights),
        epochs=(pretrain, prune_epochs, finetune),
        batch=batch,
        seed=seed,
        ignore=ignore,
    )
    _execute(parse(content, changes), out, data_dir, devices, accelerator)


@app.command()
def compare(
    study: Annotated[
        str,
        typer.Argument(
            help="A study or a recipe: a YAML file or a shipped name (`harp list studies`, `list recipes`)."
        ),
    ],
    methods: Annotated[
        str | None, typer.Option(help="Like harp,hydra+lamp,harp:gamma_step=0.1,dense-small (`harp list methods`).")
    ] = None,
    keep: Annotated[str | None, typer.Option(help="Shares of the weights to keep, like 10%,1%,0.5%.")] = None,
    seeds: Annotated[str | None, typer.Option(help="Seeds, like 0,1,2.")] = None,
    jobs: Annotated[int, typer.Option(help="Runs at a time; they share the machine's cores.")] = 1,
    out: _Out = Path("runs"),
    data_dir: _DataDir = None,
    changes: _Set = [],  # noqa: B006 (typer copies it)
    as_json: _Json = False,
) -> None:
    """Compare methods under one recipe: every method, budget and seed, then a table and a plot with intervals.

    Example: harp compare fashion/harp-99 --methods harp,hydra,magnitude,dense-small --keep 5%,1% --seeds 0,1,2 --jobs 2

    NAME+STRATEGY spreads the budget by a strategy; NAME:option=value sets an option. `dense-small` is a dense network
    with as many weights as the others keep. All train for the same epochs. Interrupted? The same command goes on.
    """
    from harp import standings
    from harp import study as studies
    from harp.compare import Comparison
    from harp.display import Terminal
    from harp.errors import MissingExtra

    display = Terminal()
    planned = studies.load(study, methods=methods, keep=keep, seeds=seeds, changes=changes)
    comparison = Comparison(planned, out, data_dir=data_dir, display=display)
    outcome = comparison.execute(jobs)
    try:
        comparison.draw(outcome)
    except MissingExtra as error:
        typer.echo(f"picture   none: {error}", err=True)
    if as_json:
        typer.echo((comparison.folder / "results.json").read_text(encoding="utf-8"))
    else:
        for title, rows in standings.blocks(outcome["rows"], outcome["weights"]):
            display.table(f"\n{title}", standings.columns(outcome["attack"]), rows)
        typer.echo("\n" + "\n".join(standings.notes(outcome)))
        typer.echo(f"files     {comparison.folder}")
    if any(row["failed"] for row in outcome["rows"]):
        raise typer.Exit(1)


@app.command()
def evaluate(
    target: Annotated[str, typer.Argument(help="A run's folder, or a model as in `harp prune`.")],
    data: Annotated[str | None, typer.Option(help="Data set, if the target is a model.")] = None,
    data_dir: _DataDir = None,
    weights: _Weights = None,
    attack: Annotated[list[str], typer.Option(help="fgsm, pgd-STEPS, pgd-STEPSxRESTARTS, cw.")] = ["pgd-20"],  # noqa: B006 (same)
    epsilon: Annotated[str | None, typer.Option(help="Attack budget, like 8/255; default: the run's.")] = None,
    examples: Annotated[int | None, typer.Option(help="Test images, drawn by the seed; default: all.")] = None,
    seed: Annotated[int, typer.Option(help="Seed of the attack and the draw.")] = 0,
    as_json: _Json = False,
) -> None:
    """Measure natural and robust accuracy on the test set, with 95 % intervals."""
    from harp import assess, presets, summary
    from harp.display import Terminal

    display = Terminal()
    wish = None if epsilon is None else presets.read_number("epsilon", epsilon)
    subject = assess.load(target, data, data_dir, None if weights is None else str(weights))
    results = assess.measure_all(subject, attack, wish, examples, seed, display)
    if as_json:
        typer.echo(json.dumps(results, indent=2))
        return
    columns = ("test", "accuracy", "95 % interval", "n", "epsilon")
    rows = [[row[0], *row[2:]] for row in summary.result_rows([], results)]
    display.table(f"{target} on {subject.data.name} ({results[0]['measure']})", columns, rows)


@app.command("list")
def list_(
    what: Annotated[str, typer.Argument(help="methods, models, data, recipes or studies.")],
    as_json: _Json = False,
) -> None:
    """List the methods, models, data sets, recipes or studies that HARP knows."""
    from harp import catalogue
    from harp.display import Terminal

    rows = catalogue.rows(what)
    if as_json:
        typer.echo(json.dumps([{"name": name, "description": text} for name, text in rows], indent=2))
    else:
        Terminal().table("", (what, ""), [list(row) for row in rows])


@app.command()
def plan(
    model: _Model,
    keep: Annotated[str, typer.Option(help="Share of the weights to keep: 0.1%, 0.001 or 1/1000.")],
    strategy: Annotated[str, typer.Option(help="uniform, erk, lamp, igq, boosted or global.")] = "uniform",
    data: Annotated[str | None, typer.Option(help="Data set that decides classes and image shape.")] = None,
    data_dir: _DataDir = None,
    weights: _Weights = None,
    classes: _Classes = None,
    shape: _Shape = None,
    as_published: Annotated[
        bool, typer.Option("--as-published", help="Round each layer on its own, as papers do; may miss the budget.")
    ] = False,
    as_json: _Json = False,
) -> None:
    """Show how a strategy spreads a budget over the layers."""
    from harp import presets, summary, survey
    from harp.display import Terminal

    subject = survey.Subject(model, data, data_dir, weights, classes, shape)
    layers = survey.spread(subject.model(), strategy, presets.read_number("keep", keep), as_published=as_published)
    if as_json:
        typer.echo(json.dumps(layers, indent=2))
    else:
        Terminal().table(f"{model}, {strategy}, keep {keep}", summary.LAYER_COLUMNS, summary.layer_rows(layers))


@app.command()
def doctor(
    model: _Model,
    data: Annotated[str | None, typer.Option(help="Data set to examine it on; default: random images.")] = None,
    data_dir: _DataDir = None,
    weights: _Weights = None,
    classes: _Classes = None,
    shape: _Shape = None,
    as_json: _Json = False,
) -> None:
    """Examine a model: what can be pruned, and whether an attack on it would mean anything."""
    from harp import survey
    from harp.display import Terminal

    examination = survey.Subject(model, data, data_dir, weights, classes, shape).examination()
    if as_json:
        typer.echo(json.dumps(examination.as_dict(), indent=2))
    else:
        display = Terminal()
        rows = [[layer["name"], f"{layer['size']:,}"] for layer in examination.layers]
        display.table("can be pruned", ("layer", "weights"), rows)
        if examination.left_out:
            display.table("\nleft alone", ("parameter", ""), [list(pair) for pair in examination.left_out.items()])
        signs = {"good": "✓", "look": "?", "bad": "✗"}
        rows = [[f"{signs[f.verdict]} {f.check}", f.text] for f in examination.findings]
        display.table("\nfindings", ("check", ""), rows)
    if not examination.healthy:
        raise typer.Exit(1)


def _run(
    name: str,
    out: Path,
    data_dir: Path | None,
    changes: list[str],
    devices: int = 1,
    accelerator: str = "auto",
    minutes: float = 10.0,
) -> None:
    from harp.recipe import load

    _execute(load(name, changes), out, data_dir, devices, accelerator, minutes)


def _execute(
    recipe: Any, out: Path, data_dir: Path | None, devices: int = 1, accelerator: str = "auto", minutes: float = 10.0
) -> None:
    from harp import artefact, picture, summary
    from harp.display import Quiet, Terminal
    from harp.engine import launch
    from harp.errors import MissingExtra
    from harp.run import Run

    fabric = launch(recipe.precision, accelerator, devices)
    display = Terminal() if fabric.is_global_zero else Quiet()
    logging.getLogger("harp").disabled = not fabric.is_global_zero  # one voice is enough
    work = Run(recipe, out, data_dir=data_dir, display=display, fabric=fabric, minutes=minutes)
    outcome = work.execute()
    if not fabric.is_global_zero:
        return
    layers = artefact.layers(outcome.units, outcome.masks)
    display.table("layers", summary.LAYER_COLUMNS, summary.layer_rows(layers))
    measure = (
        f"\n{recipe.name}: {outcome.results[0]['measure']} on the test set of {recipe.data.name}, seed {recipe.seed}"
    )
    display.table(measure, summary.RESULT_COLUMNS, summary.result_rows(outcome.dense, outcome.results))
    line = summary.headline(outcome.dense, outcome.results, layers)
    typer.echo(f"\n{line}")
    try:
        for suffix in ("png", "svg"):
            picture.draw(outcome.folder / f"layers.{suffix}", f"{recipe.name}: {line}", layers, work.histories())
        typer.echo(f"picture   {outcome.folder / 'layers.png'}")
    except MissingExtra as error:
        typer.echo(f"picture   none: {error}", err=True)
    typer.echo(f"artefact  {outcome.folder / 'model.safetensors'}")


class _Log(logging.Handler):
    """Print what the library logs to standard error as it is at that moment: a live bar puts itself in between."""

    def emit(self, record: logging.LogRecord) -> None:
        """One line, named by its level where that is more than news."""
        level = f"{record.levelname.lower()}: " if record.levelno > logging.INFO else ""
        print(f"{level}{record.getMessage()}", file=sys.stderr)


def main() -> None:
    """The `harp` command: one line for what HARP raises on purpose, and exit codes that scripts can use."""
    # Spinning threads starve each other on a shared machine (40 times slower); must be set before torch is loaded.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    logging.getLogger("harp").handlers = [_Log()]
    try:
        app()
    except HarpError as error:
        typer.echo(f"error: {' '.join(str(error).split())}", err=True)
        sys.exit(2)
    except Interrupted as stop:
        typer.echo(f"\n{stop}. Go on with the same command: {shlex.join(['harp', *sys.argv[1:]])}", err=True)
        sys.exit(128 + stop.signal)
    except KeyboardInterrupt:
        typer.echo("\nstopped", err=True)
        sys.exit(128 + signal.SIGINT)
    except OSError as error:
        typer.echo(f"error: {error.strerror or error}: {error.filename or ''}", err=True)
        sys.exit(2)
