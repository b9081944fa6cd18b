"""The command that times a network: bench."""

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
    from harp import survey
    from harp.bench import measuring, prepared
    from harp.display import Terminal

    display = Terminal()
    subject = survey.Subject(artefact, data, data_dir, weights, classes, shape)
    with tempfile.TemporaryDirectory() as folder:
        files = prepared.of(subject, Path(folder))
        found = measuring.measure(files, batches=batch, threads=threads, repeats=repeats, display=display)
    found = {"artefact": artefact, **found}
    if as_json:
        typer.echo(json.dumps(found, indent=2))
        return
    title = f"{artefact}: {threads} thread{'s' * (threads > 1)}, medians of {repeats} calls"
    columns = ("runtime", "batch", "median ms", "p95 ms", "images/s", f"to {found['against']}")
    rows = [
        [
            row["runtime"],
            str(row["batch"]),
            f"{row['median_ms']:.3f}",
            f"{row['p95_ms']:.3f}",
            f"{row['images_per_second']:,.0f}",
            f"{row['speedup']:.2f}x",
        ]
        for row in found["latency"]
    ]
    display.table(title, columns, rows)
    facts = [_facts(name, each, found["dense_bytes"]) for name, each in found["runtimes"].items()]
    heads = ("runtime", "file", "dense/file", "peak memory", "import s", "open s", "first s", "difference")
    display.table("\nin a process of its own", heads, facts)
    for note in found["notes"]:
        typer.echo(note)


def _facts(name: str, each: dict[str, Any], dense: int | None) -> list[str]:
    return [
        f"{name} {each['version']}",
        _size(each["file_bytes"]),
        "–" if dense is None else f"{dense / each['file_bytes']:,.1f}",
        "–" if each["peak_bytes"] is None else _size(each["peak_bytes"]),
        *(f"{each[f'{part}_seconds']:.3f}" for part in ("import", "open", "first")),
        f"{each['largest_difference']:.1e}",
    ]


def _size(count: int) -> str:
    """Bytes for people."""
    for unit, words in ((1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if count >= unit:
            return f"{count / unit:.1f} {words}"
    return f"{count} B"
