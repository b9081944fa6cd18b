"""Claims as tables, figures and the evidence page."""

import csv
from pathlib import Path

import pytest

from harp.experiments.reproduction import claim, evidence
from harp.reports import claims
from support.paths import ROOT

CLAIMS = claim.shipped()


def shipped(name: str, *, small: bool) -> evidence.Evidence:
    found = evidence.shipped(name, small=small)
    assert found is not None
    return found


def test_the_evidence_page_is_up_to_date() -> None:
    found = {(name, small): evidence.shipped(name, small=small) for name in CLAIMS for small in (False, True)}
    page = claims.page(CLAIMS.values(), found)
    written = (ROOT / "docs" / "evidence" / "reproductions.md").read_text(encoding="utf-8")
    assert page == written, "run scripts/make-evidence-page"


def test_a_table_has_published_and_own_numbers_side_by_side() -> None:
    chosen = CLAIMS["cifar10"]
    record = evidence.Record(
        experiment="vgg16-pgd",
        method="dense",
        keep=None,
        seed=1,
        recipe="",
        kept=1,
        size=1,
        values={"natural": evidence.Value(value=80.0, images=10_000)},
    )
    rows = claims.tables(chosen, evidence.made(chosen, [record], small=False), small=False)["vgg16-pgd"]
    assert rows[0][:2] == ["method", "natural"]
    assert rows[1][:2] == ["dense", "79.68 | 80.0 ± 0.8"]
    assert rows[1][2] == "47.6"


def test_small_tables_have_no_published_numbers() -> None:
    rows = claims.tables(CLAIMS["overview"], shipped("overview", small=True), small=True)["fashion-mnist"]
    assert "natural at 0.25 %" in rows[0]
    assert all("|" not in text for row in rows for text in row)
    assert {row[0] for row in rows[1:]} == {"dense", "harp", "hydra", "r-admm", "bcs-p"}


def test_all_files_of_a_claim_are_written(tmp_path: Path) -> None:
    found = shipped("overview", small=True)
    paths = claims.write(tmp_path, CLAIMS["overview"], found, small=True)
    names = ["evidence.json", "figure.png", "figure.svg", "table.csv", "table.md", "table.tex"]
    assert sorted(path.name for path in paths) == names
    assert sorted(path.name for path in tmp_path.iterdir()) == names
    assert evidence.read(tmp_path / "evidence.json") == found
    with (tmp_path / "table.csv").open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    (row,) = (row for row in rows if [*row.values()][:4] == ["fashion-mnist", "pgd-20", "harp", "0.01"])
    assert (row["published"], row["seeds"], row["images"]) == ("", "10", "2000")
    assert float(row["low"]) < float(row["mean"]) < float(row["high"])
    assert {row["experiment"] for row in rows} == {"fashion-mnist", "cifar10"}
    latex = (tmp_path / "table.tex").read_text(encoding="utf-8")
    assert r"natural at 0.25 \%" in latex and r"$\pm$" in latex
    tables = claims.tables(CLAIMS["overview"], found, small=True).values()
    assert latex.count("&") == sum(len(row) - 1 for table in tables for row in table)


@pytest.mark.parametrize("name", ["gamma-steps", "strategy-resnet18", "channels", "methods"])
def test_every_kind_of_figure_can_be_drawn_without_runs(name: str, tmp_path: Path) -> None:
    claims.draw(tmp_path / "figure.png", CLAIMS[name], None, small=False)
    assert (tmp_path / "figure.png").read_bytes().startswith(b"\x89PNG")


def test_seeds_that_were_not_run_are_not_listed() -> None:
    chosen = CLAIMS["overview"]
    record = shipped("overview", small=True).records[0]
    records = [record.model_copy(update={"seed": seed}) for seed in (3, 1, 2, 7)]
    page = claims.page([chosen], {("overview", True): evidence.made(chosen, records, small=True)})
    assert "seeds 1 to 3, 7," in page
