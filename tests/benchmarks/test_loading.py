"""The benchmark of streaming runs. How long it takes is the machine's business: no test asserts it."""

import json

import pytest

from benchmarks import loading

pytest.importorskip("PIL.Image")


def test_it_prints_a_table_and_one_json_object(capsys: pytest.CaptureFixture[str]) -> None:
    small = ["--images", "24", "--batch", "8", "--repeats", "2", "--workers", "0", "1", "--sizes", "64"]
    assert loading.main(small) == 0
    out, err = capsys.readouterr()
    result = json.loads(out.splitlines()[-1])
    assert [row["way"] for row in result["rows"]] == [
        f"64 {where}, {workers} workers" for where in ("folder", "shards") for workers in (0, 1)
    ]
    assert all(row["images_per_second"] > 0 for row in result["rows"])
    assert [row["ahead_mb"] for row in result["rows"]] == [0.0, round(2 * 8 * 3 * 64 * 64 / 1e6, 1)] * 2
    assert "repeat 2/2" in err and "64 folder, 1 workers" in out


@pytest.mark.parametrize("arguments", [["--images", "0"], ["--workers", "x"], ["--sizes", "32"]])
def test_bad_arguments_are_one_line(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        loading.main(arguments)
    assert stop.value.code == 2
    assert len(capsys.readouterr().err.splitlines()) == 1
