"""The claim, small and real: at 99 % sparsity HARP > HYDRA > one-shot magnitude in accuracy under attack.

    python benchmarks/claim.py [--seeds 1 2 3 4 5] [--jobs 2] [--out runs/claim]

Runs the shipped recipes `fashion/{harp,hydra,hydra-lamp,magnitude}-99` for every seed on the embedded data set: one
pre-training a seed, shared by all methods; the same objective, epochs (one-shot pruning gets the pruning epochs as
fine-tuning), model selection on held-out training images, and one measurement on the 1,000 test images. Nothing is
tuned per method; HARP's γ is paced by the recipe's length. Finished runs are reused, so it can be stopped and repeated.
The last line is one JSON object with every number, its mean and its 95 % interval over seeds (Student's t).
"""

import argparse
import json
import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from harp.confidence import interval
from harp.errors import AT_CHANCE

METHODS = {
    "harp": "HARP",
    "hydra-lamp": "HYDRA + LAMP rates",
    "hydra": "HYDRA",
    "magnitude": "one-shot magnitude",
}


def run(method: str, seed: int, out: Path) -> dict[str, Any]:
    """One recipe with one seed in a process of its own, on one thread; its summary."""
    command = [sys.executable, "-m", "harp", "run", f"fashion/{method}-99", "--out", str(out), "--set", f"seed={seed}"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"}
    began = time.monotonic()
    done = subprocess.run([*command, "--accelerator", "cpu"], env=environment, capture_output=True, text=True)
    if done.returncode not in (0, AT_CHANCE):
        raise SystemExit(f"{method}, seed {seed}: {done.stderr.strip().splitlines()[-1]}")
    artefact = done.stdout.strip().splitlines()[-1].split(maxsplit=1)[1]
    summary = json.loads((Path(artefact).parent / "summary.json").read_text())
    found = {result["name"]: result["value"] for result in summary["results"]}
    before = {result["name"]: result["value"] for result in summary["dense"]}
    kept = sum(layer["kept"] for layer in summary["layers"])
    print(f"seed {seed}  {method:<11} natural {found['natural']:.1%}  robust {found['pgd-20']:.1%}", file=sys.stderr)
    return {
        "method": method,
        "seed": seed,
        "natural": found["natural"],
        "robust": found["pgd-20"],
        "dense_natural": before["natural"],
        "dense_robust": before["pgd-20"],
        "kept": kept,
        "recipe": summary["recipe"],
        "seconds": round(time.monotonic() - began, 1),
    }


def table(runs: list[dict[str, Any]]) -> tuple[str, dict[str, Any]]:
    """The comparison as a Markdown table and as data, dense first."""
    rows = {"dense": [(r["dense_natural"], r["dense_robust"]) for r in runs if r["method"] == "harp"]}
    rows |= {m: [(r["natural"], r["robust"]) for r in runs if r["method"] == m] for m in METHODS}
    kept = {"dense": None} | {m: next(r["kept"] for r in runs if r["method"] == m) for m in METHODS}
    lines = ["| method | weights kept | natural | robust (PGD-20) |", "|---|---|---|---|"]
    data: dict[str, Any] = {}
    for method, pairs in rows.items():
        (natural, n_half), (robust, r_half) = (interval([pair[i] for pair in pairs]) for i in (0, 1))
        count = "all" if kept[method] is None else f"{kept[method]:,}"
        numbers = f"{100 * natural:.1f} ± {100 * n_half:.1f} | {100 * robust:.1f} ± {100 * r_half:.1f}"
        lines.append(f"| {METHODS.get(method, 'dense, adversarially trained')} | {count} | {numbers} |")
        data[method] = {"natural": natural, "natural_half": n_half, "robust": robust, "robust_half": r_half}
    return "\n".join(lines), data


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3, 4, 5])
    parser.add_argument("--jobs", type=int, default=2, help="runs side by side, one thread each")
    parser.add_argument("--out", type=Path, default=Path("runs/claim"))
    arguments = parser.parse_args()

    def one_seed(seed: int) -> list[dict[str, Any]]:
        # One after the other: the first run pre-trains for all of the seed's methods.
        return [run(method, seed, arguments.out) for method in METHODS]

    with ThreadPoolExecutor(arguments.jobs) as pool:
        runs = [result for results in pool.map(one_seed, arguments.seeds) for result in results]
    text, data = table(runs)
    print(f"Fashion-MNIST subset, {len(arguments.seeds)} seeds, mean ± 95 % interval:\n\n{text}\n")
    order = data["harp"]["robust"] > data["hydra"]["robust"] > data["magnitude"]["robust"]
    pairs = {
        f"{a} - {b}": paired(runs, a, b) for a, b in (("harp", "hydra"), ("hydra", "magnitude"), ("harp", "hydra-lamp"))
    }
    for name, pair in pairs.items():
        print(f"{name}: {100 * pair['mean']:.1f} ± {100 * pair['half']:.1f} points, ahead on {pair['wins']} seeds")
    print(json.dumps({"order_holds": order, "paired_robust": pairs, "methods": data, "runs": runs}))


def paired(runs: list[dict[str, Any]], first: str, second: str) -> dict[str, float]:
    """The difference in robust accuracy of two methods, seed by seed: they share the seed's pre-trained network."""
    values = {(run["method"], run["seed"]): run["robust"] for run in runs}
    differences = [values[first, seed] - values[second, seed] for method, seed in values if method == first]
    mean, half = interval(differences)
    return {"mean": mean, "half": half, "wins": sum(difference > 0 for difference in differences)}


if __name__ == "__main__":
    main()
