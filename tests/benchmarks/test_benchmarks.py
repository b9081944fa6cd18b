"""The benchmarks run and compare like with like. How long it takes is the machine's business: no test asserts it."""

import json
from pathlib import Path

import pytest
from benchmarks.timing import Times, interleaved

from benchmarks import scaling, slim, stability, step

TINY = ["--model", "resnet8", "--width", "0.5", "--batch", "8", "--steps", "2", "--repeats", "2"]
KEYS = {
    "model",
    "batch",
    "steps",
    "threads",
    "repeats",
    "ours_seconds",
    "twin_seconds",
    "floor_seconds",
    "speedup_vs_twin",
    "ratio_to_floor",
    "torch",
    "cpu",
    "metric",
}


@pytest.mark.parametrize("flags", [[], ["--authors-clean-forward", "--clock", "wall"]], ids=["plain", "flags"])
def test_step_prints_a_table_and_one_json_object(flags: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert step.main([*TINY, *flags]) == 0
    out, err = capsys.readouterr()
    result = json.loads(out.splitlines()[-1])
    assert result.keys() >= KEYS
    assert (result["model"], result["batch"], result["steps"], result["repeats"]) == ("resnet8", 8, 2, 2)
    assert result["metric"] == ("wall_seconds" if flags else "cpu_seconds")
    assert "twin" in out and "repeat 2/2" in err


def test_both_ways_compute_the_same(capsys: pytest.CaptureFixture[str]) -> None:
    step.main(TINY)
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert result["ours_loss"] == pytest.approx(result["twin_loss"], rel=1e-3)
    assert result["equal_mask_entries"] > 0.999


@pytest.mark.parametrize(
    "arguments",
    [
        ["--model", "resnet8", "--batch", "0"],
        ["--model", "resnet8", "--batch", "8", "--width", "none"],
        ["--model", "resnet8"],
    ],
)
def test_bad_arguments_are_one_line(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        step.main(arguments)
    assert stop.value.code == 2
    assert len(capsys.readouterr().err.splitlines()) == 1


def test_an_unknown_model_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert step.main(["--model", "nope", "--batch", "8"]) == 2
    assert len(capsys.readouterr().err.splitlines()) == 1


def test_ways_take_turns_from_a_rotating_start() -> None:
    calls: list[str] = []
    variants = {name: lambda name=name: calls.append(name) for name in "abc"}
    times = interleaved(variants, 3)
    assert calls == list("abcbcacab")
    assert all(len(taken.cpu) == len(taken.wall) == 3 for taken in times.values())


def test_median_and_spread() -> None:
    times = Times(cpu=[4.0, 1.0, 2.0], wall=[1.0])
    assert (times.median("cpu"), times.spread("cpu"), times.spread("wall")) == (2.0, 1.5, 0.0)


@pytest.mark.parametrize("path", sorted(Path(step.__file__).parent.glob("results/step-*.json")), ids=lambda p: p.stem)
def test_stored_results_are_what_the_benchmark_prints(path: Path) -> None:
    assert json.loads(path.read_text()).keys() >= KEYS


SMALL = ["--model", "resnet8", "--width", "0.5", "--repeats", "1", "--train-batch", "4"]


def test_slim_compares_small_networks_with_the_dense_one(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(slim, "version", lambda: None)
    assert slim.main(SMALL) == 0
    out = capsys.readouterr().out
    result = json.loads(out.splitlines()[-1])
    assert result["flops_ratio"]["4x"] == pytest.approx(4, rel=0.1)
    assert result["speedup_torch"].keys() == {f"{f}x batch {b}" for f in (4, 10) for b in (1, 64)}
    assert result["speedup_finetune"].keys() == {"4x", "10x"}
    assert result["speedup_ort"] == {}
    assert "share" in out


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # the exporter's own
def test_slim_measures_onnx_runtime_too(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("onnxruntime")
    assert slim.main(SMALL) == 0
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert result["speedup_ort"].keys() == result["speedup_torch"].keys()


@pytest.mark.slow
def test_scaling_compares_two_processes_with_one(capsys: pytest.CaptureFixture[str]) -> None:
    tiny = ["--model", "resnet8", "--batch", "8", "--steps", "1", "--turn", "1", "--repeats", "2", "--memory", "4"]
    assert scaling.main(tiny) == 0
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert result["ratio"] > 0 and result["effort"] > 0 and 0 < result["pipeline_share"] < 1
    assert len(result["memory_growth_mb"]) == 2 and len(result["wall_seconds"]["two"]) == 2


def test_harp_meets_its_budget_and_stays_above_chance_with_default_options(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    short = ["--short", "--jobs", "1", "--out", str(tmp_path)]
    assert stability.main(short) == 0
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert (result["runs"], result["missing"], result["both_at_chance"]) == (3, 0, 0)
    assert all(cell["ours"]["kept"] == cell["ours"]["budget"] for cell in result["cells"])
    monkeypatch.setattr(stability, "measure", None)  # finished cells are read, not computed
    assert stability.main(short) == 0
    assert json.loads(capsys.readouterr().out.splitlines()[-1]) == result
    assert (result["unmet_cells"], result["at_chance_cells"]) == ([], [])


STABLE_RUN = {"method": "harp", "met": True, "natural": 0.7, "robust": 0.5, "at_chance": False, "budget": 1085}
STABLE_RUN |= {"dense_natural": 0.8, "dense_robust": 0.6, "n": 1000, "device": "cpu", "versions": {}}


def test_stability_counts_failures_and_names_the_worst_cell(tmp_path: Path) -> None:
    cells = [stability.Cell("harp", "plain", keep, 1, stability.SHORT) for keep in (0.1, 0.01, 0.001)]
    lost = {"met": False, "robust": 0.1, "at_chance": True}
    pairs = [({}, {}), (lost, {}), ({**lost, "met": True}, lost)]
    for cell, (ours, rival) in zip(cells, pairs, strict=True):
        record = {"cell": cell.name, "method": "harp", "network": "plain", "keep": cell.keep}
        record |= {"ours": STABLE_RUN | ours, "rival": STABLE_RUN | rival}
        record["gap"] = 100 * (record["ours"]["robust"] - record["rival"]["robust"])
        cell.file(tmp_path).parent.mkdir(exist_ok=True)
        cell.file(tmp_path).write_text(json.dumps(record))
    result = stability.collected(cells, tmp_path)
    assert (result["runs"], result["unmet"], result["at_chance"], result["both_at_chance"]) == (3, 1, 1, 1)
    assert (result["worst_gap_to_hydra_lamp"], result["worst_cell"]) == (-40, "plain, keep 1 %, seed 1")
    assert stability.table(result["cells"]).count("\n") == 4


@pytest.mark.parametrize("flags", [["--keep", "0"], ["--method", "nope"], ["--method", "dnr"], ["--networks", "x"]])
def test_stability_refuses_bad_arguments_in_one_line(flags: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        stability.main(flags)
    assert stop.value.code == 2
    assert len(capsys.readouterr().err.splitlines()) == 1
