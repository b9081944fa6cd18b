"""The command `harp bench`."""

import json
import tempfile
from pathlib import Path
from typing import Annotated, Any

import typer

from harp.cli.options import Classes, DataDir, Json, Shape, Weights


def bench(
    artefact: Annotated[
        str, typer.Argument(help="A .harp or .onnx file, a run's folder, or a model as in `harp doctor`.")
    ],
    batch: Annotated[list[int], typer.Option(min=1, help="Images at a time; may be repeated.")] = [1, 64],  # noqa: B006 (typer copies it)
    threads: Annotated[int, typer.Option(min=1, help="Threads of each runtime.")] = 1,
    repeats: Annotated[int, typer.Option(min=1, help="Timed calls of each runtime at each batch size.")] = 20,
    data: Annotated[str | None, typer.Option(help="Data set that decides a model's classes and image shape.")] = None,
    data_dir: DataDir = None,
    weights: Weights = None,
    classes: Classes = None,
    shape: Shape = None,
    as_json: Json = False,
) -> None:
    """Time a pruned network on this CPU: the sparse engine against dense torch, ONNX Runtime and OpenVINO.

    All compute the same network and take turns. Size on disk, latency, throughput, memory, and what it takes to start.

    Example: harp bench model.harp --batch 1 --batch 256 --threads 2
    """
    from harp.deploy.bench import measure, of_target
    from harp.experiments import plan
    from harp.system.progress import Terminal

    display = Terminal()
    subject = plan.Subject(artefact, data, data_dir, weights, classes, shape)
    with tempfile.TemporaryDirectory() as folder:
        files = of_target(subject, Path(folder))
        result = measure(files, batches=batch, threads=threads, repeats=repeats, display=display)
    result = {"artefact": artefact, **result}
    if as_json:
        typer.echo(json.dumps(result, indent=2))
        return
    title = f"{artefact}: {threads} thread{'s' * (threads > 1)}, medians of {repeats} calls"
    columns = ("runtime", "batch", "median ms", "p95 ms", "images/s", f"to {result['against']}")
    rows = [
        [
            row["runtime"],
            str(row["batch"]),
            f"{row['median_ms']:.3f}",
            f"{row['p95_ms']:.3f}",
            f"{row['images_per_second']:,.0f}",
            f"{row['speedup']:.2f}x",
        ]
        for row in result["latency"]
    ]
    display.table(title, columns, rows)
    facts = [_facts(name, runtime, result["dense_bytes"]) for name, runtime in result["runtimes"].items()]
    heads = ("runtime", "file", "dense/file", "peak memory", "import s", "open s", "first s", "difference")
    display.table("\nin a process of its own", heads, facts)
    for note in result["notes"]:
        typer.echo(note)


def _facts(name: str, runtime: dict[str, Any], dense: int | None) -> list[str]:
    return [
        f"{name} {runtime['version']}",
        _size(runtime["file_bytes"]),
        "–" if dense is None else f"{dense / runtime['file_bytes']:,.1f}",
        "–" if runtime["peak_bytes"] is None else _size(runtime["peak_bytes"]),
        *(f"{runtime[f'{part}_seconds']:.3f}" for part in ("import", "open", "first")),
        f"{runtime['largest_difference']:.1e}",
    ]


def _size(count: int) -> str:
    """A size in bytes as text."""
    for unit, words in ((1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if count >= unit:
            return f"{count / unit:.1f} {words}"
    return f"{count} B"
