"""The command `harp export`."""

from pathlib import Path
from typing import Annotated, Any

from typer import Argument, Option

from harp.cli import options
from harp.cli.output import echo, print_json, show_table


def export(
    target: Annotated[str, Argument(help="A run's folder, or a model as in `harp evaluate`.")],
    to: Annotated[list[str], Option(help="sparse, onnx, safetensors or torch-export; may be repeated.")],
    out: Annotated[Path | None, Option(help="Folder for the files; default: RUN/export, or export/MODEL.")] = None,
    values: Annotated[str, Option(help="How the sparse file stores kept weights: f16, f32 or int8.")] = "f16",
    dense: Annotated[bool, Option("--dense", help="Keep dead channels in ONNX and torch-export.")] = False,
    check: Annotated[bool, Option("--check", help="Measure natural and PGD-20 accuracy in every coding.")] = False,
    examples: Annotated[int | None, Option(min=1, help="Test images for --check; default: as the run.")] = None,
    data: options.ModelData = None,
    data_dir: options.DataDir = None,
    weights: options.Weights = None,
    size: options.Size = None,
    normalize: options.Normalize = None,
    as_json: options.Json = False,
) -> None:
    """Write a network for elsewhere, and prove in a fresh process that every file answers like the network.

    sparse is a small file with the kept weights only: `harp.load` runs it, fast and without torch. onnx is for ONNX
    Runtime and its like, torch-export for `torch.export.load`; both are without the channels that change no answer,
    unless --dense. safetensors is the plain state_dict.

    A file is there only once it has passed its check. manifest.json beside the files says what they are: architecture,
    budget, accuracy, sizes, checksums, errors.

    Example: harp export runs/mine-0123456789ab --to sparse --to onnx --check --examples 1000
    """
    from harp.deploy.export import formats, source, write
    from harp.system.progress import Terminal

    display = Terminal()
    formats.check(to)
    exported = source.of_target(
        target, data, data_dir, weights, display, needs_data=check, size=size, normalize=normalize
    )
    folder = out or (Path(target) / "export" if Path(target).is_dir() else Path("export", Path(target).name))
    manifest = write.export(
        exported, folder, to, values=values, dense=dense, check=check, examples=examples, display=display
    )
    if as_json:
        print_json(manifest)
        return
    rows = [_row(name, entry) for name, entry in manifest["files"].items()]
    heads = ("file", "bytes", "of dense", "error", "deviation", "")
    display.table(f"{exported.name}: {exported.dense_bytes:,} bytes dense", heads, rows)
    if "codings" in manifest:
        columns = {"values": "{values}", "test": "{name}", "accuracy": "{value:.2%}"}
        columns |= {"95 % interval": "{low:.2%} – {high:.2%}", "n": "{n:,}"}
        show_table(display, "\naccuracy with the values of each coding", columns, manifest["codings"])
    echo(f"written   {folder} (manifest.json says what is there)")


def _row(name: str, entry: dict[str, Any]) -> list[str]:
    remarks = [f"{key} {entry[key]}" for key in ("values", "opset") if key in entry]
    remarks += [f"without {entry['removed']}"] if "removed" in entry else []
    ratio = f"1/{entry['ratio']:,.1f}" if entry["ratio"] >= 1 else f"{1 / max(entry['ratio'], 0.01):,.1f}"
    deviation = f"{entry['deviation']:.1e}" if "deviation" in entry else "–"
    return [name, f"{entry['bytes']:,}", ratio, f"{entry['check']['error']:.1e}", deviation, "; ".join(remarks)]
