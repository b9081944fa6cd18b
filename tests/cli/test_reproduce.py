"""The command `harp reproduce`."""

import json
import os
from pathlib import Path

import pytest
import yaml

from harp.experiments.reproduction import claim, evidence
from support.commands import SHORT, Harp, refused
from support.slurm import Cluster

CLAIM = {
    "title": "two methods",
    "says": "HARP is ahead of magnitude pruning.",
    "place": "Table 1",
    "labels": ["tab:mine"],
    "source": "printed",
    "expected": {"digits": {"natural": {"harp": {"10%": 50.0}}}},
    "tolerance": 50.0,
    "experiments": {
        "digits": {
            "recipe": SHORT,
            "methods": ["harp", "magnitude"],
            "keep": ["10%"],
            "seeds": [0],
            "attacks": ["pgd-2"],
        }
    },
    "orders": [{"experiment": "digits", "measure": "pgd-2", "better": "harp", "than": ["magnitude"], "keep": ["10%"]}],
}


def test_the_list_names_every_claim_with_its_verdict(harp: Harp) -> None:
    code, out, _ = harp("reproduce", "--json")
    rows = json.loads(out)["claims"]
    assert code == 0
    assert [row["claim"] for row in rows] == list(claim.shipped())
    verdicts = {row["claim"]: (row["verdict"], row["small_verdict"]) for row in rows}
    assert verdicts["methods"] == ("reproduced: 1 of 1", "no small variant")
    assert verdicts["ablation"] == ("not run", "order holds: at small scale, 4 of 4")
    assert verdicts["training-cost"][0].startswith("differs: 1 of 6")


def test_a_claim_is_run_judged_bundled_and_checked(harp: Harp, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "claims"
    folder.mkdir()
    (folder / "mine.yaml").write_text(yaml.safe_dump(CLAIM), encoding="utf-8")
    monkeypatch.setattr(claim, "SHIPPED", folder)
    code, out, err = harp("reproduce", "mine", "--bundle", "mine.json", "--out", "runs")
    assert code == 0, err
    assert "digits: harp at 10 %, natural" in out and "reproduced" in out
    assert "on one seed, which has no interval" in out
    assert {path.name for path in Path("runs/reproduce-mine").iterdir()} >= {"table.md", "table.tex", "evidence.json"}
    bundle = evidence.read(Path("mine.json"))
    assert {(record.method, record.keep) for record in bundle.records} == {
        ("dense", None),
        ("harp", 0.1),
        ("magnitude", 0.1),
    }
    pruned = [record for record in bundle.records if record.keep]
    assert all({"kept first", "kept last", "middle magnitude"} < record.values.keys() for record in pruned)
    assert {"pruned natural", "pruned robust"} < pruned[0].values.keys()

    code, out, err = harp("reproduce", "mine", "--check", "mine.json", "--json")
    assert code == 0, err
    from_bundle = json.loads(out)
    code, out, err = harp("reproduce", "mine", "--check", "runs", "--json")
    assert code == 0, err
    assert json.loads(out) == from_bundle

    changed = json.loads(Path("mine.json").read_text(encoding="utf-8"))
    changed["records"][-1]["kept"] += 1
    Path("changed.json").write_text(json.dumps(changed), encoding="utf-8")
    refused(harp, "reproduce", "mine", "--check", "changed.json", said="the budget is")


def test_the_cost_is_told_without_running(harp: Harp) -> None:
    code, out, _ = harp("reproduce", "overview", "--cost", "--json")
    assert code == 0
    assert json.loads(out) == {"claim": "overview", "small": False, "runs": 174, "epochs": 27510}
    code, out, _ = harp("reproduce", "overview", "--cost")
    assert code == 0 and "174 runs, 27,510 epochs" in out


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["overvew"], "did you mean 'overview'?"),
        (["--small"], "--small needs a claim: `harp reproduce` lists them"),
        (["imagenet", "--small"], "imagenet has no small experiment"),
        (["overview", "--seeds", "one"], "--seeds one: give whole numbers like 1,2"),
        (["overview", "--check", "nowhere"], "--check nowhere: give a folder of runs or a file that --bundle wrote"),
    ],
)
def test_wrong_arguments_are_one_line(harp: Harp, words: list[str], said: str) -> None:
    refused(harp, "reproduce", *words, said=said)


def test_runs_can_be_jobs_of_a_cluster(harp: Harp, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    cluster = Cluster(tmp_path / "cluster")
    monkeypatch.setenv("PATH", str(cluster.bin), prepend=os.pathsep)
    code, out, err = harp("reproduce", "end-to-end", "--small", "--seeds", "1", "--launcher", "slurm", "--json")
    assert code == 0, err
    assert "0 of 7 finished" in err
    assert len(list(cluster.root.glob("*.job"))) == 7
    assert json.loads(out)["verdict"] == "not run"
    refused(harp, "reproduce", "overview", "--sbatch", "--time=1", said="are for --launcher slurm")
