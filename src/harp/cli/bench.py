"""The command `harp bench`."""

import tempfile
from pathlib import Path
from typing import Annotated

from typer import Argument, Option

from harp.cli import options
from harp.cli.output import echo, print_json, show_table


def bench(
    artefact: Annotated[str, Argument(help="A .harp or .onnx file, a run's folder, or a model as in `harp doctor`.")],
    batch: Annotated[list[int], Option(min=1, help="Images at a time; may be repeated.")] = [1, 64],  # noqa: B006 (typer copies it)
    threads: Annotated[int, Option(min=1, help="Threads of each runtime.")] = 1,
    repeats: Annotated[int, Option(min=1, help="Timed calls of each runtime at each batch size.")] = 20,
    data: options.ShapeData = None,
    data_dir: options.DataDir = None,
    weights: options.Weights = None,
    classes: options.Classes = None,
    shape: options.Shape = None,
    size: options.Size = None,
    normalize: options.Normalize = None,
    as_json: options.Json = False,
) -> None:
    """Time a pruned network on this CPU: the sparse engine against dense torch, ONNX Runtime and OpenVINO.

    All compute the same network and take turns. Size on disk, latency, throughput, memory, and what it takes to start.

    Example: harp bench model.harp --batch 1 --batch 256 --threads 2
    """
    from harp.deploy.bench import measure, of_target
    from harp.experiments import plan
    from harp.system.files import amount
    from harp.system.progress import Terminal

    display = Terminal()
    subject = plan.Subject(artefact, data, data_dir, weights, classes, shape, size=size, normalize=normalize)
    with tempfile.TemporaryDirectory() as folder:
        files = of_target(subject, Path(folder))
        result = measure(files, batches=batch, threads=threads, repeats=repeats, display=display)
    result = {"artefact": artefact, **result}
    if as_json:
        print_json(result)
        return
    title = f"{artefact}: {threads} thread{'s' * (threads > 1)}, medians of {repeats} calls"
    times = {"runtime": "{runtime}", "batch": "{batch}", "median ms": "{median_ms:.3f}", "p95 ms": "{p95_ms:.3f}"}
    times |= {"images/s": "{images_per_second:,.0f}", f"to {result['against']}": "{speedup:.2f}x"}
    show_table(display, title, times, result["latency"])
    runtimes = [
        {
            **runtime,
            "name": name,
            "file": amount(runtime["file_bytes"]),
            "ratio": result["dense_bytes"] / runtime["file_bytes"],
            "peak": "–" if runtime["peak_bytes"] is None else amount(runtime["peak_bytes"]),
        }
        for name, runtime in result["runtimes"].items()
    ]
    starts = {"runtime": "{name} {version}", "file": "{file}", "dense/file": "{ratio:,.1f}", "peak memory": "{peak}"}
    starts |= {f"{part} s": f"{{{part}_seconds:.3f}}" for part in ("import", "open", "first")}
    starts |= {"difference": "{largest_difference:.1e}"}
    show_table(display, "\nin a process of its own", starts, runtimes)
    for note in result["notes"]:
        echo(note)
