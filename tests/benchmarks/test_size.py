"""The benchmark of file sizes runs, and its numbers add up."""

import json

import pytest
import torch

from benchmarks import size

TINY = ["--model", "resnet8", "--width", "0.5", "--keep", "0.1"]


@pytest.mark.parametrize("flags", [[], ["--strategy", "igq", "--others", "f32"]], ids=["uniform", "igq"])
def test_it_prints_a_table_and_one_json_object(flags: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert size.main([*TINY, *flags]) == 0
    lines = capsys.readouterr().out.splitlines()
    result = json.loads(lines[-1])
    stored = result["bytes"]
    assert [line.split()[0] for line in lines[:-1]] == list(stored)
    assert stored["ours_int8"] < stored["ours_f16"] < stored["ours_f32"] < stored["csr"] < stored["dense"]
    assert stored["ours_f16"] < stored["zlib"] < stored["dense"]
    assert result["ratio_size"] == pytest.approx(stored["dense"] / stored["ours_f16"], rel=0.01)
    assert result["ratio_to_bound"] == pytest.approx(stored["ours_f16"] / stored["bound"], rel=0.01)
    assert 1 < result["ratio_positions"] < 1.1


@pytest.mark.filterwarnings("ignore:Sparse CSR")
def test_the_bytes_of_csr_are_those_of_torch() -> None:
    mask = torch.rand(30, 40, generator=torch.Generator().manual_seed(0)) < 0.1
    rows = mask.float().to_sparse_csr()
    stored = 4 * (rows.crow_indices().numel() + rows.col_indices().numel() + rows.values().numel())
    assert size.csr({"weight": mask}) == stored


@pytest.mark.parametrize("arguments", [["--model", "nope"], ["--keep", "2"], ["--strategy", "nope"]])
def test_what_is_wrong_is_one_line(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert size.main([*TINY, *arguments]) == 2
    assert len(capsys.readouterr().err.splitlines()) == 1
