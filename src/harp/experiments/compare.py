"""Comparing methods: every run of a study in a process of its own, then tables from the results of all runs.

    ROOT/compare-<study>-<hash>/   table.md results.json robust.png robust.svg recipes/*.yaml logs/*.log
                                   jobs.json jobs/*.sh jobs/*.state  (as jobs of a scheduler)

The runs are ordinary ones in ROOT: they share stages, resume where they stopped, and other studies use them too.
"""

import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import takewhile
from pathlib import Path
from typing import Any

from harp import __version__
from harp.errors import RecipeError
from harp.evaluation import score
from harp.experiments import build, dense_baseline, pool, run_folder, table
from harp.experiments import stages as pipeline
from harp.experiments.recipe import Recipe, Stage, parse
from harp.experiments.slurm import Job
from harp.experiments.study import DENSE, SMALL, Method, Study, slug
from harp.pruning.methods import PRUNERS
from harp.system import files
from harp.system.distributed import fabric
from harp.system.interrupt import Stop
from harp.system.progress import Quiet


@dataclass(frozen=True)
class Entry:
    """A run of the comparison."""

    name: str
    method: str  # its label
    keep: float | None  # None: the dense network that others begin with
    recipe: Recipe
    folders: tuple[Path, ...]  # of its results: several if another machine chooses the precision
    after: str | None = None  # the entry that trains the network that this one begins with

    @property
    def folder(self) -> Path:
        """The folder of its results, finished or not."""
        return next((folder for folder in self.folders if self._is_finished(folder)), self.folders[0])

    def finished(self) -> bool:
        """Whether its results are there, measured as its recipe says."""
        return self._is_finished(self.folder)

    def _is_finished(self, folder: Path) -> bool:
        recipe = folder / "recipe.yaml"
        if not (folder / "summary.json").exists():
            return False
        same = recipe.is_file() and recipe.read_text("utf-8", "replace") == self.recipe.to_yaml()
        return same or not run_folder.content_of(folder)  # another recipe is no error, a damaged one is

    def dense(self) -> list[Stage]:
        """Its stages before anything is pruned."""
        return list(takewhile(lambda stage: stage.pruner["name"] == "dense", self.recipe.stages))

    def shared(self) -> int:
        """The number of its first stages that are pre-training, which other entries may share."""
        dense = self.dense()
        return len(dense) if len(dense) < len(self.recipe.stages) else 0

    def start(self) -> str:
        """The hash of these stages: the same for all entries that begin with the same network."""
        return self.recipe.identity(len(self.dense()))

    def epochs(self) -> list[int]:
        """The epochs of pre-training and of each stage after it."""
        lengths, shared = [stage.epochs for stage in self.recipe.stages], self.shared()
        return [sum(lengths[:shared]), *lengths[shared:]] if shared else [sum(lengths)]


class Comparison:
    """A study with its data and model: the recipe of every run is checked before anything runs.

    Arguments:
        study: what is compared: of `harp.load_study`.
        root: the folder of the runs.
        data_dir: where the data is.
        display: shows the progress.
        workers: processes that decode images for each training process.
        elsewhere: the runs are made on machines whose GPUs are not known.

    Example:
        study = harp.load_study("digits", methods="harp,magnitude", seeds="0")
        results = harp.Comparison(study, "runs").execute(jobs=2)
    """

    def __init__(
        self,
        study: Study,
        root: str | Path,
        *,
        data_dir: Path | None = None,
        display: Quiet | None = None,
        workers: int | None = None,
        elsewhere: bool = False,
    ) -> None:
        base, root = study.recipe, Path(root)
        self.study, self.root, self.data_dir, self.workers = study, root, data_dir, workers
        self.display = display or Quiet()
        if base.units.budget == "latency":
            raise RecipeError("units.budget is latency, which every run measures again: compare under flops or macs")
        self.attack = build.attack_of(study.rank_by, build.threat(base))[0]
        self.protocol = pipeline.PROTOCOLS[study.protocol]
        self.content = base.model_dump(mode="json", exclude_defaults=True)
        self.parts = pipeline.parts(self.content["stages"])
        if DENSE in [method.name for method in study.methods] and not self.parts.pretrain and not base.model.weights:
            raise RecipeError("there is no dense network to show: the recipe has no dense stage and no model.weights")
        self.data = base.data.load(data_dir, display=self.display)
        self.units = build.units_of(base.units, build.build(base.model, self.data, base.model.weights), self.data)
        self.size = self.units.size
        self.contents = run_folder.contents(base, self.data)
        self.precisions = fabric.possible(base.precision) if elsewhere else (fabric.resolve(base.precision),)
        self.entries = self._entries()
        text = json.dumps([(entry.folders[0].name, entry.recipe.to_yaml()) for entry in self.entries])
        self.folder = root / f"compare-{study.name}-{hashlib.sha256(text.encode()).hexdigest()[:12]}"

    def _entries(self) -> list[Entry]:
        """The pre-trainings that are needed, then the runs seed by seed, so that results of the first come early."""
        budgets = [(method, keep) for keep in self.study.keep for method in self.study.methods if method.name != DENSE]
        planned = [(method.label, keep, *self._planned(method, keep)) for method, keep in budgets]
        first: list[Entry] = []
        runs: list[Entry] = []
        for seed in self.study.seeds:
            entries = [self._entry(label, keep, seed, stages, model) for label, keep, stages, model in planned]
            starts = self._pretrainings(seed, entries)
            first += starts.values()
            runs += [replace(entry, after=starts[entry.start()].name) if entry.shared() else entry for entry in entries]
        return [*first, *runs]

    def _pretrainings(self, seed: int, entries: Sequence[Entry]) -> dict[str, Entry]:
        """The dense networks that runs begin with, by the hash of their stages: the recipe's, then those of methods."""
        model, starts = self.content["model"], dict[str, Entry]()
        needed = {entry.start() for entry in entries if entry.shared()}
        if self.parts.pretrain:
            dense = [{**stage, "pruner": "dense"} for stage in self.parts.pretrain]
            start = self._entry(DENSE, None, seed, dense, model)
            if start.start() in needed or DENSE in [method.name for method in self.study.methods]:
                starts[start.start()] = start
        for entry in entries:
            if entry.shared() and entry.start() not in starts:
                dense = [stage.model_dump(mode="json", exclude_defaults=True) for stage in entry.dense()]
                starts[entry.start()] = self._entry(f"{DENSE} ({entry.method})", None, seed, dense, model)
        return starts

    def _planned(self, method: Method, keep: float) -> tuple[list[dict[str, Any]], dict[str, Any]]:
        """The stages and the model of a method at a budget, checked as far as possible without training."""
        total = self.units.total(keep)
        if method.name == SMALL:
            width = dense_baseline.width(self.study.recipe, self.data, total)
            return self.parts.dense(), dense_baseline.part(self.study.recipe, width)
        pruner = method.pruner(keep)
        PRUNERS[method.name](self.units, **{key: value for key, value in pruner.items() if key != "name"})
        stages = self.protocol.stages(self.parts, pruner, self.content.get("objective"))
        pipeline.check_learns(method.label, method.name, stages)
        return stages, self.content["model"]

    def _entry(
        self, label: str, keep: float | None, seed: int, stages: Sequence[dict[str, Any]], model: dict[str, Any]
    ) -> Entry:
        sparsity = "" if keep is None else f"-{100 * (1 - keep):.10g}"
        name = f"{self.study.name}-{slug(label)}{sparsity}"
        content = {**self.content, "name": name, "description": "", "seed": seed, "stages": stages, "model": model}
        made = parse(content)
        same = made.model.weights == self.study.recipe.model.weights
        contents = self.contents if same else run_folder.contents(made, self.data)
        hashes = [run_folder.computed_in(contents, precision) for precision in self.precisions]
        folders = tuple(self.root / run_folder.name(made, each) for each in hashes)
        return Entry(f"{name}-seed{seed}", label, keep, made, folders)

    def execute(
        self, jobs: int = 1, start: pool.Start | None = None, *, devices: int = 1, stop: Stop | None = None
    ) -> dict[str, Any]:
        """Do the runs that are not finished, `jobs` at a time, then write and return the results of all.

        A time limit of `stop` is passed on to the runs, which know best how long it takes them to save and end.
        """
        if jobs < 1:
            raise RecipeError(f"jobs {jobs}: give at least 1")
        entries = {entry.name: entry for entry in self.entries}
        self.write_recipes()

        def harp_run(name: str) -> pool.Process:
            left = math.inf if stop is None else max(1.0, stop.left())
            command = self._command(entries[name], devices, None if left == math.inf else left / 60)
            return pool.start(command, self._log(entries[name]), jobs * devices)

        tasks = [pool.Task(entry.name, entry.after) for entry in self.entries if not entry.finished()]
        failed = pool.work(tasks, start or harp_run, jobs, self.display, len(self.entries), stop)
        return self.collect(failed)

    def _command(self, entry: Entry, devices: int, minutes: float | None = None) -> tuple[str, ...]:
        data_dir = None if self.data_dir is None else self.data_dir.absolute()
        recipe, root = self._recipe(entry).absolute(), self.root.absolute()
        return pool.harp_run(recipe, root, data_dir, devices=devices, workers=self.workers, minutes=minutes)

    def jobs(self, devices: int = 1) -> list[Job]:
        """The runs as jobs for a scheduler; they read the files of `write_recipes`."""
        return [
            Job(entry.name, self._command(entry, devices), self._log(entry).absolute(), entry.finished, entry.after)
            for entry in self.entries
        ]

    def collect(self, failed: Mapping[str, str]) -> dict[str, Any]:
        """Write and return the results of all runs, with the failures."""
        return self.write([self.record(entry, failed.get(entry.name)) for entry in self.entries])

    def write_recipes(self) -> None:
        """Write the recipe of every run."""
        for entry in self.entries:
            files.write_text(self._recipe(entry), entry.recipe.to_yaml())

    def _recipe(self, entry: Entry) -> Path:
        return self.folder / "recipes" / f"{entry.name}.yaml"

    def _log(self, entry: Entry) -> Path:
        return self.folder / "logs" / f"{entry.name}.log"

    def record(self, entry: Entry, failure: str | None) -> dict[str, Any]:
        """The results of a run, from its files."""
        facts: dict[str, Any] = {"name": entry.name, "method": entry.method, "keep": entry.keep}
        facts |= {"seed": entry.recipe.seed, "folder": entry.folder.name, "epochs": entry.epochs(), "failed": None}
        if failure is not None:
            log = self._log(entry)
            lines = log.read_text("utf-8", "replace").split("\n") if log.exists() else []
            texts = [line.strip() for line in lines if line.strip()]
            return facts | {"failed": texts[-1] if texts else failure}
        run = run_folder.read(entry.folder)
        known, natural, robust = run.summary, run.result("natural"), run.result(self.attack)
        # The time of a stage is not known if the run was moved away from its stages.
        seconds = [(stage.facts or {}).get("seconds") or 0.0 for stage in run.stages]
        return facts | {
            "recipe": known["recipe"],
            "kept": run_folder.budget_of(known)["kept"],
            "natural": natural["value"],
            "robust": robust["value"],
            "seconds": sum(seconds[entry.shared() :]),
            "epsilon": score.epsilon_text(robust),
            "dense": {result["name"]: result["value"] for result in known.get("dense", ())},
            "versions": natural.get("versions", {}),
            "at_chance": known.get("at_chance", False),
            "budget_met": known.get("budget_met", True),
            "warnings": known.get("warnings", []),
        }

    def write(self, records: list[dict[str, Any]]) -> dict[str, Any]:
        """Write the results of all runs and their tables."""
        if self.study.recipe.model.weights is not None and not self.parts.pretrain:
            records = [*self._given(records), *records]
        epsilon = next((record["epsilon"] for record in records if record["failed"] is None), "–")
        title = self.attack if epsilon == "–" else f"{self.attack}, ε {epsilon}"
        outcome = table.Results(
            {
                "study": self.study.name,
                "description": self.study.description,
                "harp": __version__,
                "data": self.data.name,
                "source": self.data.source,
                "model": self.study.recipe.model.name,
                "size": self.size,
                "unit": self.units.noun,
                "seeds": list(self.study.seeds),
                "attack": title,
                "rank_by": self.attack,
                "protocol": self.study.protocol,
                "protocol_meaning": self.protocol.meaning,
                "measure": "balanced accuracy" if self.data.balanced else "accuracy",
                "rows": table.rows(records),
                "runs": records,
            }
        )
        files.write_json(self.folder / "results.json", outcome)
        files.write_text(self.folder / "table.md", table.markdown(outcome))
        return outcome

    def _given(self, records: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
        """Records of the recipe's weights file: not trained here, but measured at the start of each run."""
        before = {record["seed"]: record for record in records if record["failed"] is None and record["dense"]}
        facts = {"method": DENSE, "keep": None, "failed": None, "epochs": [0], "seconds": 0.0, "kept": self.size}
        return [
            {
                **facts,
                **{key: record[key] for key in ("seed", "folder", "epsilon", "versions")},
                "name": f"{self.study.name}-{DENSE}-seed{seed}",
                "natural": record["dense"]["natural"],
                "robust": record["dense"][self.attack],
            }
            for seed, record in before.items()
        ]
