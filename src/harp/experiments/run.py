"""Running a recipe: its stages one after the other, each in a folder named by the hash of all that produced it.

    ROOT/stages/<hash>-<name>/   recipe.yaml metrics.jsonl state.pt model.safetensors masks.safetensors stage.json
    ROOT/<recipe>-<hash>/        recipe.yaml model.safetensors masks.safetensors results/*.json summary.json layers.png

Where channels are pruned they are cut out right after the stage that chose them: all that follows trains, measures and
saves the small network, and `slim.json` beside its weights says what was cut.

Recipes that begin alike share their first stages, a finished stage is never trained again, and an interrupted one goes
on from its last state, bit for bit.
"""

import hashlib
import inspect
import logging
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.optim import AdamW, Optimizer

from harp.attacks import Attack
from harp.data import registry
from harp.data.batches import Augment, Batches, ResizedCrop
from harp.data.decodable import readable
from harp.data.streaming.images import Streamed
from harp.data.streaming.unreadable import Corrupt
from harp.data.streaming.workers import default_workers
from harp.errors import Diverged, Interrupted, RecipeError
from harp.evaluation import chance_level
from harp.evaluation import score as evaluate
from harp.evaluation.accuracy import Subject
from harp.evaluation.results import Audit
from harp.experiments import artefact, build, energy, run_folder
from harp.experiments import run_names as folders
from harp.experiments.recipe import Recipe, Stage
from harp.models.weights import fingerprint, load_weights
from harp.pruning import macs as cost
from harp.pruning import masks, methods, schedules
from harp.pruning.channels import Channels, Cut, Latency
from harp.pruning.channels.compact import Compacted, compacted, spread_back
from harp.pruning.masks import Masks
from harp.pruning.methods.base import Objective
from harp.pruning.units import Units, Weights
from harp.system import files
from harp.system.distributed import affinity, environment, peers
from harp.system.distributed import fabric as engine
from harp.system.interrupt import Stop, insist
from harp.system.progress import Quiet
from harp.system.seeds import derive
from harp.system.states import States
from harp.training import loop, objectives
from harp.training.checkpointing import Keeper
from harp.training.metrics import MetricsFile

if TYPE_CHECKING:
    from lightning_fabric import Fabric

logger = logging.getLogger("harp")

_CIRCUMSTANCES = ("kind", "classes", "network", "images", "seconds", "parts", "during")  # not in a summary


@dataclass
class Outcome:
    """What a run leaves."""

    folder: Path
    model: nn.Module
    masks: Masks | None
    units: Units  # of the network before any cut
    results: list[dict[str, Any]]  # the finished network's
    dense: list[dict[str, Any]]  # the network's before pruning, measured the same way


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
        self.recipe, self.root, self.minutes = recipe, root, minutes
        self.display = display or Quiet()
        self.fabric = fabric if fabric is not None else engine.launch(recipe.precision)
        self.stop, self.keep_states = stop or Stop(), keep_states
        self.peers = peers.of_this_run()
        self.peers.listen(self.stop)
        self.data = source or registry.load(recipe.data.name, data_dir, display=self.display, **recipe.data.loading())
        sharers = affinity.sharers(self.peers)
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
        self.contents = folders.computed_in(folders.contents(recipe, self.data), precision)
        self.units = self._units()
        self.dense_cost = cost.cost(self.model, self.data.shape, {})
        self.cut: Cut | None = None  # what was cut out of the model
        self.total: int | None = None  # the last budget that a stage names
        for stage in recipe.stages:
            if stage.pruner["name"] != "fixed":
                pruner = self.pruner(stage, None)  # what is wrong with its options is said now, not after pre-training
                self.total = pruner.total if "keep" in stage.pruner else self.total
        size = sum(value.numel() * value.element_size() for value in self.model.state_dict().values())
        # The states and their successor, each with weights, latents, momentum and the best epoch so far.
        folders.check_writable(root, 6 * (keep_states + 1) * size)

    def _units(self) -> Units:
        """What is pruned. Times are measured once in a run, and are the same after a resume and on every rank."""
        known = self._latency_file()
        latency = Latency.from_dict(files.read_json(known)) if known is not None and known.exists() else None
        made = build.units_of(self.recipe.units, self.model, self.data, latency)
        if known is None or latency is not None or self.fabric.world_size == 1 or not isinstance(made, Channels):
            return made
        first = self.fabric.broadcast(made.latency.as_dict() if made.latency is not None else {})
        return build.units_of(self.recipe.units, self.model, self.data, Latency.from_dict(first))

    def _latency_file(self) -> Path | None:
        """Where the measured times of a budget of latency are: with the stage that prunes."""
        pruning = [n for n, stage in enumerate(self.recipe.stages) if _prunes(stage)]
        if self.recipe.units.budget != "latency" or not pruning:
            return None
        return self.stage_folder(pruning[0]) / "latency.json"

    def folder(self) -> Path:
        """Where the outcome goes."""
        return self.root / folders.name(self.recipe, self.contents)

    def stage_folder(self, number: int) -> Path:
        """Where a stage's files go; number -1 is the network before the first stage."""
        name = self.recipe.stages[number].name if number >= 0 else "start"
        return self.root / "stages" / f"{self.recipe.identity(number + 1, *self.contents)}-{name}"

    def execute(self) -> Outcome:
        """Train what is not trained yet, evaluate, and write the outcome."""
        with self.stop.on_signals():
            answer: Masks | None = None
            dense: list[dict[str, Any]] = []
            for number, stage in enumerate(self.recipe.stages):
                if stage.pruner["name"] != "dense" and not dense:
                    dense = self.evaluate(self.stage_folder(number - 1))
                answer = self.stage(number, stage, answer)
                self.cut_out(answer)
            results = self.evaluate(self.stage_folder(len(self.recipe.stages) - 1), self.folder() / "evaluation")
        outcome = Outcome(self.folder(), self.model, answer, self.units, results, dense)
        if self.fabric.is_global_zero:
            insist(lambda: self.write(outcome), stop=self.stop)
        return outcome

    def cut_out(self, answer: Masks | None) -> None:
        """Cut pruned channels out of the model, once: all that comes after works on the small network."""
        if isinstance(self.units, Channels) and answer is not None and self.cut is None:
            self.cut = self.units.cut(answer)
            self.model = self.units.slim(self.model, answer)

    def stage(self, number: int, stage: Stage, before: Masks | None) -> Masks | None:
        """Do one stage, or take its result if it was done; the model then holds it."""
        folder = self.stage_folder(number)
        if self._finished(folder) or not self._train_alone(number, stage, before, folder):
            self._tidy(folder)
            self.display.note(f"{stage.name}: done before, taken from {folder}")
            load_weights(self.model, folder / "model.safetensors")
            if self.fabric.is_global_zero and (warning := self._budget_warning(number)):
                logger.warning(warning)
        path = folder / "masks.safetensors"
        return masks.load(path) if path.exists() else None

    def _tidy(self, folder: Path) -> None:
        """Remove what a process left that was killed after it had finished a stage and before it had cleaned up."""
        held, states = folder.with_name(f"{folder.name}.lock"), States(folder / "state.pt")
        if self.fabric.is_global_zero and (held.exists() or states.paths()):
            with files.lock(held, self._stop_waiting):
                states.remove()

    def _finished(self, folder: Path) -> bool:
        """Whether a stage is done; all ranks agree with rank 0."""
        return bool(self.fabric.broadcast((folder / "stage.json").exists()))

    def _train_alone(self, number: int, stage: Stage, before: Masks | None, folder: Path) -> bool:
        """Train a stage, unless another process is at it and finishes it first; whether it was trained here."""
        with ExitStack() as held:
            if self.fabric.is_global_zero:
                held.enter_context(files.lock(folder.with_name(f"{folder.name}.lock"), self._waiting(stage)))
            self.peers.meet(self._stop_waiting)
            if self._finished(folder):
                return False
            self.train_stage(number, stage, before, folder)
        return True

    def _waiting(self, stage: Stage) -> Callable[[], None]:
        said = iter([f"{stage.name}: another process is training it, waiting for that"])

        def wait() -> None:
            for text in said:
                self.display.note(text)
            self._stop_waiting()

        return wait

    def _stop_waiting(self) -> None:
        if self.stop.signal is not None:
            raise Interrupted("stopped while waiting for another process; nothing is lost", self.stop.signal)

    def train_stage(self, number: int, stage: Stage, before: Masks | None, folder: Path) -> None:
        """Train a stage from where it stands and write its result."""
        folders.make(folder)
        if isinstance(self.units, Channels) and self.units.latency is not None and self.fabric.is_global_zero:
            files.write_json(folder / "latency.json", self.units.latency.as_dict())
        pruner = self.pruner(stage, before)
        total = pruner.total
        keeper = Keeper(
            folder / "state.pt",
            self.stop,
            of=folder.name,
            minutes=self.minutes,
            keep=self.keep_states,
            fabric=self.fabric,
        )
        log = MetricsFile(folder)
        with self._compacted(stage, before) as left:
            if left is not None:
                part = self.recipe.units
                pruner = methods.Fixed(Weights(left.model, ignore=part.ignore, include=part.include), left.masks)
            fitted, spent = self._fit(number, stage, pruner, keeper, log)
        if self.fabric.is_global_zero:
            answer = None if stage.pruner["name"] == "dense" else fitted.masks
            masked = answer if self.cut is None and left is None else before
            facts = {"stage": stage.name, "epochs": stage.epochs, "chosen_epoch": fitted.epoch}
            facts |= {"seconds": round(fitted.seconds, 1), "energy": spent, "history": fitted.history}
            if _prunes(stage):
                facts["budget_met"] = fitted.met
                self._warn_of_chance(number, fitted)
            kept = self.total if self.cut else total
            insist(lambda: self._write_stage(folder, masked, kept, facts), stop=self.stop)
            keeper.states.remove()
            log.close()
        self.fabric.barrier()

    def _warn_of_chance(self, number: int, fitted: loop.Fitted) -> None:
        """Say at once if what a pruning stage leaves answers at chance level on the hold-out."""
        if not fitted.history:
            return
        value = fitted.history[fitted.epoch - 1]["natural"]
        totals = torch.bincount(self.held.labels.cpu().long(), minlength=self.data.num_classes).tolist()
        if chance_level.at_chance(value, totals, self.data.balanced):
            more = "; fine-tuning may recover it" if number + 1 < len(self.recipe.stages) else ""
            chance = f"({value:.1%} of {self.data.num_classes} classes)"
            logger.warning("after pruning the network answers at chance level %s%s", chance, more)

    def _budget_warning(self, number: int) -> str | None:
        """What a finished stage has to say if it did not meet its budget in training."""
        stage = self.recipe.stages[number]
        facts = run_folder.stage_facts(self.stage_folder(number))
        history = facts.get("history", [])
        ready = not history or any(record.get("ready", True) for record in history)  # all that older versions tell
        return None if facts.get("budget_met", ready) else loop.budget_warning(history, stage.name)

    @contextmanager
    def _compacted(self, stage: Stage, before: Masks | None) -> Iterator[Compacted | None]:
        """For the time of a training with fixed masks, leave out what they make useless, if that is worth it."""
        if stage.pruner["name"] != "fixed" or stage.compact is False or self.cut is not None or before is None:
            yield None
            return
        whole, macs = self.model, self.dense_cost["macs"]
        left = compacted(whole, build.noise_of(self.data), before, macs, self.display.note)
        self.model = whole if left is None else left.model
        yield left
        if left is not None:
            spread_back(whole, self.model, left.cut)
            self.model = whole

    def _fit(
        self, number: int, stage: Stage, pruner: methods.Pruner, keeper: Keeper, log: MetricsFile
    ) -> tuple[loop.Fitted, dict[str, Any]]:
        """Train the model; what came of it, and the energy that it took."""
        seed, settings = derive(self.recipe.seed, "stage", number), stage.optimizer
        corrupt = Corrupt(len(self.train), self.recipe.data.corrupt, log.path.with_name("corrupt.txt"))
        batches = Batches(
            self.train,
            self.recipe.data.batch,
            seed=seed,
            augment=self.augment(),
            workers=self.workers,
            corrupt=corrupt,
        )
        objective = objectives.made(self.recipe.stage_objective(stage))
        showing = self.display.training(stage.name, stage.epochs, len(batches))
        with _way_out(stage, keeper), showing, self.meter() as meter:
            fitted = loop.fit(
                self.model,
                batches,
                objective,
                pruner,
                epochs=stage.epochs,
                lr=settings.lr,
                momentum=settings.momentum,
                weight_decay=settings.weight_decay,
                optimizer=self.optimizer(stage),
                schedule=schedules.from_recipe(settings.schedule),
                accumulate=stage.accumulate,
                seed=seed,
                validate=partial(self.validate, objective),
                select=self.criterion(objective) if stage.select == "best" else None,
                on_step=self.display.step,
                on_epoch=partial(self._tell, log, corrupt),
                keeper=keeper,
                sync_norms=self.recipe.sync_norms,
                fabric=self.fabric,
            )
        return fitted, meter.over(fitted.seconds)

    def _tell(self, log: MetricsFile, corrupt: Corrupt, record: dict[str, Any]) -> None:
        """Log an epoch, and what other processes have found in their parts of the images."""
        if self.fabric.is_global_zero:
            corrupt.catch_up()
            log.write(record)
        self.display.epoch(record)

    def _write_stage(self, folder: Path, masked: Masks | None, kept: int | None, facts: dict[str, Any]) -> None:
        artefact.save(folder, self.model, masked, kept, self.units, self.cut)
        files.write_text(folder / "recipe.yaml", self.recipe.to_yaml())
        files.write_json(folder / "stage.json", facts)

    def augment(self) -> Augment | ResizedCrop | None:
        """What is done to the images of a training."""
        part = self.recipe.data
        if not part.augment:
            return None
        if part.crop == "resized" and isinstance(self.train.images, Streamed):
            return ResizedCrop(flip=self.data.flip)
        return Augment(part.pad, self.data.flip)

    def meter(self) -> energy.Meter:
        """Of the energy that a stage takes, on all machines."""
        place = environment.here()
        nodes = 1 if place is None else place.nodes
        return energy.Meter(watts=energy.assumed(self.fabric.device.type, self.fabric.world_size, nodes), nodes=nodes)

    def pruner(self, stage: Stage, before: Masks | None) -> methods.Pruner:
        """The stage's pruner on this run's model."""
        options = {key: value for key, value in stage.pruner.items() if key != "name"}
        if stage.pruner["name"] == "fixed" and self.cut is not None:
            return methods.Dense(Weights(self.model))  # what was pruned is not there any more
        if stage.pruner["name"] == "fixed":
            if before is None:
                raise RecipeError(
                    f"stage {stage.name!r}: 'fixed' keeps the masks of an earlier stage, and there is none"
                )
            options["masks"] = before
        method = methods.PRUNERS[stage.pruner["name"]]
        if "seed" in inspect.signature(method).parameters:
            options["seed"] = derive(self.recipe.seed, "pruner", self.recipe.stages.index(stage))
        return method(self.units, **options)

    def optimizer(self, stage: Stage) -> Callable[[list[methods.ParameterGroup]], Optimizer] | None:
        """What makes the stage's optimiser; None for the loop's own SGD."""
        settings = stage.optimizer
        if settings.name == "sgd":
            return None
        return lambda groups: AdamW(groups, lr=settings.lr, weight_decay=settings.weight_decay)

    def criterion(self, objective: Objective) -> str:
        """What the best epoch is chosen by."""
        return "natural" if objective.judge() is None else "robust"

    def validate(self, objective: Objective) -> dict[str, float]:
        """Accuracy on the held-out images, natural and under the attack that is trained against."""
        found = {"natural": self._held_accuracy(None)}
        if (judge := objective.judge()) is not None:
            found["robust"] = self._held_accuracy(judge)
        return found

    def _held_accuracy(self, attack: Attack | None) -> float:
        images, labels, seed = self.held.images, self.held.labels, self.recipe.seed
        score = evaluate.accuracy(self.model, images, labels, attack=attack, seed=seed, peers=self.peers)
        return score.balanced_accuracy if self.data.balanced else score.accuracy

    def evaluate(self, folder: Path, *measured: Path) -> list[dict[str, Any]]:
        """Measure the model as it stands on the test set; what its stage or another folder has is taken from there."""
        ball = build.threat(self.recipe)
        attacked = [build.attack_of(wish, ball) for wish in self.recipe.evaluate.attacks]
        subject = Subject(self.model, self.data, ball, measured=measured)
        how: dict[str, Any] = {"examples": self.recipe.evaluate.examples, "seed": self.recipe.seed}
        audit = Audit(subject, folder, **how, display=self.display, stop=self.stop, peers=self.peers)
        return [self._measure(name, attack, audit, folder) for name, attack in [("natural", None), *attacked]]

    def _measure(self, name: str, attack: Attack | None, audit: Audit, folder: Path) -> dict[str, Any]:
        conditions = hashlib.sha256(f"{attack!r}/{audit.examples}/{audit.seed}".encode()).hexdigest()[:8]
        path = folder / f"test-{name}-{conditions}.json"  # as older versions wrote it
        known = self.peers.first(files.read_json(path) if path.exists() else None)
        if known is not None:
            return known
        return {key: value for key, value in audit.under(name, attack).items() if key not in _CIRCUMSTANCES}

    def histories(self) -> dict[str, list[dict[str, Any]]]:
        """What every finished stage logged, epoch by epoch."""
        folders = {stage.name: self.stage_folder(n) for n, stage in enumerate(self.recipe.stages)}
        return {name: run_folder.stage_facts(folder).get("history", []) for name, folder in folders.items()}

    def write(self, outcome: Outcome) -> None:
        """Write the outcome's folder: the network, the numbers, the layers and their picture."""
        folder = outcome.folder
        folders.make(folder / "results")
        (folder / "summary.json").unlink(missing_ok=True)  # it is there only if all beside it belongs to it
        artefact.save(folder, self.model, outcome.masks, self.total, self.units, self.cut)
        files.write_text(folder / "recipe.yaml", self.recipe.to_yaml())
        identity = self.recipe.identity(len(self.recipe.stages), *self.contents)
        for result in outcome.results:
            files.write_json(folder / "results" / f"{result['name']}.json", {"recipe": identity, **result})
        stages = [str(self.stage_folder(number).relative_to(self.root)) for number in range(len(self.recipe.stages))]
        summary: dict[str, Any] = {
            "recipe": identity,
            "name": self.recipe.name,
            "source": self.data.source,
            "stages": stages,
            "network": fingerprint(self.model),
            "cost": self._cost(outcome.masks),
            "budget": artefact.budget(self.units, outcome.masks, self.total),
        }
        summary |= {
            "results": outcome.results,
            "dense": outcome.dense,
            "layers": artefact.layers(self.units, outcome.masks),
        }
        files.write_json(folder / "summary.json", summary | self._warnings(outcome))

    def _warnings(self, outcome: Outcome) -> dict[str, Any]:
        """What a reader has to be warned of: as facts, and as one plain sentence each."""
        trained = not _prunes(self.recipe.stages[0]) or self.recipe.model.weights is not None
        chance = chance_level.warning(outcome.results, outcome.dense, trained)
        unmet = [text for number in range(len(self.recipe.stages)) if (text := self._budget_warning(number))]
        return {
            "at_chance": chance is not None,
            "budget_met": not unmet,
            "warnings": [*([] if chance is None else [chance]), *unmet],
        }

    def _cost(self, answer: Masks | None) -> dict[str, Any]:
        """What the network costs, beside what it cost before pruning."""
        if self.cut is None:
            return cost.cost(self.model, self.data.shape, answer)
        return cost.reduced(self.dense_cost, cost.cost(self.model, self.data.shape, {}))


def _prunes(stage: Stage) -> bool:
    return stage.pruner["name"] not in ("dense", "fixed")


@contextmanager
def _way_out(stage: Stage, keeper: Keeper) -> Iterator[None]:
    """Say how to go on after a training whose numbers are no longer finite."""
    try:
        yield
    except Diverged as error:
        change = f"--set stages.{stage.name}.optimizer.lr={stage.optimizer.lr / 3:.1g}"
        raise Diverged(f"{error}. Last good state: {keeper.good}. Train this stage anew with {change}") from error
