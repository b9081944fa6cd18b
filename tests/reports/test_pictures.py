"""Tables and pictures of results in notebooks."""

import builtins
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import harp
from harp.errors import RecipeError
from harp.evaluation.model_checks import examine
from harp.experiments.plan import spread
from harp.experiments.table import Results
from harp.reports.pictures import Picture
from support import finished_run

SCORE = harp.Score("pgd-20", (40, 45, 0), (50, 50, 0))
FITTED = harp.Fitted({"a": torch.tensor([True, False])}, [{"loss": 2.0}, {"loss": 1.0, "natural": 0.5}], 2)
ROW = {"seeds": 1, "failed": 0, "reason": None, "epochs": "1", "seconds": 1.0, "kept": [5, 5]}
ROW |= {"natural": 0.6, "natural_half": None, "robust_half": None, "at_chance": 0, "budget_unmet": 0}
RESULTS = Results(
    study="s", model="net", data="digits", attack="pgd-20", rank_by="pgd-20", unit="weights", size=100,
    rows=[{**ROW, "method": name, "keep": keep, "robust": 0.5} for keep in (0.1, 0.05) for name in ("harp", "hydra")],
)  # fmt: skip


@pytest.fixture
def run(tmp_path: Path) -> Path:
    finished_run.make(tmp_path / "run", finished_run.content(model="tinynet"))
    return tmp_path / "run"


def test_a_score_says_its_accuracy_and_interval() -> None:
    assert repr(SCORE) == "Score(pgd-20: 85.0% of 100 images, 95 % interval 76.7% – 90.7%)"
    html = SCORE._repr_html_()
    assert "85.0%" in html and "76.7% – 90.7%" in html


def test_results_show_short_tables(run: Path) -> None:
    units = harp.Weights(nn.Sequential(nn.Flatten(), nn.Linear(4, 3)))
    loaded = harp.load_run(run)
    examined = examine(nn.Sequential(nn.Flatten(), nn.Linear(4, 3)), torch.rand(3, 1, 2, 2), torch.arange(3))
    tables = {
        "Fitted(kept 1 of 2": FITTED._repr_html_(),
        "2 (chosen)": FITTED._repr_html_(),
        "45.0%": loaded._repr_html_(),
        "12 weights in 1 layer can be pruned": examined._repr_html_(),
        '<td style="text-align:left;padding:2px 12px 2px 0">total</td>': spread(units, "uniform", 0.5)._repr_html_(),
        "keep 5 %: 5 of 100 weights": RESULTS._repr_html_(),
    }
    for words, table in tables.items():
        assert words in table and table.count("<tr>") <= 12, words
    assert "LoadedRun(" in repr(loaded) and "natural 80.0%" in repr(loaded)
    assert json.loads(json.dumps(RESULTS)) == RESULTS


def test_every_result_has_a_picture(run: Path, tmp_path: Path) -> None:
    units = harp.Weights(nn.Sequential(nn.Flatten(), nn.Linear(4, 3)))
    for number, result in enumerate((SCORE, FITTED, RESULTS, run, str(run), spread(units, "uniform", 0.5))):
        picture = harp.plot(result)
        assert (picture._repr_png_() or b"").startswith(b"\x89PNG")
        assert picture.save(tmp_path / f"{number}.svg").stat().st_size > 1000
    assert harp.plot(harp.load_run(run)) == harp.plot(run)
    assert "class 0 = 80 %, class 1 = 90 %" in repr(harp.plot(SCORE)) and "class 2" not in repr(harp.plot(SCORE))


def test_wrong_things_are_refused_in_one_line(tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match="can't plot a int: give a Score"):
        harp.plot(3)
    with pytest.raises(RecipeError, match=r"the ending has to be one of .*png"):
        harp.plot(SCORE).save(tmp_path / "x.bmp9")
    assert not list(tmp_path.iterdir())


def test_without_matplotlib_the_numbers_are_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def without_matplotlib(name: str, *rest: Any, **more: Any) -> Any:
        if name.startswith("matplotlib"):
            raise ImportError(name)
        return real(name, *rest, **more)

    monkeypatch.setattr(builtins, "__import__", without_matplotlib)
    picture = harp.plot(SCORE)
    assert isinstance(picture, Picture) and picture._repr_png_() is None
    assert repr(picture).startswith("pgd-20: 85.0% of 100 images")
