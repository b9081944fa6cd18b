"""Checkpoints: whatever is in a file, it is read safely or refused in one line."""

import io
import json
import os
import pickle
import struct
import zipfile
from collections import OrderedDict
from pathlib import Path

import numpy as np
import pytest
import safetensors.torch
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from harp.errors import CheckpointError
from harp.models import Normalized
from harp.models.weights import load_weights, save_model
from harp.system.tensors import load_state, load_tensors, save_state, save_tensors
from support import cases
from support.checkpoints import only, refused

DTYPES = [torch.float32, torch.float16, torch.bfloat16, torch.float64, torch.int64, torch.uint8, torch.bool]


# ---------------------------------------------------------------- tensors


@st.composite
def tensors(draw) -> Tensor:
    shape = draw(st.lists(st.integers(0, 4), max_size=3))
    tensor = torch.randint(0, 2, shape, generator=torch.Generator().manual_seed(draw(st.integers(0, 99))))
    tensor = tensor.to(draw(st.sampled_from(DTYPES)))
    form = draw(st.sampled_from(["as it is", "transposed", "sliced", "expanded"]))
    if form == "transposed":
        return tensor.permute(list(reversed(range(tensor.dim()))))
    if form == "sliced" and shape:
        return tensor[::2]
    if form == "expanded":
        return tensor.expand(3, *shape)
    return tensor


NAMES = st.text(max_size=8).filter(lambda name: name != "__metadata__")


@settings(max_examples=40, deadline=None)
@given(st.dictionaries(NAMES, tensors(), max_size=5), st.dictionaries(st.text(max_size=5), st.text(max_size=5)))
def test_tensors_round_trip(tmp_path_factory, content, metadata):
    path = tmp_path_factory.mktemp("t") / "a.safetensors"
    save_tensors(path, content, metadata)
    back, text = load_tensors(path)
    assert text == metadata
    assert back.keys() == content.keys()
    for name, tensor in content.items():
        assert back[name].dtype == tensor.dtype
        assert torch.equal(back[name], tensor)


def test_shared_memory(tmp_path):
    base = torch.arange(6.0)
    content = {"a": base, "b": base, "c": base[:3], "d": base.view(2, 3).t(), "e": nn.Parameter(base)}
    save_tensors(tmp_path / "a.safetensors", content)
    back, metadata = load_tensors(tmp_path / "a.safetensors")
    assert metadata == {}
    assert all(torch.equal(back[name], content[name]) for name in content)
    back["a"].zero_()
    assert torch.equal(back["b"], base)


def test_loaded_tensors_do_not_change_with_the_file(tmp_path):
    path = tmp_path / "a.safetensors"
    save_tensors(path, {"x": torch.ones(1000)})
    x = load_tensors(path)[0]["x"]
    path.write_bytes(b"\0" * path.stat().st_size)
    assert torch.equal(x, torch.ones(1000))


def test_values_that_are_not_tensors_are_refused(tmp_path):
    path = tmp_path / "a.safetensors"
    assert "'x'" in refused(save_tensors, path, {"x": 3})
    assert "'x'" in refused(save_tensors, path, {"x": torch.eye(3).to_sparse()})
    assert "'x'" in refused(save_tensors, path, {"x": torch.ones(3, device="meta")})
    assert "__metadata__" in refused(save_tensors, path, {"__metadata__": torch.ones(3)})
    assert "can't write" in refused(save_tensors, path, {"x": torch.ones(3)}, {"epoch": 3})
    assert only(tmp_path) == []


@pytest.mark.parametrize("wrapper", [None, "state_dict", "model", "net", "model_state_dict", "ema"])
@pytest.mark.parametrize("prefix", ["", "module.", "_orig_mod.", "module._orig_mod."])
def test_torch_files_of_training_scripts(tmp_path, wrapper, prefix):
    state = OrderedDict((prefix + name, tensor) for name, tensor in cases.build("conv").state_dict().items())
    content = state if wrapper is None else {wrapper: state, "epoch": 3, "best": torch.tensor(0.9)}
    torch.save(content, tmp_path / "a.pt")
    back, metadata = load_tensors(tmp_path / "a.pt")
    assert metadata == {}
    assert list(back) == list(cases.build("conv").state_dict())


def test_other_torch_files(tmp_path):
    path = tmp_path / "a.pth"
    torch.save({"state_dict": {"model": {"w": nn.Parameter(torch.ones(2))}}}, path)
    assert load_tensors(path)[0]["w"].requires_grad is False
    torch.save({"w": torch.ones(2)}, path, _use_new_zipfile_serialization=False)
    assert torch.equal(load_tensors(path)[0]["w"], torch.ones(2))
    save_tensors(path, {"w": torch.ones(3)})  # whatever it is called
    assert torch.equal(load_tensors(path)[0]["w"], torch.ones(3))
    torch.save({"w": torch.ones(2), "epoch": 3}, path)
    assert "'epoch' is a int" in refused(load_tensors, path)
    torch.save([torch.ones(2)], path)
    assert "list" in refused(load_tensors, path)
    torch.save({}, path)
    refused(load_tensors, path)
    torch.save({"net": nn.Linear(2, 2)}, path)
    assert "torch.nn.modules.linear.Linear" in refused(load_tensors, path)
    torch.save({"w": torch.ones(1).expand(1000, 1000)}, path)
    assert "[1000, 1000]" in refused(load_tensors, path)


def test_names_that_only_look_like_prefixes_stay(tmp_path):
    torch.save({"module.a": torch.ones(1), "head": torch.ones(1)}, tmp_path / "a.pt")
    assert set(load_tensors(tmp_path / "a.pt")[0]) == {"module.a", "head"}
    save_tensors(tmp_path / "a.safetensors", {"module.a": torch.ones(1)})
    assert set(load_tensors(tmp_path / "a.safetensors")[0]) == {"module.a"}


# ---------------------------------------------------------------- files that are not what they should be

READERS = [load_tensors, load_state, lambda path: load_weights(cases.build("conv"), path)]


def written(folder: Path) -> dict[str, bytes]:
    save_tensors(folder / "a.safetensors", {"x": torch.ones(50), "y": torch.zeros(3, dtype=torch.int64)})
    save_state(folder / "a.pt", {"x": torch.ones(50), "n": [1, "two", None]})
    torch.save({"x": torch.ones(50)}, folder / "old.pt", _use_new_zipfile_serialization=False)
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_truncated_anywhere(tmp_path):
    for name, whole in written(tmp_path).items():
        reader = load_tensors if name.endswith("safetensors") else load_state
        step = max(1, len(whole) // 150)
        for length in [*range(0, len(whole), step), len(whole) - 1]:
            (tmp_path / name).write_bytes(whole[:length])
            refused(reader, tmp_path / name)


def test_damaged_anywhere_is_read_or_refused(tmp_path):
    generator = torch.Generator().manual_seed(0)
    for name, whole in written(tmp_path).items():
        for _ in range(150):
            place, value = (
                torch.randint(0, len(whole), (), generator=generator),
                torch.randint(0, 256, (), generator=generator),
            )
            damaged = bytearray(whole)
            damaged[int(place)] = int(value)
            (tmp_path / name).write_bytes(damaged)
            for reader in (load_tensors, load_state):
                try:
                    reader(tmp_path / name)
                except CheckpointError as error:
                    assert "\n" not in str(error)


@settings(max_examples=80, deadline=None)
@given(
    st.sampled_from([b"", b"PK\x03\x04", b"\x80\x02", b"\x80\x04", b"\x08\0\0\0\0\0\0\0{", b"{", b"\x1f\x8b"]),
    st.binary(max_size=300),
    st.sampled_from([".pt", ".safetensors", ""]),
)
def test_random_bytes(tmp_path_factory, beginning, rest, suffix):
    path = tmp_path_factory.mktemp("r") / f"a{suffix}"
    path.write_bytes(beginning + rest)
    for reader in READERS:
        refused(reader, path)


@pytest.mark.parametrize("reader", READERS)
def test_no_file(tmp_path, reader):
    assert "No such file" in refused(reader, tmp_path / "a.pt")
    assert "directory" in refused(reader, tmp_path)
    assert "device" in refused(reader, "/dev/zero")
    refused(reader, "a\0b")
    (tmp_path / "a.safetensors").write_bytes(b"")
    assert "empty" in refused(reader, tmp_path / "a.safetensors")
    (tmp_path / "a.pt").write_bytes(b"\n<!DOCTYPE html><html>quota exceeded</html>")
    assert "web page" in refused(reader, tmp_path / "a.pt")
    (tmp_path / "a.pt").write_bytes(b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n")
    assert "git lfs pull" in refused(reader, tmp_path / "a.pt")
    os.mkfifo(tmp_path / "pipe")
    assert "device" in refused(reader, tmp_path / "pipe")


class Evil:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


@pytest.mark.parametrize("reader", READERS)
def test_code_in_a_pickle_does_not_run(tmp_path, reader):
    proof = tmp_path / "it ran"
    state = {"state_dict": {"x": torch.ones(1)}, "evil": Evil(proof)}
    torch.save(state, tmp_path / "zip.pt")
    torch.save(state, tmp_path / "old.pt", _use_new_zipfile_serialization=False)
    (tmp_path / "bare.pt").write_bytes(pickle.dumps(state["evil"]))
    (tmp_path / "bare.safetensors").write_bytes(pickle.dumps(state["evil"]))
    for path in tmp_path.glob("*.*"):
        message = refused(reader, path)
        if path.name == "zip.pt":
            assert "mkdir" in message and "weights_only" not in message
    assert not proof.exists()


def test_headers_that_claim_too_much_are_refused(tmp_path):
    path = tmp_path / "a.safetensors"
    path.write_bytes(struct.pack("<Q", 2**62) + b"{" + b" " * 100)
    refused(load_tensors, path)
    header = json.dumps({"x": {"dtype": "F32", "shape": [2**40], "data_offsets": [0, 2**42]}}).encode()
    path.write_bytes(struct.pack("<Q", len(header)) + header)
    refused(load_tensors, path)
    bomb = tmp_path / "a.pt"
    with zipfile.ZipFile(bomb, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("archive/data.pkl", b"\0" * 50_000_000)
        archive.writestr("archive/version", b"3")
    assert bomb.stat().st_size < 100_000
    assert "50000001" in refused(load_tensors, bomb)


def test_a_storage_that_is_smaller_than_its_tensor(tmp_path):
    data = io.BytesIO()
    torch.save({"x": torch.ones(3)}, data)
    (tmp_path / "good.pt").write_bytes(data.getvalue())
    forged = tmp_path / "forged.pt"
    with zipfile.ZipFile(data) as source, zipfile.ZipFile(forged, "w") as target:
        for entry in source.infolist():
            content = source.read(entry)
            if entry.filename.endswith("data.pkl"):
                size = content.index(b"K\x03\x85")  # the shape (3,)
                content = content[:size] + b"J\xff\xff\xff\x7f\x85" + content[size + 3 :]
            target.writestr(entry, content)
    load_tensors(tmp_path / "good.pt")
    refused(load_tensors, forged)


# ---------------------------------------------------------------- models


@pytest.mark.parametrize("name", cases.CASES)
def test_models_round_trip(tmp_path, name):
    model, other = cases.build(name), cases.build(name, seed=1)
    save_model(tmp_path / "m.safetensors", model, {"arch": name})
    load_weights(other, tmp_path / "m.safetensors")
    images = cases.batch()[0]
    assert torch.equal(model.eval()(images), other.eval()(images))
    assert load_tensors(tmp_path / "m.safetensors")[1] == {"arch": name}
    torch.save({"net": nn.DataParallel(model).state_dict()}, tmp_path / "m.pt")
    load_weights(nn.DataParallel(cases.build(name, seed=2)), tmp_path / "m.pt")


def test_a_file_that_does_not_fit(tmp_path):
    path = tmp_path / "m.safetensors"
    state = dict(cases.build("conv").state_dict())
    state["features.0.weight"] = torch.ones(8, 1, 3, 3)
    del state["classifier.0.bias"]
    state["extra"] = torch.ones(1)
    save_tensors(path, state)
    model = cases.build("conv")
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    message = refused(load_weights, model, path)
    for part in (
        "1 missing (first 'classifier.0.bias')",
        "1 unexpected (first 'extra')",
        "same architecture?",
    ):
        assert part in message
    assert "1 of another shape (first 'features.0.weight': [8, 1, 3, 3] in the file, [8, 3, 3, 3]" in message
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 1e300])
def test_numbers_that_are_not_finite(tmp_path, value):
    path = tmp_path / "m.safetensors"
    state = dict(cases.build("conv").state_dict())
    state["classifier.0.weight"] = state["classifier.0.weight"].double()
    state["classifier.0.weight"][3, 2] = value
    save_tensors(path, state)
    assert "infinite numbers in 'classifier.0.weight'" in refused(load_weights, cases.build("conv"), path)


def test_numbers_of_another_kind(tmp_path):
    state = dict(cases.build("conv").state_dict())
    state["classifier.0.weight"] = state["classifier.0.weight"].to(torch.int8)
    save_tensors(tmp_path / "m.safetensors", state)
    assert "int8" in refused(load_weights, cases.build("conv"), tmp_path / "m.safetensors")
    half = {name: t.half() if t.is_floating_point() else t for name, t in cases.build("conv").state_dict().items()}
    save_tensors(tmp_path / "m.safetensors", half)
    load_weights(cases.build("conv"), tmp_path / "m.safetensors")


def test_tied_weights(tmp_path):
    path = tmp_path / "m.safetensors"
    model, other = cases.build("tied"), cases.build("tied", seed=1)
    safetensors.torch.save_model(model, str(path))  # keeps one of the names
    assert len(load_tensors(path)[0]) == len(model.state_dict()) - 1
    load_weights(other, path)
    assert other.up.weight is other.down.weight
    assert torch.equal(model.up.weight, other.up.weight)
    state = dict(model.state_dict())
    state["up.weight"] = state["up.weight"] + 1
    save_tensors(path, state)
    assert "ties" in refused(load_weights, other, path)


def test_normalised_models(tmp_path):
    path = tmp_path / "m.safetensors"
    net = cases.build("conv")
    save_model(path, net)
    wrapped = Normalized(cases.build("conv", seed=1), [0.5] * 3, [0.2] * 3)
    load_weights(wrapped, path)
    assert torch.equal(wrapped.net.features[0].weight, net.features[0].weight)
    assert float(wrapped.mean[0]) == 0.5
    save_model(path, wrapped)
    again = Normalized(cases.build("conv", seed=2), [0.0] * 3, [1.0] * 3)
    load_weights(again, path)  # the normalisation belongs to the weights
    assert torch.equal(again.mean, wrapped.mean)
    # but it must not get lost
    assert "unexpected" in refused(load_weights, cases.build("conv"), path)


# ---------------------------------------------------------------- state of a training

KEYS = st.one_of(st.text(max_size=5), st.integers())
STATES = st.recursive(
    st.one_of(
        st.none(),
        st.booleans(),
        st.integers(-(2**200), 2**200),
        st.floats(allow_nan=False),
        st.text(max_size=10),
        tensors(),
    ),
    lambda inner: st.one_of(
        st.lists(inner, max_size=4),
        st.lists(inner, max_size=4).map(tuple),
        st.dictionaries(KEYS, inner, max_size=4),
    ),
    max_leaves=12,
)


def same(a: object, b: object) -> bool:
    if isinstance(a, Tensor) or isinstance(b, Tensor):
        return isinstance(a, Tensor) and isinstance(b, Tensor) and a.dtype == b.dtype and torch.equal(a, b)
    if type(a) is not type(b):
        return False
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(same, a, b))
    return a == b


@settings(max_examples=40, deadline=None)
@given(st.dictionaries(st.text(max_size=5), STATES, max_size=4))
def test_states_round_trip(tmp_path_factory, state):
    path = tmp_path_factory.mktemp("s") / "state.pt"
    save_state(path, state)
    assert same(load_state(path), state)


def test_a_real_training_state(tmp_path):
    path = tmp_path / "state.pt"
    model = cases.build("conv")
    optimizer = torch.optim.AdamW(model.parameters())
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 10)
    model(cases.batch()[0]).sum().backward()
    optimizer.step()
    state = {
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict(),
        "schedule": schedule.state_dict(),
        "random": torch.get_rng_state(),
        "epoch": 3,
    }
    save_state(path, state)
    back = load_state(path)
    other = cases.build("conv", seed=1)
    other.load_state_dict(back["model"])
    optimizer = torch.optim.AdamW(other.parameters())
    optimizer.load_state_dict(back["optimizer"])
    assert same(optimizer.state_dict(), state["optimizer"])
    assert torch.equal(back["random"], state["random"])
    load_weights(cases.build("conv", seed=2), path)  # its weights are found as in any training script's file


def test_a_view_is_saved_without_the_rest_of_its_tensor(tmp_path):
    save_state(tmp_path / "s", {"x": torch.zeros(1_000_000)[:3]})
    assert (tmp_path / "s").stat().st_size < 10_000


def test_states_with_objects_are_refused(tmp_path):
    path = tmp_path / "s"
    circle: dict[str, object] = {}
    circle["self"] = circle
    assert "state['a'][0] is a function" in refused(save_state, path, {"a": [lambda: 0]})
    assert "state['a'] is a float64" in refused(save_state, path, {"a": np.float64(3)})
    assert "state['a']" in refused(save_state, path, {"a": torch.eye(2).to_sparse()})
    assert "state['a'] is a bytes" in refused(save_state, path, {"a": b"x"})
    assert "key" in refused(save_state, path, {"a": {(1, 2): 3}})
    refused(save_state, path, circle)
    assert only(tmp_path) == []
    torch.save([1, 2], path)
    assert "list" in refused(load_state, path)
