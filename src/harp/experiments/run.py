"""Running a recipe: its stages one after the other, each in a folder named by the hash of all that produced it.

    ROOT/stages/<hash>-<name>/   recipe.yaml metrics.jsonl state.pt model.safetensors masks.safetensors stage.json
    ROOT/<recipe>-<hash>/        recipe.yaml places.json model.safetensors masks.safetensors results/*.json summary.json

Pruned channels are cut out right after the stage that chose them: what follows trains, measures and saves the small
network, and `slim.json` beside its weights says what was cut.

Recipes with the same first stages share them, a finished stage is never trained again, and an interrupted one resumes
from its last state, bit for bit.
"""

import hashlib
import logging
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from harp.attacks import Attack
from harp.data import registry
from harp.data.batches import Batches
from harp.data.decodable import Corrupt, readable
from harp.data.streaming.workers import default_workers
from harp.errors import DiskError, Diverged, Interrupted, RecipeError
from harp.evaluation import accuracy_drop, chance_level
from harp.evaluation import score as evaluate
from harp.evaluation.accuracy import Subject
from harp.evaluation.results import Audit
from harp.experiments import artefact, build, energy, run_folder
from harp.experiments.places import Places
from harp.experiments.recipe import Recipe, Stage
from harp.models.weights import fingerprint, load_weights
from harp.pruning import macs, masks, methods, schedules
from harp.pruning.channels import Channels, Cut, Latency
from harp.pruning.channels.compact import Compacted, compacted, spread_back
from harp.pruning.masks import Masks
from harp.pruning.units import Units, Weights
from harp.system import files
from harp.system.distributed import affinity, environment, peers
from harp.system.distributed import fabric as engine
from harp.system.interrupt import Stop, insist
from harp.system.progress import Quiet
from harp.system.seeds import derive
from harp.system.states import States
from harp.training import loop, objectives
from harp.training.base import Objective
from harp.training.checkpointing import Keeper
from harp.training.metrics import MetricsFile

if TYPE_CHECKING:
    from lightning_fabric import Fabric

logger = logging.getLogger("harp")

_NOT_IN_SUMMARY = ("kind", "classes", "network", "images", "seconds", "parts", "during")  # keys of a result


@dataclass
class Outcome:
    """The results of a run."""

    folder: Path
    model: nn.Module
    masks: Masks | None
    units: Units  # of the network before any cut
    results: list[dict[str, Any]]  # of the finished network
    dense: list[dict[str, Any]]  # of the network before pruning

    def __repr__(self) -> str:
        tests = ", ".join(f"{result['name']} {result['value']:.1%}" for result in self.results)
        return f"Outcome({self.folder}: {tests})"

    def _repr_html_(self) -> str:
        return run_folder.results_table(self.folder.name, self.dense, self.results)


class Run:
    """A recipe with its data, model and limits: everything is built and checked before anything is written.

    Arguments:
        recipe: what `harp.load_recipe` gives.
        root: the folder that run folders are in.
        data_dir: where data sets are.
        source: the data set, if it is loaded already.
        display: shows progress; nothing by default.
        fabric: what `harp.launch` gives; by default one process on the best device.
        minutes: how often a state is saved.
        keep_states: how many states are kept.
        stop: asks the run to stop; by default signals do.
        workers: processes that decode streamed images, None: as many as there are cores.

    Example:
        run = harp.Run(harp.load_recipe("demo"), pathlib.Path("runs"))
        outcome = run.execute()
        print(outcome.folder, outcome.results)
    """

    def __init__(
        self,
        recipe: Recipe,
        root: Path,
        *,
        data_dir: Path | None = None,
        source: registry.DataSet | None = None,
        display: Quiet | None = None,
        fabric: "Fabric | None" = None,
        minutes: float = 10.0,
        keep_states: int = 2,
        stop: Stop | None = None,
        workers: int | None = None,
    ) -> None:
        self.recipe, self.root, self.minutes, self.keep_states = recipe, root, minutes, keep_states
        self.display, self.stop = display or Quiet(), stop or Stop()
        self.fabric = fabric if fabric is not None else engine.launch(recipe.precision)
        self.peers = peers.of_this_run()
        self.peers.listen(self.stop)
        self.data = source or recipe.data.load(data_dir, display=self.display)
        self.places = Places.of(
            recipe, data_dir, has_files=source is None and not registry.is_shipped(recipe.data.name)
        )
        sharers = affinity.sharers(self.peers.gather)
        self.workers = default_workers(sharers) if workers is None else workers
        count = recipe.data.held(len(self.data.train))
        self.train, self.held = registry.holdout(self.data.train, count, derive(recipe.seed, "holdout"))
        if recipe.data.train is not None:
            self.train = registry.draw(self.train, recipe.data.train, derive(recipe.seed, "train"))
        bar = self.display.counting("held-out images", len(self.held))
        self.held = readable(self.held, self.display.count, self.workers, bar).split
        torch.manual_seed(derive(recipe.seed, "model"))
        self.model = build.build(recipe.model, self.data, recipe.model.weights)
        precision = engine.resolve(recipe.precision, self.fabric.device.type)
        self.contents = run_folder.computed_in(run_folder.contents(recipe, self.data), precision)
        self.units = self._units()
        self.dense_cost = macs.cost(self.model, self.data.shape, {})
        self.cut: Cut | None = None  # the channels that were cut out of the model
        self.total: int | None = None  # the last budget of the stages
        for stage in recipe.stages:
            if stage.pruner["name"] != "fixed":
                pruner = self.pruner(stage, None)  # wrong options are an error now, not after pre-training
                self.total = pruner.total if "keep" in stage.pruner else self.total
        size = sum(value.numel() * value.element_size() for value in self.model.state_dict().values())
        # All states and the next one, each with weights, latents, momentum and the best epoch so far.
        _check_writable(root, 6 * (keep_states + 1) * size)

    def _units(self) -> Units:
        """The units to prune. Latencies are measured once in a run: a resumed run and all ranks use the same ones."""
        pruning = [number for number, stage in enumerate(self.recipe.stages) if stage.prunes]
        measured = self.recipe.units.budget == "latency" and bool(pruning)
        file = self.stage_folder(pruning[0]) / "latency.json" if measured else None
        latency = Latency.from_dict(files.read_json(file)) if file is not None and file.exists() else None
        units = build.units_of(self.recipe.units, self.model, self.data, latency)
        if file is None or latency is not None or self.fabric.world_size == 1 or not isinstance(units, Channels):
            return units
        first = self.fabric.broadcast(units.latency.as_dict() if units.latency is not None else {})
        return build.units_of(self.recipe.units, self.model, self.data, Latency.from_dict(first))

    def folder(self) -> Path:
        """The folder of the results."""
        return self.root / run_folder.name(self.recipe, self.contents)

    def stage_folder(self, number: int) -> Path:
        """The folder of a stage; number -1 is the network before the first stage."""
        name = self.recipe.stages[number].name if number >= 0 else "start"
        return self.root / "stages" / f"{self.recipe.identity(number + 1, *self.contents)}-{name}"

    def execute(self) -> Outcome:
        """Train what is not trained yet, evaluate, and write the results."""
        with self.stop.on_signals():
            answer: Masks | None = None
            dense: list[dict[str, Any]] = []
            for number, stage in enumerate(self.recipe.stages):
                if stage.pruner["name"] != "dense" and not dense:
                    dense = self.evaluate(self.stage_folder(number - 1))
                    if self._starts_trained:
                        accuracies = ", ".join(f"{result['name']} {result['value']:.1%}" for result in dense)
                        self.display.note(f"before pruning: {accuracies} on the test set")
                answer = self.stage(number, stage, answer)
            results = self.evaluate(self.stage_folder(len(self.recipe.stages) - 1), self.folder() / "evaluation")
        outcome = Outcome(self.folder(), self.model, answer, self.units, results, dense)
        if self.fabric.is_global_zero:
            insist(lambda: self.write(outcome), stop=self.stop)
        return outcome

    @property
    def _starts_trained(self) -> bool:
        """Whether the network before pruning is trained or given."""
        return not self.recipe.stages[0].prunes or self.recipe.model.weights is not None

    # Stages

    def stage(self, number: int, stage: Stage, before: Masks | None) -> Masks | None:
        """Do a stage, or load its result if it is finished, and cut pruned channels out; return its masks."""
        folder = self.stage_folder(number)
        if self._finished(folder) or not self._train_alone(number, stage, before, folder):
            self._remove_states(folder)
            self.display.note(f"{stage.name}: done before, taken from {folder}")
            load_weights(self.model, folder / "model.safetensors")
            if self.fabric.is_global_zero and (warning := self._budget_warning(number)):
                logger.warning(warning)
        path = folder / "masks.safetensors"
        answer = masks.load(path) if path.exists() else None
        if isinstance(self.units, Channels) and answer is not None and self.cut is None:
            self.cut = self.units.cut(answer)
            self.model = self.units.slim(self.model, answer)
        return answer

    def _finished(self, folder: Path) -> bool:
        """Whether a stage is finished; all ranks use the answer of rank 0."""
        return bool(self.fabric.broadcast((folder / "stage.json").exists()))

    def _remove_states(self, folder: Path) -> None:
        """Remove the states of a process that was killed after it had finished the stage."""
        lock, states = folder.with_name(f"{folder.name}.lock"), States(folder / "state.pt")
        if self.fabric.is_global_zero and (lock.exists() or states.paths()):
            with files.lock(lock, self._stop_waiting):
                states.remove()

    def _train_alone(self, number: int, stage: Stage, before: Masks | None, folder: Path) -> bool:
        """Train a stage under a lock. False: another process had the lock and has finished the stage."""
        with ExitStack() as stack:
            if self.fabric.is_global_zero:
                stack.enter_context(files.lock(folder.with_name(f"{folder.name}.lock"), self._waiting(stage)))
            self.peers.meet(self._stop_waiting)
            if self._finished(folder):
                return False
            self.train_stage(number, stage, before, folder)
        return True

    def _waiting(self, stage: Stage) -> Callable[[], None]:
        """Called again and again while another process has the lock: says so once."""
        noted = False

        def wait() -> None:
            nonlocal noted
            if not noted:
                self.display.note(f"{stage.name}: another process is training it, waiting for that")
            noted = True
            self._stop_waiting()

        return wait

    def _stop_waiting(self) -> None:
        if self.stop.signal is not None:
            raise Interrupted("stopped while waiting for another process; nothing is lost", self.stop.signal)

    def train_stage(self, number: int, stage: Stage, before: Masks | None, folder: Path) -> None:
        """Train a stage from its last state, or from its beginning, and write its result."""
        _make_folder(folder)
        if isinstance(self.units, Channels) and self.units.latency is not None and self.fabric.is_global_zero:
            files.write_json(folder / "latency.json", self.units.latency.as_dict())
        pruner = self.pruner(stage, before)
        total = self.total if self.cut else pruner.total
        state, every, keep = folder / "state.pt", self.minutes, self.keep_states
        keeper = Keeper(state, self.stop, of=folder.name, minutes=every, keep=keep, fabric=self.fabric)
        log = MetricsFile(folder)
        with self._compacted(stage, before) as left:
            if left is not None:
                part = self.recipe.units
                pruner = methods.Fixed(Weights(left.model, ignore=part.ignore, include=part.include), left.masks)
            fitted, energy_used = self.fit_stage(number, stage, pruner, keeper, log)
        if self.fabric.is_global_zero:
            answer = None if stage.pruner["name"] == "dense" else fitted.masks
            if self.cut is not None or left is not None:
                answer = before
            facts = {"stage": stage.name, "epochs": stage.epochs, "chosen_epoch": fitted.epoch}
            facts |= {"seconds": round(fitted.seconds, 1), "energy": energy_used, "history": fitted.history}
            if stage.prunes:
                facts["budget_met"] = fitted.met
                self.warn_of_chance(number, fitted)
            insist(lambda: self._write_stage(folder, answer, total, facts), stop=self.stop)
            keeper.states.remove()
            log.close()
        self.fabric.barrier()

    def _write_stage(self, folder: Path, answer: Masks | None, total: int | None, facts: dict[str, Any]) -> None:
        artefact.save(folder, self.model, answer, total, self.units, self.cut)
        files.write_text(folder / "recipe.yaml", self.recipe.to_yaml())
        files.write_json(folder / "stage.json", facts)

    @contextmanager
    def _compacted(self, stage: Stage, before: Masks | None) -> Iterator[Compacted | None]:
        """Train with fixed masks without the channels that they make useless, if that is faster."""
        if stage.pruner["name"] != "fixed" or stage.compact is False or self.cut is not None or before is None:
            yield None
            return
        whole = self.model
        left = compacted(whole, build.noise_of(self.data), before, self.dense_cost["macs"], self.display.note)
        self.model = whole if left is None else left.model
        yield left
        if left is not None:
            spread_back(whole, self.model, left.cut)
            self.model = whole

    def fit_stage(
        self, number: int, stage: Stage, pruner: methods.Pruner, keeper: Keeper, log: MetricsFile
    ) -> tuple[loop.Fitted, dict[str, Any]]:
        """Train the model; return the result and the energy that it took."""
        recipe, settings, seed = self.recipe, stage.optimizer, derive(self.recipe.seed, "stage", number)
        corrupt = Corrupt(len(self.train), recipe.data.corrupt, log.path.with_name("corrupt.txt"))
        augment = build.augmentation(recipe.data, self.train, self.data.flip)
        batches = Batches(
            self.train, recipe.data.batch, seed=seed, augment=augment, workers=self.workers, corrupt=corrupt
        )
        objective = objectives.made(recipe.stage_objective(stage))
        criterion = "natural" if objective.judge() is None else "robust"
        shown = self.display.training(stage.name, stage.epochs, len(batches))
        with _advice(stage, keeper), shown, self.meter() as meter:
            fitted = loop.fit(
                self.model,
                batches,
                objective,
                pruner,
                epochs=stage.epochs,
                lr=settings.lr,
                momentum=settings.momentum,
                weight_decay=settings.weight_decay,
                optimizer=build.optimizer(settings),
                schedule=schedules.from_recipe(settings.schedule),
                accumulate=stage.accumulate,
                seed=seed,
                validate=partial(self.validate, objective),
                select=criterion if stage.select == "best" else None,
                on_step=self.after_step,
                on_epoch=partial(self._after_epoch, log, corrupt),
                keeper=keeper,
                sync_norms=recipe.sync_norms,
                fabric=self.fabric,
            )
        return fitted, meter.over(fitted.seconds)

    def after_step(self, record: dict[str, Any]) -> None:
        """Called after each step of a training."""
        self.display.step(record)

    def _after_epoch(self, log: MetricsFile, corrupt: Corrupt, record: dict[str, Any]) -> None:
        """Log an epoch, and the undecodable images that other processes have found."""
        if self.fabric.is_global_zero:
            corrupt.catch_up()
            log.write(record)
        self.display.epoch(record)

    def meter(self) -> energy.Meter:
        """A meter of the energy that a stage takes, on all machines."""
        place = environment.here()
        nodes = 1 if place is None else place.nodes
        return energy.Meter(watts=energy.assumed(self.fabric.device.type, self.fabric.world_size, nodes), nodes=nodes)

    def pruner(self, stage: Stage, before: Masks | None) -> methods.Pruner:
        """The stage's pruner on this run's model."""
        if stage.pruner["name"] == "fixed" and self.cut is not None:
            return methods.Dense(Weights(self.model))  # the pruned channels are gone
        seed = derive(self.recipe.seed, "pruner", self.recipe.stages.index(stage))
        return build.pruner(stage, self.units, before, seed)

    # Evaluation

    def validate(self, objective: Objective) -> dict[str, float]:
        """Accuracy on the held-out images, natural and under the attack that is trained against."""
        accuracies = {"natural": self._held_accuracy(None)}
        if (judge := objective.judge()) is not None:
            accuracies["robust"] = self._held_accuracy(judge)
        return accuracies

    def _held_accuracy(self, attack: Attack | None) -> float:
        images, labels, seed = self.held.images, self.held.labels, self.recipe.seed
        score = evaluate.accuracy(
            self.model, images, labels, attack=attack, seed=seed, peers=self.peers, progress=lambda done, total: None
        )
        return score.balanced_accuracy if self.data.balanced else score.accuracy

    def evaluate(self, folder: Path, *measured: Path) -> list[dict[str, Any]]:
        """Measure the model on the test set; results that are in its stage's or another folder are not repeated."""
        ball, part = build.threat(self.recipe), self.recipe.evaluate
        audit = Audit(
            Subject(self.model, self.data, ball, measured=measured),
            folder,
            examples=part.examples,
            seed=self.recipe.seed,
            display=self.display,
            stop=self.stop,
            peers=self.peers,
        )
        attacks = [build.attack_of(attack, ball) for attack in part.attacks]
        return [self._result(name, attack, audit, folder) for name, attack in [("natural", None), *attacks]]

    def _result(self, name: str, attack: Attack | None, audit: Audit, folder: Path) -> dict[str, Any]:
        conditions = hashlib.sha256(f"{attack!r}/{audit.examples}/{audit.seed}".encode()).hexdigest()[:8]
        path = folder / f"test-{name}-{conditions}.json"  # of an older version
        known = self.peers.first(files.read_json(path) if path.exists() else None)
        if known is not None:
            return known
        return {key: value for key, value in audit.under(name, attack).items() if key not in _NOT_IN_SUMMARY}

    # Results

    def histories(self) -> dict[str, list[dict[str, Any]]]:
        """The records of every finished stage, one an epoch."""
        folders = {stage.name: self.stage_folder(n) for n, stage in enumerate(self.recipe.stages)}
        return {name: run_folder.stage_facts(folder).get("history", []) for name, folder in folders.items()}

    def write(self, outcome: Outcome) -> None:
        """Write the folder of the results: the network, and all numbers."""
        folder, recipe = outcome.folder, self.recipe
        _make_folder(folder / "results")
        (folder / "summary.json").unlink(missing_ok=True)  # it is there only if all other files belong to it
        artefact.save(folder, self.model, outcome.masks, self.total, self.units, self.cut)
        files.write_text(folder / "recipe.yaml", recipe.to_yaml())
        self.places.write(folder)
        identity = recipe.identity(len(recipe.stages), *self.contents)
        for result in outcome.results:
            files.write_json(folder / "results" / f"{result['name']}.json", {"recipe": identity, **result})
        cost = macs.cost(self.model, self.data.shape, outcome.masks if self.cut is None else {})
        summary: dict[str, Any] = {
            "recipe": identity,
            "name": recipe.name,
            "source": self.data.source,
            "data": run_folder.facts_of(self.data),
            "stages": [str(self.stage_folder(n).relative_to(self.root)) for n in range(len(recipe.stages))],
            "network": fingerprint(self.model),
            "cost": cost if self.cut is None else macs.reduced(self.dense_cost, cost),
            "budget": artefact.budget(self.units, outcome.masks, self.total),
            "results": outcome.results,
            "dense": outcome.dense,
            "layers": artefact.layers(self.units, outcome.masks),
        }
        files.write_json(folder / "summary.json", summary | self._warnings(outcome))

    def _warnings(self, outcome: Outcome) -> dict[str, Any]:
        """What a reader has to be warned of: as facts, and as one sentence each."""
        chance = chance_level.warning(outcome.results, outcome.dense, self._starts_trained)
        drop = accuracy_drop.warning(outcome.results, outcome.dense)
        first = chance or drop
        if first is not None and drop is not None:
            first = f"{first} {self._what_to_try()}"
        unmet = [text for number in range(len(self.recipe.stages)) if (text := self._budget_warning(number))]
        texts = [*([] if first is None else [first]), *unmet]
        return {"at_chance": chance is not None, "budget_met": not unmet, "warnings": texts}

    def _what_to_try(self) -> str:
        """Advice after a large drop, with the settings of this run."""
        epochs = sum(stage.epochs for stage in self.recipe.stages if stage.pruner["name"] == "fixed")
        pruner = next((stage.pruner for stage in self.recipe.stages if "keep" in stage.pruner), {})
        keep = f"a larger keep ({100 * pruner['keep']:.3g} % now), " if "keep" in pruner else ""
        return f"Try more epochs of fine-tuning ({epochs} now), {keep}or another method or strategy."

    def _budget_warning(self, number: int) -> str | None:
        """The warning of a finished stage that did not meet its budget in training."""
        stage = self.recipe.stages[number]
        facts = run_folder.stage_facts(self.stage_folder(number))
        history = facts.get("history", [])
        ready = not history or any(record.get("ready", True) for record in history)  # in files of older versions
        return None if facts.get("budget_met", ready) else loop.budget_warning(history, stage.name)

    def warn_of_chance(self, number: int, fitted: loop.Fitted) -> None:
        """Warn at once if the network is at chance level on the held-out images after a pruning stage."""
        if not fitted.history:
            return
        value = fitted.history[fitted.epoch - 1]["natural"]
        totals = torch.bincount(self.held.labels.cpu().long(), minlength=self.data.num_classes).tolist()
        if chance_level.at_chance(value, totals, self.data.balanced):
            more = "; fine-tuning may recover it" if number + 1 < len(self.recipe.stages) else ""
            chance = f"({value:.1%} of {self.data.num_classes} classes)"
            logger.warning("after pruning the network answers at chance level %s%s", chance, more)


def _make_folder(path: Path) -> None:
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise DiskError(f"can't make the folder {path}: {error.strerror}", full=files.full(error)) from error


def _check_writable(root: Path, needed: int) -> None:
    """Refuse an output folder without access or space before hours of work; write nothing."""
    folder = files.existing(root)
    if not folder.is_dir() or not os.access(folder, os.W_OK):
        raise RecipeError(f"can't write to the output folder {root}: {folder} is not a writable folder")
    free = shutil.disk_usage(folder).free
    if free < needed:
        space = f"has {files.amount(free)} free, this run needs {files.amount(needed)}"
        raise RecipeError(f"the output folder {root} {space}")


@contextmanager
def _advice(stage: Stage, keeper: Keeper) -> Iterator[None]:
    """Say how to go on after a training whose numbers are no longer finite."""
    try:
        yield
    except Diverged as error:
        change = f"--set stages.{stage.name}.optimizer.lr={stage.optimizer.lr / 3:.1g}"
        raise Diverged(f"{error}. Last good state: {keeper.good}. Train this stage anew with {change}") from error
