"""Smaller networks on disk: a channel run from end to end, dead channels of a weight run, files that stand alone."""

import copy
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from typer.testing import CliRunner

from harp.cli import app
from harp.deploy import slim
from harp.errors import HarpError, Interrupted, ModelError, RecipeError
from harp.evaluation import accuracy
from harp.experiments import artefact, build, recipe, run_folder
from harp.experiments.compare import Comparison
from harp.experiments.run import Run
from harp.experiments.study import parse as parse_study
from harp.pruning import macs, masks
from harp.pruning.channels import Channels, Cut, Latency
from harp.pruning.channels.latency import Speed
from harp.pruning.methods import Hydra
from harp.system.tensors import load_tensors

CONTENT: dict[str, Any] = {
    "name": "small",
    "data": {"name": "digits", "batch": 32, "holdout": 100, "train": 320, "pad": 1},
    "model": {"name": "resnet8", "width": 0.5},
    "units": {"kind": "channels", "budget": "flops"},
    "objective": {"name": "pgd", "epsilon": 0.1, "step": 0.05, "steps": 1},
    "stages": [
        {"name": "pretrain", "pruner": "dense", "epochs": 1},
        {"name": "prune", "pruner": {"name": "harp", "keep": "40%"}, "epochs": 2},
        {"name": "finetune", "pruner": "fixed", "epochs": 2, "optimizer": {"lr": 0.05}},
    ],
    "evaluate": {"attacks": ["pgd-3"], "examples": 60},
}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    run = Run(recipe.parse(CONTENT), tmp_path_factory.mktemp("runs"))
    run.execute()
    return run


@pytest.fixture(scope="module")
def weight_run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """99 % of the weights pruned at once."""
    stages = [{"name": "prune", "pruner": {"name": "lamp", "keep": "2%"}, "epochs": 0}, CONTENT["stages"][2]]
    run = Run(recipe.parse({**CONTENT, "units": {}, "stages": stages}), tmp_path_factory.mktemp("runs"))
    run.execute()
    return run


def test_a_channel_run_leaves_a_smaller_network_within_its_budget(run: Run) -> None:
    folder = run.folder()
    summary = json.loads((folder / "summary.json").read_text())
    budget = summary["budget"]
    assert (budget["kind"], budget["unit"]) == ("channels", "FLOPs")
    assert budget["kept"] <= budget["total"] == round(0.4 * budget["size"])
    tensors, _ = load_tensors(folder / "model.safetensors")
    assert sum(t.numel() for t in tensors.values()) < 0.8 * sum(
        t.numel() for t in run.units.model.state_dict().values()
    )
    small = build.build(run.recipe.model, run.data, None)
    artefact.load(folder, small)
    counted = macs.cost(small, run.data.shape, {})
    assert summary["cost"]["macs_kept"] == counted["macs"] < summary["cost"]["macs"]
    assert summary["cost"]["parameters_kept"] == sum(p.numel() for p in small.parameters())
    by_macs = Channels(run.units.model, torch.rand(1, *run.data.shape), budget="macs")
    assert by_macs.spent(masks.load(folder / "masks.safetensors")) == counted["macs"]


def test_the_fine_tuned_network_is_small_and_its_accuracies_are_measured_on_it(run: Run) -> None:
    stages = [run.stage_folder(number) for number in range(3)]
    sizes = [sum(t.numel() for t in load_tensors(f / "model.safetensors")[0].values()) for f in stages]
    assert sizes[0] == sizes[1] > sizes[2]
    subject = build.load(str(run.folder()), None, None, None)
    result, _ = accuracy.measure(subject.model, run.data, "natural", None, examples=60, seed=0)
    summary = json.loads((run.folder() / "summary.json").read_text())
    assert result["value"] == next(r["value"] for r in summary["results"] if r["name"] == "natural")
    assert subject.dense is not None
    assert sum(p.numel() for p in subject.dense.parameters()) > sum(p.numel() for p in subject.model.parameters())


def test_the_state_in_full_shapes_gives_the_logits_of_the_small_network(run: Run) -> None:
    finished = run_folder.read(run.folder())
    wide = build.build(run.recipe.model, run.data, None).eval()
    wide.load_state_dict(finished.state())
    x = run.data.test.images[:16].float() / 255
    with torch.no_grad():
        torch.testing.assert_close(wide(x), run.model.eval()(x), rtol=1e-4, atol=1e-5)
    assert artefact.outside(wide, masks.load(run.folder() / "masks.safetensors")) == 0


def test_interrupted_fine_tuning_of_the_small_network_resumes_bit_for_bit(run: Run, tmp_path: Path) -> None:
    again = Run(recipe.parse(CONTENT), tmp_path, minutes=0.0)

    def stop_in_the_middle(record: dict[str, Any]) -> None:
        if again.cut is not None and record["epoch"] == 1 and record["step"] == 3:
            again.stop.signal = 15

    again.display.step = stop_in_the_middle  # type: ignore[method-assign]
    with pytest.raises(Interrupted):
        again.execute()
    assert not (again.folder() / "summary.json").exists()
    whole = Run(recipe.parse(CONTENT), tmp_path)
    whole.execute()
    for name, tensor in run.model.state_dict().items():
        assert torch.equal(tensor, whole.model.state_dict()[name]), name


@pytest.mark.parametrize("kind", ["channels", "weights"])
def test_written_files_load_without_the_package(kind: str, run: Run, weight_run: Run, tmp_path: Path) -> None:
    """In a fresh process, with an architecture of the user's own and no import of ours."""
    net = nn.Sequential(nn.Conv2d(1, 8, 3, bias=False), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 6, 3, padding=1),
                        nn.ReLU(), nn.Flatten(), nn.Linear(6 * 36, 10))  # fmt: skip
    torch.manual_seed(0)
    for parameter in net.parameters():
        nn.init.normal_(parameter, std=0.3)
    x = torch.rand(2, 1, 8, 8)
    if kind == "channels":
        shrunk = slim.by_magnitude(net, x, 0.5)
    else:
        weight = net[3].weight
        assert isinstance(weight, nn.Parameter)
        weight.data[:, 2] = 0
        weight.data[4] = 0
        shrunk = slim.without_dead_channels(net, x)
    shrunk.save(tmp_path / "net")
    with torch.no_grad():
        torch.save({"x": x, "y": shrunk.model.eval()(x)}, tmp_path / "io.pt")
    code = """
import sys, torch
from torch import nn
sys.path.insert(0, sys.argv[1])
from rebuild import rebuild
net = nn.Sequential(nn.Conv2d(1, 8, 3, bias=False), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 6, 3, padding=1),
                    nn.ReLU(), nn.Flatten(), nn.Linear(6 * 36, 10))
io = torch.load(sys.argv[2], weights_only=True)
small = rebuild(net).eval()
assert torch.equal(small(io["x"]), io["y"])
assert small[3].in_channels < 8 and small[3].weight.shape[1] == small[3].in_channels
assert not any(name.split(".")[0] == "harp" for name in sys.modules)
"""
    subprocess.run([sys.executable, "-c", code, str(tmp_path / "net"), str(tmp_path / "io.pt")], check=True)


def test_cutting_dead_channels_of_a_weight_run_changes_no_logits(weight_run: Run, tmp_path: Path) -> None:
    shrunk = slim.of_run(weight_run.folder())
    facts = shrunk.facts()
    assert facts["parameters"][1] < facts["parameters"][0]
    x = weight_run.data.test.images[:32].float() / 255
    with torch.no_grad():
        torch.testing.assert_close(shrunk.model.eval()(x), weight_run.model.eval()(x), rtol=1e-4, atol=1e-5)
    shrunk.save(tmp_path / "net")
    assert {path.name for path in (tmp_path / "net").iterdir()} == {"model.safetensors", "slim.json", "rebuild.py"}


def test_a_damaged_cut_or_one_of_another_model_is_refused(run: Run, tmp_path: Path) -> None:
    cut = artefact.cut_of(run.folder())
    assert cut is not None
    with pytest.raises(ModelError, match="another model"):
        cut.apply(nn.Sequential(nn.Conv2d(1, 8, 3)))
    content = cut.as_dict()
    name = next(iter(content["kept"]))
    for damage in (
        {"kept": 3},
        {"kept": {**content["kept"], name: {"0": [10**9]}}},
        {"kept": {**content["kept"], name: {"7": [0]}}},
        {"sizes": {"": {"__class__": 3}}},
        {"sizes": {"nowhere": {"in_channels": 3}}},
        {"swapped": ["classifier"]},
    ):
        with pytest.raises(HarpError):
            Cut.from_dict({**content, **damage}).apply(build.build(run.recipe.model, run.data, None))
    folder = tmp_path / "broken"
    folder.mkdir()
    for text in ("", "[]", "{", '{"kept": {}}'):
        (folder / "slim.json").write_text(text)
        with pytest.raises(HarpError):
            artefact.cut_of(folder)


def test_options_without_a_meaning_for_the_units_are_refused() -> None:
    for units, text in (
        ({"kind": "channels", "include": ["a"]}, "include has no meaning"),
        ({"multiple": 8}, "multiple has no meaning"),
        ({"kind": "channels", "budget": "weights"}, "unknown budget of channels 'weights'"),
        ({"budget": "flop"}, "unknown budget of weights 'flop'"),
    ):
        with pytest.raises(RecipeError, match=text):
            recipe.parse({**CONTENT, "units": units})
    twice = [*CONTENT["stages"], {"name": "more", "pruner": {"name": "hydra", "keep": "20%"}, "epochs": 1}]
    with pytest.raises(RecipeError, match="only one"):
        recipe.parse({**CONTENT, "stages": twice})


def test_a_budget_of_macs_for_weights_is_met_by_a_run(tmp_path: Path) -> None:
    stages = [{"name": "prune", "pruner": {"name": "hydra", "keep": "10%"}, "epochs": 1}]
    run = Run(recipe.parse({**CONTENT, "units": {"budget": "macs"}, "stages": stages}), tmp_path)
    outcome = run.execute()
    summary = json.loads((outcome.folder / "summary.json").read_text())
    assert isinstance(run.pruner(run.recipe.stages[0], None), Hydra)
    assert summary["budget"]["unit"] == "MACs"
    assert 0.99 * summary["budget"]["total"] < summary["cost"]["macs_kept"] <= summary["budget"]["total"]


def test_slim_from_the_command_line(run: Run, tmp_path: Path) -> None:
    runner = CliRunner()
    done = runner.invoke(app, ["slim", str(run.folder()), "--out", str(tmp_path / "a"), "--json"])
    assert done.exit_code == 0, done.output
    facts = json.loads(done.output)
    assert facts["parameters"][1] == sum(p.numel() for p in run.model.parameters())
    done = runner.invoke(app, ["slim", "tinynet", "--keep", "50%", "--shape", "1x28x28", "--out", str(tmp_path / "b")])
    assert done.exit_code == 0, done.output
    assert "MACs" in done.output
    for wrong in (
        ["slim", str(run.folder()), "--out", str(tmp_path / "a")],
        ["slim", str(run.folder()), "--keep", "50%", "--out", str(tmp_path / "c")],
        ["slim", "no-such-model", "--out", str(tmp_path / "c")],
        ["slim", "tinynet", "--keep", "0", "--out", str(tmp_path / "c")],
    ):
        failed = runner.invoke(app, wrong)
        assert isinstance(failed.exception, HarpError), wrong
        assert not (tmp_path / "c").exists()


def test_compact_fine_tuning_is_the_same_training(tmp_path: Path) -> None:
    """Without the channels that nobody reads: the same weights but for rounding, in the whole network's shapes."""
    stages = [
        {"name": "prune", "pruner": {"name": "global", "keep": "3%"}, "epochs": 0},
        {"name": "finetune", "pruner": "fixed", "epochs": 2, "optimizer": {"lr": 0.02}},
    ]
    runs = []
    for compact in (False, None):
        content = {**CONTENT, "units": {}, "objective": "natural", "stages": copy.deepcopy(stages)}
        content["evaluate"] = {"attacks": [], "examples": 60}
        content["stages"][1]["compact"] = compact
        run = Run(recipe.parse(content), tmp_path)
        notes: list[str] = []
        run.display.note = notes.append  # type: ignore[method-assign]
        outcome = run.execute()
        assert any("compact" in note for note in notes) == (compact is None)
        assert outcome.masks is not None
        assert masks.kept(outcome.masks) == run.total
        runs.append(run)
    assert runs[0].stage_folder(1) != runs[1].stage_folder(1)
    x = runs[0].data.test.images[:64].float() / 255
    with torch.no_grad():
        torch.testing.assert_close(runs[0].model.eval()(x), runs[1].model.eval()(x), rtol=1e-2, atol=1e-3)
    with pytest.raises(RecipeError, match="compact is for 'fixed'"):
        recipe.parse({**CONTENT, "stages": [{**CONTENT["stages"][0], "compact": True}]})


def test_a_budget_of_measured_time_is_kept_over_a_resume(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[nn.Module] = []

    def measured(model: nn.Module, example: torch.Tensor, trace: Any, spaces: Any) -> Latency:
        calls.append(model)
        return Latency({}, Speed(1e3, 2.0 + len(calls), 5.0), {use.name: "" for use in trace.uses}, 1)

    monkeypatch.setattr("harp.pruning.channels.units.measure", measured)
    content = copy.deepcopy(CONTENT)
    content["units"]["budget"] = "latency"
    content["stages"] = [{"name": "prune", "pruner": {"name": "hydra", "keep": "60%"}, "epochs": 1}]
    first = Run(recipe.parse(content), tmp_path)
    first.execute()
    again = Run(recipe.parse(content), tmp_path)
    assert again.units.size == first.units.size
    assert len(calls) == 1
    outcome = again.execute()
    summary = json.loads((outcome.folder / "summary.json").read_text())
    assert summary["budget"]["kept"] <= summary["budget"]["total"] == again.units.total(0.6)
    study = {"name": "times", "recipe": content, "methods": ["hydra"], "keep": [0.5]}
    with pytest.raises(RecipeError):
        Comparison(parse_study(study), tmp_path)
