"""Submission folders: what is in them fits the benchmarks, and what does not is said."""

import json
import math
import os
import pickle
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from harp import models
from harp.errors import CheckpointError, DataError, HarpError, ModelError, RecipeError, RunFolderError
from harp.experiments import recipe
from harp.pruning import masks
from harp.pruning.methods import PRUNERS
from harp.reports.leaderboards import apb, robustbench, taxonomy
from harp.reports.leaderboards.definition import define
from harp.system.tensors import load_tensors, save_tensors
from support.finished_run import accuracy, content, distances, edit, make, score

KEY = "HARP_Zhao2023Holistic"
PAPER = "https://openreview.net/pdf?id=sAJDi9lD06L"
DISTANCES = [0.0, 0.02, 0.04, None]
MEASURED = [accuracy("autoattack", 4000, 10_000, 0.031), distances(DISTANCES)]


# The benchmark's base models, written down once more from its description.


def base_vgg16() -> nn.Module:
    layers: list[nn.Module] = []
    channels = 3
    for out in [64, 64, "M", 128, 128, "M", 256, 256, 256, "M", 512, 512, 512, "M", 512, 512, 512]:
        if out == "M":
            layers.append(nn.MaxPool2d(2, 2))
        else:
            layers += [nn.Conv2d(channels, int(out), 3, padding=1, bias=False), nn.BatchNorm2d(int(out)), nn.ReLU()]
            channels = int(out)
    head = nn.Sequential(nn.Linear(2048, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 10))
    parts = {"features": nn.Sequential(*layers), "avgpool": nn.AdaptiveAvgPool2d((2, 2)), "classifier": head}

    class Base(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            for name, part in parts.items():
                self.add_module(name, part)

        def forward(self, x: Tensor) -> Tensor:
            return parts["classifier"](parts["avgpool"](parts["features"](x)).flatten(1))

    return Base().eval()


class BaseBlock(nn.Module):
    def __init__(self, before: int, out: int, stride: int) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(before, out, 3, stride, 1, bias=False), nn.BatchNorm2d(out)
        self.conv2, self.bn2 = nn.Conv2d(out, out, 3, 1, 1, bias=False), nn.BatchNorm2d(out)
        self.shortcut = nn.Sequential()
        if stride != 1 or before != out:
            self.shortcut = nn.Sequential(nn.Conv2d(before, out, 1, stride, bias=False), nn.BatchNorm2d(out))

    def forward(self, x: Tensor) -> Tensor:
        y = self.bn2(self.conv2(torch.relu(self.bn1(self.conv1(x)))))
        return torch.relu(y + self.shortcut(x))


class BaseResNet18(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(3, 64, 3, 1, 1, bias=False), nn.BatchNorm2d(64)
        before = 64
        for stage, out in enumerate((64, 128, 256, 512), start=1):
            blocks = [BaseBlock(before, out, 1 if stage == 1 else 2), BaseBlock(out, out, 1)]
            self.add_module(f"layer{stage}", nn.Sequential(*blocks))
            before = out
        self.linear = nn.Linear(512, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.bn1(self.conv1(x)))
        for stage in range(1, 5):
            x = self.get_submodule(f"layer{stage}")(x)
        return self.linear(nn.functional.avg_pool2d(x, 4).flatten(1))


def images(n: int = 2) -> Tensor:
    return torch.rand(n, 3, 32, 32, generator=torch.Generator().manual_seed(1))


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Networks of full size are large: they are removed at once."""
    folder = tmp_path_factory.mktemp("submit")
    yield folder
    shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(scope="module")
def networks(root: Path) -> dict[Path, nn.Module]:
    """One method at the benchmark's three sparsities."""
    found = {}
    for keep in (0.1, 0.05, 0.01):
        folder = root / f"run{keep}"
        found[folder] = make(folder, content(keep=keep, objective="trades"), evaluation=MEASURED)
    return found


@pytest.fixture(scope="module")
def runs(networks: dict[Path, nn.Module]) -> list[Path]:
    return list(networks)


def linked(run: Path, copy: Path, *apart: str) -> Path:
    """A copy of a run that shares its files, but for those that are named."""
    shutil.copytree(run, copy, copy_function=os.link)
    for name in apart:
        data = (copy / name).read_bytes()
        (copy / name).unlink()
        (copy / name).write_bytes(data)
    return copy


def loaded(base: Callable[[], nn.Module], path: Path) -> nn.Module:
    """A base model with the weights of a checkpoint, all of which it must take."""
    saved = torch.load(path, weights_only=True)
    assert list(saved) == ["state_dict"]
    with torch.device("meta"):
        model = base()
    model.load_state_dict(saved["state_dict"], strict=True, assign=True)
    return model.eval()


@pytest.fixture(scope="module")
def whole(root: Path, runs: list[Path]) -> Path:
    submission = apb.prepare(runs, root / "whole", ap_key=KEY, paper=PAPER)
    assert not submission.errors
    assert submission.folder == root / "whole"
    return submission.folder


def refuse(tmp_path: Path, run: Path, kind: type[HarpError], match: str, **more: Any) -> None:
    """Nothing is written, and the error is one line."""
    out = tmp_path / "out"
    with pytest.raises(kind, match=match) as raised:
        apb.prepare([run], out, **{"ap_key": KEY, "paper": PAPER, **more})
    assert "\n" not in str(raised.value)
    assert not [path for path in tmp_path.iterdir() if path.name.startswith((".out", "out"))]


def test_our_models_have_the_tensors_of_the_benchmarks_base_models() -> None:
    with torch.device("meta"):
        pairs = (("vgg16", base_vgg16()), ("resnet18", BaseResNet18()))
    for name, model in pairs:
        expected = {key: tuple(value.shape) for key, value in model.state_dict().items()}
        assert apb.shapes(name) == expected
        assert list(apb.shapes(name)) == list(expected), "in torch's order"


def test_checkpoints_load_strictly_and_give_the_same_logits(whole: Path, networks: dict[Path, nn.Module]) -> None:
    for level, ours in zip((90, 95, 99), networks.values(), strict=True):
        base = loaded(BaseResNet18, whole / "checkpoints" / f"{KEY}_R18_CIFAR10_US_{level}.pt")
        with torch.no_grad():
            torch.testing.assert_close(base(images()), ours(images()), rtol=1e-4, atol=1e-5)
        weights = [value for value in base.parameters() if value.ndim > 1]
        live, size = sum(int(w.count_nonzero()) for w in weights), sum(w.numel() for w in weights)
        assert size == 11_164_352
        assert live == round(size * (100 - level) / 100)


def test_masks_are_multiplied_in(root: Path, runs: list[Path]) -> None:
    # A weight outside its mask must not get through, whoever wrote it there.
    run = linked(runs[2], root / "stray", "model.safetensors")
    tensors, _ = load_tensors(run / "model.safetensors")
    save_tensors(run / "model.safetensors", {k: v + 1 if v.ndim > 1 else v for k, v in tensors.items()})
    apb.prepare([run], root / "stray-out", ap_key=KEY, paper=PAPER)
    saved = torch.load(next((root / "stray-out" / "checkpoints").iterdir()), weights_only=True)["state_dict"]
    assert sum(int(v.count_nonzero()) for v in saved.values() if v.ndim > 1) == 111_644


def test_vgg16_loads_strictly_too(root: Path) -> None:
    model = make(root / "vgg", content(model="vgg16", data="svhn", keep=0.01), evaluation=MEASURED)
    submission = apb.prepare([root / "vgg"], root / "vgg-out", ap_key=KEY, paper=PAPER)
    base = loaded(base_vgg16, root / "vgg-out" / "checkpoints" / f"{KEY}_V16_SVHN_US_99.pt")
    with torch.no_grad():
        torch.testing.assert_close(base(images()), model(images()), rtol=1e-4, atol=1e-5)
    assert any("90 %, 95 %" in line for line in submission.errors), "three sparsities are needed"


def test_the_folder_has_taxonomy_issue_and_checklist(whole: Path) -> None:
    entry = json.loads((whole / "taxonomy.json").read_text())
    assert entry == {  # as the benchmark has it for HARP, up to the structured form, which was not run
        "link_to_paper": PAPER,
        "ap_key": KEY,
        "Type of Pipeline:": "A-Methods Pruning After Training",
        "A: Pretraining ": "Adversarial Training (AT) TRADES",
        "A: Finetuning": "Adversarial Training (AT) TRADES",
        "A: OneShot (1S) vs Iterative (IT)": "1S",
        "Pruning structure": "Unstructured (US)",
        "Pruning locality": "Global Pruning (G)",
        "Pruning criterion": "Least Importance Score (LIS)",
    }
    issue = (whole / "ISSUE.md").read_text()
    for level in (90, 95, 99):
        assert f'"{KEY}_R18_CIFAR10_US_{level}" : ["your_gdrive_link_id", ".pt"]' in issue
    assert issue.count("_Clean Accuracy:_ 80.00\n_Robust Accuracy (AA):_ 40.00\n_Robust Accuracy (HO-FMN):_ 50.00") == 3
    assert "No model needs normalisation" in issue
    assert "Google Drive" in (whole / "CHECKLIST.md").read_text()
    assert not (whole / "normalised.py").exists()
    texts = [path.read_text() for path in whole.rglob("*") if path.suffix in (".md", ".json")]
    assert not any("/home/" in text or str(whole) in text for text in texts), "no paths of the machine"


def test_distances_are_a_plain_pickle_in_which_unbroken_points_are_robust(whole: Path) -> None:
    path = whole / "distances" / f"{KEY}_R18_CIFAR10_US_90.pickle"
    assert pickle.loads(path.read_bytes()) == [0.0, 0.02, 0.04, math.inf]  # as the benchmark reads it
    assert (torch.tensor(pickle.loads(path.read_bytes())) > 8 / 255).float().mean() == 0.5
    assert b"c" not in [op[:1] for op in path.read_bytes().splitlines()], "no global"
    assert json.loads(path.with_suffix(".json").read_text()) == DISTANCES


@given(st.lists(st.floats(0, 1) | st.just(math.inf), min_size=1))
def test_robust_share_is_computed_like_the_benchmarks(values: list[float]) -> None:
    theirs = (torch.tensor(values, dtype=torch.float64) > 8 / 255).double().mean()
    assert apb.robust_share(values) == pytest.approx(float(theirs))


def test_changed_files_are_not_valid(root: Path, runs: list[Path]) -> None:
    whole = root / "tampered"
    prepared = apb.prepare([runs[2]], whole, ap_key=KEY, paper=PAPER)
    assert apb.validate(whole) == list(prepared.problems)
    key = f"{KEY}_R18_CIFAR10_US_99"

    def broken(path: Path, data: bytes) -> str:
        old = path.read_bytes()
        path.write_bytes(data)
        try:
            return "\n".join(line for line in apb.validate(whole) if line.startswith("error"))
        finally:
            path.write_bytes(old)

    for name, other in {
        f"checkpoints/{key}.pt": b"nonsense",
        f"distances/{key}.pickle": pickle.dumps([0.1, 0.02, 0.04, math.inf]),
    }.items():
        assert f"{name} is missing, or not the file that was prepared" in broken(whole / name, other)
    entry = json.loads((whole / "taxonomy.json").read_text())
    changed = {name.strip(" :"): value for name, value in entry.items()}
    assert "pipeline" in broken(whole / "taxonomy.json", json.dumps(changed).encode())
    less = {name: value for name, value in entry.items() if name != "A: Finetuning"}
    assert "A: Finetuning" in broken(whole / "taxonomy.json", json.dumps(less).encode())
    silent = json.dumps({**entry, "Pruning criterion": ""}).encode()
    assert "'Pruning criterion' is empty" in broken(whole / "taxonomy.json", silent)
    issue = (whole / "ISSUE.md").read_text()
    assert "ISSUE.md" in broken(whole / "ISSUE.md", issue.replace("40.00", "49.00").encode())
    assert "damaged" in broken(whole / "submission.json", b"{}")
    assert "can't read" in broken(whole / "submission.json", b"{")
    assert apb.validate(whole / "nowhere")[0].startswith("error")


def test_missing_numbers_and_sparsities_are_reported(root: Path, runs: list[Path]) -> None:
    run = linked(runs[0], root / "bare")
    shutil.rmtree(run / "evaluation")
    (run / "evaluation").mkdir()
    subset = accuracy("autoattack", 400, 1_000, 8 / 255)  # another epsilon: not the benchmark's
    (run / "evaluation" / "a.json").write_text(json.dumps(subset))
    bare = apb.prepare([run], root / "bare-out", ap_key=KEY, paper=PAPER)
    assert bare.errors
    text = "\n".join(bare.errors)
    assert "no AutoAttack at epsilon 0.031" in text
    assert "no L-inf distances" in text
    assert "no run at 95 %, 99 %" in text
    (run / "evaluation" / "a.json").write_text(json.dumps(accuracy("autoattack", 400, 1_000, 0.031)))
    (run / "evaluation" / "b.json").write_text(json.dumps(distances(DISTANCES)))
    weak = apb.prepare([run, *runs[1:]], root / "weak-out", ap_key=KEY, paper=PAPER)
    assert not weak.errors
    assert any("on 1,000 images" in line for line in weak.warnings)
    assert any("1 of 4" in line for line in weak.warnings)
    with pytest.raises(RecipeError, match="exists already"):
        apb.prepare([run], root / "bare-out", ap_key=KEY, paper=PAPER)


def test_plain_accuracy_is_submitted_even_if_the_run_reports_balanced_accuracy(root: Path, runs: list[Path]) -> None:
    uneven = {**score("natural", 8000, 10_000), "value": 0.5, "measure": "balanced accuracy"}
    run = linked(runs[2], root / "svhn", "recipe.yaml", "summary.json")
    text = (run / "recipe.yaml").read_text()
    (run / "recipe.yaml").write_text(text.replace("cifar10", "svhn"))
    edit(run / "summary.json", results=[uneven])
    apb.prepare([run], root / "svhn-out", ap_key=KEY, paper=PAPER)
    assert "_Clean Accuracy:_ 80.00" in (root / "svhn-out" / "ISSUE.md").read_text()


def test_models_data_and_sparsities_outside_the_benchmark_are_refused(
    tmp_path: Path, runs: list[Path], root: Path
) -> None:
    make(tmp_path / "narrow", content(model={"name": "resnet18", "width": 0.05}))
    refuse(tmp_path, tmp_path / "narrow", ModelError, "resnet18 of width 0.05")
    make(tmp_path / "small", content(model="tinynet"))
    refuse(tmp_path, tmp_path / "small", ModelError, "tinynet")
    make(tmp_path / "garments", content(data="fashion", model="tinynet"))
    refuse(tmp_path, tmp_path / "garments", DataError, "trained on fashion")
    make(tmp_path / "dense", content(model="tinynet", keep=None))
    refuse(tmp_path, tmp_path / "dense", RecipeError, "no stage prunes")
    odd = linked(runs[0], root / "odd", "masks.safetensors")
    answer = masks.load(odd / "masks.safetensors")
    answer["layer4.1.conv2.weight"][:] = False
    masks.save(odd / "masks.safetensors", answer)
    refuse(tmp_path, odd, RecipeError, "92.11 % of the weights are pruned")
    refuse(tmp_path, runs[0], RecipeError, "Name_AuthorYearWord", ap_key="HARP")
    refuse(tmp_path, runs[0], RecipeError, "link", paper="arXiv 1234")
    with pytest.raises(RecipeError, match="are both"):
        apb.prepare([runs[0], runs[0]], tmp_path / "out", ap_key=KEY, paper=PAPER)
    make(tmp_path / "other", content(model="tinynet", method="hydra"))
    with pytest.raises(RecipeError, match="differ in method"):
        apb.prepare([runs[0], tmp_path / "other"], tmp_path / "out", ap_key=KEY, paper=PAPER)
    assert not (tmp_path / "out").exists()


def test_the_paper_of_the_method_is_the_default(root: Path, runs: list[Path], tmp_path: Path) -> None:
    apb.prepare([runs[2]], root / "default-out")
    entry = json.loads((root / "default-out" / "taxonomy.json").read_text())
    assert entry["ap_key"] == "HARP_Zhao2023Holistic"
    assert entry["link_to_paper"] == "https://openreview.net/forum?id=sAJDi9lD06L"
    part = {"name": "tinynet", "width": 2}
    make(tmp_path / "bird", content(model=part, method="flying-bird+"))
    robustbench.prepare(tmp_path / "bird", tmp_path / "bird-out", name="Chen2022Sparsity")
    (file,) = (tmp_path / "bird-out").rglob("Chen2022Sparsity.json")
    info = json.loads(file.read_text())
    assert info["name"].startswith("Sparsity Winning Twice") and info["venue"] == "ICLR 2022"
    assert info["authors"].startswith("Chen, Zhang, ") and info["link"] == "https://arxiv.org/abs/2202.09844"
    make(tmp_path / "tandem", content(model=part, method="tandem"))
    with pytest.raises(RecipeError, match="the method 'tandem' has no paper, so give the key yourself"):
        apb.prepare([tmp_path / "tandem"], tmp_path / "out")
    with pytest.raises(RecipeError, match="no paper, so give the paper yourself"):
        apb.prepare([tmp_path / "tandem"], tmp_path / "out", ap_key=KEY)
    with pytest.raises(RecipeError, match="no paper, so give the venue yourself"):
        robustbench.prepare(tmp_path / "tandem", tmp_path / "out", name=CLAIM["name"], title="T", authors="A")


def test_unfinished_runs_are_refused(tmp_path: Path) -> None:
    empty = tmp_path / "empty"
    empty.mkdir()
    refuse(tmp_path, empty, RunFolderError, "no recipe.yaml")
    refuse(tmp_path, tmp_path / "nowhere", RunFolderError, "is no run")
    for number, name in enumerate(("summary.json", "model.safetensors", "masks.safetensors")):
        run = tmp_path / f"half{number}"
        make(run, content(model={"name": "resnet18", "width": 0.05}))
        (run / name).unlink()
        refuse(tmp_path, run, RunFolderError, f"no {name}")
    run = tmp_path / "torn"
    make(run, content(model={"name": "resnet18", "width": 0.05}), evaluation=MEASURED)
    (run / "evaluation" / "0.json").write_text('{"kind": "acc')
    refuse(tmp_path, run, CheckpointError, "can't be read")
    (run / "evaluation" / "0.json").write_text('{"kind": "accuracy"}')
    refuse(tmp_path, run, CheckpointError, "name: Field required")
    (run / "evaluation" / "0.json").unlink()
    edit(run / "summary.json", results=[])
    refuse(tmp_path, run, CheckpointError, "results: List should have at least 1")


# Normalisation


def tiny(mean: float) -> tuple[nn.Module, dict[str, Tensor], nn.Module]:
    """A normalised network, its tensors, and the network behind the normalisation as the benchmark would build it."""
    torch.manual_seed(0)
    options = {"num_classes": 10, "shape": (3, 32, 32), "width": 0.25}
    whole = models.build("resnet8", normalize=([mean] * 3, [0.2, 0.25, 0.3]), **options).eval()
    return whole, dict(whole.state_dict()), models.build("resnet8", **options).eval()


def test_normalisation_is_folded_if_that_is_exact() -> None:
    whole, state, base = tiny(0.0)
    folded, declared = apb.fold(state, "conv1.weight")
    assert declared is None
    base.load_state_dict(folded, strict=True)
    with torch.no_grad():
        torch.testing.assert_close(base(images()), whole(images()), rtol=1e-4, atol=1e-5)


def test_normalisation_with_a_mean_is_declared_because_the_border_would_differ() -> None:
    whole, state, base = tiny(0.5)
    inner, declared = apb.fold(state, "conv1.weight")
    assert declared is not None
    assert declared[0] == [0.5] * 3
    base.load_state_dict(inner, strict=True)
    mean, std = (torch.tensor(values).view(-1, 1, 1) for values in declared)
    with torch.no_grad():
        torch.testing.assert_close(base((images() - mean) / std), whole(images()), rtol=1e-4, atol=1e-5)
    # What folding the mean into the norm behind the first layer would give: equal inside, another map at the border.
    weight = inner["conv1.weight"] / std.view(1, 3, 1, 1)
    shift = (weight * mean.view(1, 3, 1, 1)).sum((1, 2, 3)).view(-1, 1, 1)
    right = nn.functional.conv2d((images() - mean) / std, inner["conv1.weight"], padding=1)
    wrong = nn.functional.conv2d(images(), weight, padding=1) - shift
    difference = (right - wrong).abs()
    assert difference[..., 1:-1, 1:-1].max() < 1e-4 < 0.01 < difference.max()


def test_normalisation_is_declared_with_its_definition(root: Path) -> None:
    part = {"name": "resnet18", "normalize": [[0.5, 0.5, 0.5], [0.25, 0.25, 0.25]]}
    model = make(root / "norm", content(model=part, keep=0.01), evaluation=MEASURED)
    submission = apb.prepare([root / "norm"], root / "norm-out", ap_key=KEY, paper=PAPER)
    assert any("needs normalisation" in line for line in submission.warnings)
    key = f"{KEY}_R18_CIFAR10_US_99"
    assert f"{key}: mean [0.5, 0.5, 0.5], std [0.25, 0.25, 0.25]" in (root / "norm-out" / "ISSUE.md").read_text()
    scope: dict[str, Any] = {}
    exec((root / "norm-out" / "normalised.py").read_text(), scope)
    base = loaded(BaseResNet18, root / "norm-out" / "checkpoints" / f"{key}.pt")
    with torch.no_grad():
        torch.testing.assert_close(
            scope["Normalised"](base, key).eval()(images()), model(images()), rtol=1e-4, atol=1e-5
        )
    (root / "norm-out" / "normalised.py").unlink()
    assert any("normalised.py is missing" in line for line in apb.validate(root / "norm-out"))


# Channels


def test_a_network_with_channels_cut_out_is_submitted_in_the_base_models_width(root: Path) -> None:
    units = {"kind": "channels", "budget": "parameters"}
    model = make(root / "channels", content(keep=0.1, units=units), evaluation=MEASURED)
    submission = apb.prepare([root / "channels"], root / "channels-out", ap_key=KEY, paper=PAPER)
    key = f"{KEY}_R18_CIFAR10_S_90"
    assert not [line for line in submission.errors if "no run at" not in line]
    assert any("share of pruned weights, not of channels" in line for line in submission.warnings)
    base = loaded(BaseResNet18, root / "channels-out" / "checkpoints" / f"{key}.pt")
    with torch.no_grad():
        torch.testing.assert_close(base(images()), model(images()), rtol=1e-4, atol=1e-5)
    (entry,) = json.loads((root / "channels-out" / "submission.json").read_text())["models"]
    living = sum(int(p.count_nonzero()) for p in model.parameters() if p.ndim > 1)
    assert entry["kept"] == living, "the weights of the smaller network, no more and no less"
    assert entry["size"] == sum(p.numel() for p in base.parameters() if p.ndim > 1)
    assert 90 <= 100 * (1 - entry["kept"] / entry["size"]) < 91
    told = json.loads((root / "channels" / "summary.json").read_text())
    kept, size = (sum(layer[name] for layer in told["layers"]) for name in ("kept", "size"))
    issue = (root / "channels-out" / "ISSUE.md").read_text()
    budget = told["budget"]
    assert f"- {key}: {kept:,} of {size:,}; {budget['kept']:,} of {budget['size']:,} parameters" in issue
    assert '"Pruning structure": "Structured (S) channels"' in issue


@pytest.mark.parametrize(("keep", "refused"), [(0.101, True), (0.095, False), (0.085, True)])
def test_structured_sparsity_may_be_above_its_level_and_not_below(root: Path, keep: float, refused: bool) -> None:
    run = root / f"level{keep}"
    make(run, content(keep=keep, units={"kind": "channels", "budget": "parameters"}), evaluation=MEASURED)
    if refused:
        with pytest.raises(RecipeError, match=r"% of the weights are pruned, the benchmark takes 50, 75, 90 %"):
            apb.prepare([run], root / f"level{keep}-out", ap_key=KEY, paper=PAPER)
    else:
        assert apb.prepare([run], root / f"level{keep}-out", ap_key=KEY, paper=PAPER)
    shutil.rmtree(run)


def test_robustbench_accepts_a_network_with_channels_cut_out(root: Path) -> None:
    part = {"name": "resnet18", "width": 0.0625, "normalize": [[0.5, 0.4, 0.3], [0.25, 0.25, 0.2]]}
    made = content(model=part, keep=0.25, units={"kind": "channels"})
    make(root / "rb-channels", made, evaluation=[AUTOATTACK])
    submission = robustbench.prepare(root / "rb-channels", root / "rb-channels-out", **CLAIM)
    assert not submission.problems, "fresh process, strict load, equal logits"
    told = json.loads((root / "rb-channels" / "summary.json").read_text())
    kept, size = (sum(layer[name] for layer in told["layers"]) for name in ("kept", "size"))
    entry = root / "rb-channels-out" / "model_info" / "cifar10" / "Linf" / f"{CLAIM['name']}.json"
    footnote = json.loads(entry.read_text())["footnote"]
    assert f"{told['budget']['kept']:,} of {told['budget']['size']:,} FLOPs kept (" in footnote
    assert f", {kept:,} of {size:,} channels" in footnote and "weights kept" not in footnote


# Taxonomy


def test_every_method_has_a_complete_taxonomy_entry() -> None:
    for name in sorted(set(PRUNERS) - {"dense", "fixed"}):
        entry = taxonomy.entry(recipe.parse(content(method=name)), KEY, PAPER)
        pipeline = entry["Type of Pipeline:"]
        assert pipeline[0] == ("D" if PRUNERS[name].from_scratch else "A")
        assert tuple(entry) == taxonomy.keys(pipeline)
        assert "Not Specified" not in entry.values(), f"{name}: its class has no taxonomy"


@pytest.mark.parametrize(
    ("method", "published"),
    [
        ("r-admm", ("A", "Local Pruning (L)", "Solver Based LWM (SOLWM)")),
        ("hydra", ("A", "Local Pruning (L)", "Least Importance Score (LIS)")),
        ("harp", ("A", "Global Pruning (G)", "Least Importance Score (LIS)")),
        ("mad", ("A", "Global Pruning (G)", "Least Importance Score (LIS)")),
        ("twinrep", ("D", "Global Pruning (G)", "Sparsity Based LWM (SPALWM)")),
        ("dnr", ("D", "Global Pruning (G)", "Least Importance Score (LIS)")),
        ("flying-bird", ("D", "Global Pruning (G)", "Lowest Weight Magnitude LWM")),
    ],
)
def test_published_methods_have_the_entries_of_the_benchmark(method: str, published: tuple[str, ...]) -> None:
    entry = taxonomy.entry(recipe.parse(content(method=method)), KEY, PAPER)
    assert (entry["Type of Pipeline:"][0], entry["Pruning locality"], entry["Pruning criterion"]) == published


def test_objectives_rounds_and_locality_come_from_the_recipe() -> None:
    made = content(method="magnitude", objective="natural")
    made["stages"][1]["pruner"]["strategy"] = "lamp"
    made["stages"][2]["objective"] = "mart"
    entry = taxonomy.entry(recipe.parse(made), KEY, PAPER)
    assert entry["A: Pretraining "] == "Natural Training (NT)"
    assert entry["A: Finetuning"] == "Adversarial Training (AT) MART"
    assert entry["Pruning locality"] == "Global Pruning (G)"
    made["stages"].insert(2, {"name": "again", "pruner": {"name": "magnitude", "keep": 0.05}, "epochs": 1})
    assert taxonomy.entry(recipe.parse(made), KEY, PAPER)["A: OneShot (1S) vs Iterative (IT)"] == "IT"
    before = content(method="random")
    del before["stages"][0]
    entry = taxonomy.entry(recipe.parse(before), KEY, PAPER)
    assert entry["Type of Pipeline:"] == "B-Methods Pruning Before Training"
    assert "B: Training step " in entry
    given_weights = content(model={"name": "resnet18", "weights": "w.pt"})
    del given_weights["stages"][0]
    assert taxonomy.entry(recipe.parse(given_weights), KEY, PAPER)["A: Pretraining "] == "Not Specified"
    assert taxonomy.structure(recipe.parse(content(method="anp-vs"))) == "Structured (S) channels"
    channels = recipe.parse(content(units={"kind": "channels"}))
    assert taxonomy.entry(channels, KEY, PAPER)["Pruning structure"] == "Structured (S) channels"


# RobustBench

CLAIM = {
    "name": "Zhao2023Holistic_R18-x",
    "title": "Holistic Adversarially Robust Pruning",
    "authors": "Qi Zhao, Christian Wressnegger",
    "venue": "ICLR 2023",
    "link": "https://openreview.net/forum?id=sAJDi9lD06L",
}
AUTOATTACK = accuracy("autoattack", 4321, 10_000, 8 / 255)


@pytest.fixture(scope="module")
def claimed(root: Path) -> Path:
    part = {"name": "resnet18", "width": 0.0625, "normalize": [[0.5, 0.4, 0.3], [0.25, 0.25, 0.2]]}
    make(root / "rb", content(model=part, keep=0.1), evaluation=[AUTOATTACK])
    submission = robustbench.prepare(root / "rb", root / "rb-out", **CLAIM)
    assert not submission.problems, "fresh process, strict load, equal logits"
    return root / "rb-out"


def test_robustbench_entry_has_the_numbers_of_the_run(claimed: Path) -> None:
    info = json.loads((claimed / "model_info" / "cifar10" / "Linf" / f"{CLAIM['name']}.json").read_text())
    assert list(info) == list(robustbench.Entry.model_fields)
    assert info["clean_acc"] == "80.00"
    assert info["autoattack_acc"] == info["reported"] == "43.20", (
        "counts of ten classes are rounded in the test's score"
    )
    assert (info["eps"], info["dataset"], info["additional_data"], info["unreliable"]) == (
        "8/255",
        "cifar10",
        False,
        False,
    )
    assert "weights kept (10.0" in info["footnote"]
    text = (claimed / "Zhao2023Holistic_R18_x.py").read_text()
    assert "harp" not in text.lower().replace("harp's", "")
    assert "**Robust accuracy**: 43.20" in (claimed / "ISSUE.md").read_text()


def test_robustbench_validation_finds_errors(claimed: Path) -> None:
    path = claimed / "Zhao2023Holistic_R18_x.py"
    old = path.read_text()
    path.write_text(old.replace("x - self.mean", "x + self.mean"))
    assert any("other logits" in line for line in robustbench.validate(claimed))
    path.write_text("import harp\n" + old)
    assert any("without HARP" in line for line in robustbench.validate(claimed))
    path.unlink()
    assert any("is missing" in line for line in robustbench.validate(claimed))
    info = claimed / "model_info" / "cifar10" / "Linf" / f"{CLAIM['name']}.json"
    edit(info, eps="0.031")
    assert any("eps: Input should be '8/255'" in line for line in robustbench.validate(claimed))
    edit(info, clean_acc=80.0, eps="8/255")
    assert any("clean_acc" in line for line in robustbench.validate(claimed))
    assert robustbench.validate(claimed / "nowhere")[0].startswith("error")


def test_every_built_in_model_has_a_stand_alone_definition(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in models.MODELS:
        shape = (3, 64, 64) if name == "resnet50" else (3, 32, 32)
        options = {"width": 2 if name in ("convnet", "tinynet") else 0.0625}
        torch.manual_seed(0)
        ours = models.build(name, num_classes=10, shape=shape, **options).eval()
        part = recipe.parse(content(model={"name": name, **options})).model
        text = define(part, "A model.", "Model", 10, shape, options).text
        scope: dict[str, Any] = {"__name__": "defined"}
        with monkeypatch.context() as patched:
            patched.setitem(sys.modules, "harp", None)
            exec(compile(text, "definition", "exec"), scope)
        model = scope["Model"]().eval()
        model.load_state_dict({f"net.{key}": value for key, value in ours.state_dict().items()}, strict=True)
        x = torch.rand(2, *shape)
        with torch.no_grad():
            assert torch.equal(model(x), ours(x)), name


def test_a_users_model_file_is_part_of_the_submission(root: Path, tmp_path: Path) -> None:
    source = (
        "from torch import nn\n\n\ndef make(num_classes, hidden=4):\n"
        "    return nn.Sequential(nn.Flatten(), nn.Linear(3072, hidden), nn.ReLU(), nn.Linear(hidden, num_classes))\n"
    )
    (tmp_path / "mine.py").write_text(source)
    part = {"name": f"{tmp_path / 'mine.py'}:make", "hidden": 5}
    weak = accuracy("autoattack", 400, 1_000, 0.031)
    make(tmp_path / "run", content(model=part, keep=0.1), evaluation=[weak])
    submission = robustbench.prepare(tmp_path / "run", tmp_path / "out", **CLAIM)
    assert (tmp_path / "out" / "Zhao2023Holistic_R18_x_source.py").read_text() == source
    assert submission.errors == [
        "no AutoAttack at 8/255, L-inf, was measured (`harp evaluate` the run, then prepare again); "
        "there are results for another threat model, linf 0.031"
    ]
    texts = [path.read_text() for path in (tmp_path / "out").rglob("*") if path.suffix in (".py", ".md", ".json")]
    assert not any(str(tmp_path) in text for text in texts)


def test_robustbench_refuses_other_data_names_and_models(tmp_path: Path) -> None:
    def refused(kind: type[HarpError], match: str, run: Path, **more: Any) -> None:
        with pytest.raises(kind, match=match) as raised:
            robustbench.prepare(run, tmp_path / "out", **{**CLAIM, **more})
        assert "\n" not in str(raised.value)
        assert not (tmp_path / "out").exists()

    make(tmp_path / "garments", content(data="fashion", model={"name": "tinynet", "width": 2}))
    refused(DataError, "trained on fashion", tmp_path / "garments")
    refused(RecipeError, "NameYearFirstword", tmp_path / "garments", name="x")
    refused(RecipeError, "link", tmp_path / "garments", link="arXiv")
    make(tmp_path / "run", content(model={"name": "tinynet", "width": 2}))
    text = (tmp_path / "run" / "recipe.yaml").read_text()
    (tmp_path / "run" / "recipe.yaml").write_text(text.replace("name: tinynet", "name: timm:resnet18"))
    refused(ModelError, "a file, and train with model: file.py:function", tmp_path / "run")
    refused(RunFolderError, "is no run", tmp_path / "nowhere")
