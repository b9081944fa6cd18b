"""Dead channels are removed without changing an output; in training under fixed masks, without changing a step."""

import copy
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from harp import models
from harp.errors import ModelError
from harp.pruning import masks as mask_ops
from harp.pruning.channels import Cut, removal
from harp.pruning.channels.compact import compacted, slim_for_training, spread_back, unread
from harp.pruning.channels.constant_values import readings
from harp.pruning.channels.removal import Removed, remove_dead
from harp.pruning.macs import cost
from harp.pruning.masks import Masks
from support import cases


def conv(read: int, give: int, size: int = 3, padding: int = 0, **options: Any) -> nn.Conv2d:
    return nn.Conv2d(read, give, size, padding=padding, **options)


def chain(*second: nn.Module, features: int = 6, activation: nn.Module | None = None) -> nn.Sequential:
    """Six channels with a norm, read by the layers to be tried, and a head."""
    torch.manual_seed(0)
    first = [conv(3, 6, bias=False), nn.BatchNorm2d(6), activation or nn.ReLU()]
    model = nn.Sequential(*first, *second, nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(features, 4))
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.bias.data.normal_()
            module.running_mean.normal_()
    return model.eval()


def prune(model: nn.Sequential, biases: list[float]) -> nn.Sequential:
    """Prune the first filters, which then output what the norm makes of zero."""
    with torch.no_grad():
        model[0].weight[: len(biases)] = 0
        model[1].running_mean[: len(biases)] = 0
        model[1].bias[: len(biases)] = torch.tensor(biases)
    return model


@torch.no_grad()
def check(model: nn.Module, removed: Removed, images: Tensor | None = None) -> None:
    images = cases.batch(8, seed=5)[0] if images is None else images
    expected, answer = copy.deepcopy(model).eval()(images), copy.deepcopy(removed.model).eval()(images)
    assert float((answer - expected).abs().max()) <= 1e-5 * float(expected.abs().max())


def total(removed: Removed) -> int:
    return removed.unread.channels + removed.zero.channels + removed.folded.channels + removed.merged.channels


IMAGES = cases.batch()[0]


def test_a_pruned_filter_still_outputs_what_its_norm_makes_of_zero() -> None:
    model = prune(chain(conv(6, 6, padding=1)), [0.7])
    naive = copy.deepcopy(model)
    naive[3].weight.data[:, 0] = 0
    folded = copy.deepcopy(naive)
    folded[3].bias.data += 0.7 * model[3].weight.data[:, 0].sum(dim=(1, 2))
    for wrong in (naive, folded):  # the second only at the borders
        gap = (wrong(IMAGES) - model(IMAGES)).abs().max()
        assert float(gap.detach()) > 0.01
    removed = remove_dead(model, IMAGES)
    check(model, removed)
    assert (total(removed), removed.padded, removed.stuck) == (0, 1, 0)


def test_a_channel_that_a_relu_makes_zero_is_removed_in_spite_of_padding() -> None:
    model = prune(chain(conv(6, 6, padding=1)), [-0.7, -0.1])
    removed = remove_dead(model, IMAGES)
    check(model, removed)
    assert removed.zero == removal.Gone(2, 2 * 6 * 9)
    assert removed.model[0].out_channels == removed.model[1].num_features == removed.model[3].in_channels == 4


@pytest.mark.parametrize("bias", [True, False])
def test_without_padding_a_constant_is_added_to_the_bias_or_a_new_one(bias: bool) -> None:
    model = prune(chain(conv(6, 6, bias=bias)), [0.7, -0.2, 1.3])
    removed = remove_dead(model, IMAGES)
    check(model, removed)
    assert (removed.folded.channels, removed.zero.channels, removed.padded) == (2, 1, 0)
    assert removed.cut.added == ([] if bias else ["3.bias"])
    assert removed.parameters[1] == sum(p.numel() for p in removed.model.parameters())
    again = Cut.from_dict(removed.cut.as_dict()).applied(model)
    again.load_state_dict(removed.model.state_dict())
    check(model, replace(removed, model=again))


def test_a_norm_takes_a_constant_in_place_of_a_new_bias() -> None:
    model = prune(chain(conv(6, 6, bias=False), nn.BatchNorm2d(6)), [0.7])
    removed = remove_dead(model, IMAGES)
    check(model, removed)
    assert removed.folded.channels == 1 and not removed.cut.added
    assert list(removed.model.state_dict()) == list(model.state_dict())


def test_a_norm_that_is_not_the_only_reader_takes_no_constant() -> None:
    class Split(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.norm = conv(6, 6, bias=False), nn.BatchNorm2d(6)

        def forward(self, x: Tensor) -> Tensor:
            x = self.conv(x)
            return self.norm(x) + x

    model = prune(chain(Split()), [0.7])
    removed = remove_dead(model, IMAGES)
    check(model, removed)
    assert removed.folded.channels == 1 and removed.cut.added == ["3.conv.bias"]


def test_a_new_bias_is_cut_with_what_it_is_added_to() -> None:
    model = prune(chain(conv(6, 6, bias=False)), [0.7])
    model[7].weight.data[:, 2:4] = 0
    removed = remove_dead(model, IMAGES)
    check(model, removed)
    assert removed.cut.added == ["3.bias"] and removed.model[3].bias.shape == (4,)
    assert (removed.folded.channels, removed.unread.channels) == (1, 2)
    again = removed.cut.applied(model)
    again.load_state_dict(removed.model.state_dict())
    check(model, replace(removed, model=again))


@pytest.mark.parametrize("mode", ["reflect", "replicate"])
def test_padding_with_the_image_itself_is_exact(mode: str) -> None:
    model = prune(chain(conv(6, 6, padding=1, padding_mode=mode)), [0.7])
    removed = remove_dead(model, IMAGES)
    check(model, removed)
    assert (removed.folded.channels, removed.padded) == (1, 0)


def test_constants_behind_padding_are_merged_into_one() -> None:
    model = prune(chain(conv(6, 6, padding=1)), [0.3, 2.0, 0.9])
    removed = remove_dead(model, IMAGES)
    check(model, removed)
    assert (removed.merged.channels, removed.padded) == (2, 1)
    assert removed.model[3].in_channels == 4


def test_a_scale_of_zero_makes_a_constant() -> None:
    model = chain(conv(6, 6))
    with torch.no_grad():
        model[1].weight[2:4] = 0
    removed = remove_dead(model, IMAGES)
    check(model, removed)
    assert removed.zero.channels + removed.folded.channels == 2


def test_what_a_channel_was_computed_from_is_unread_in_turn() -> None:
    model = chain(conv(6, 6), nn.ReLU(), conv(6, 6))
    with torch.no_grad():
        model[9].weight[:, 3:] = 0  # three channels unread ...
        model[5].weight[:3, 1:3] = 0  # ... which alone had read two before
    removed = remove_dead(model, IMAGES)
    check(model, removed)
    assert (removed.unread.channels, total(removed)) == (5, 5)


def test_constants_are_followed_through_layers() -> None:
    model = prune(chain(conv(6, 6), nn.ReLU(), conv(6, 6)), [0.4, -0.4])
    with torch.no_grad():
        model[3].weight[0, 2:] = 0  # reads constants only
        model[3].weight[1] = 0
        model[3].bias[:2] = torch.tensor([5.0, 1.0])
    removed = remove_dead(model, IMAGES)
    check(model, removed)
    assert removed.folded.channels == 3 and total(removed) == 4


class Resnet(nn.Module):
    """Two residual blocks on one stream."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.stem, self.norm = conv(3, 8, padding=1, bias=False), nn.BatchNorm2d(8)
        self.one, self.two = self.block(), self.block()
        self.head = nn.Linear(8, 4)
        for module in self.modules():
            if isinstance(module, nn.BatchNorm2d):
                module.bias.data.normal_()

    def block(self) -> nn.Sequential:
        inner = [conv(8, 8, padding=1, bias=False), nn.BatchNorm2d(8), nn.ReLU(), conv(8, 8, padding=1, bias=False)]
        return nn.Sequential(*inner, nn.BatchNorm2d(8))

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(self.stem(x)).relu_()
        x = (self.one(x) + x).relu_()
        x = (self.two(x) + x).relu_()
        return self.head(x.mean(dim=(2, 3)))


def test_a_residual_stream_is_constant_only_if_all_that_give_it_are() -> None:
    model = Resnet()
    with torch.no_grad():
        model.stem.weight[:3] = 0
        model.one[3].weight[:3] = 0
        model.two[3].weight[:2] = 0
        for norm in (model.norm, model.one[4], model.two[4]):
            norm.bias[:3] = -1.0
    removed = remove_dead(model, IMAGES)
    check(model, removed)
    assert removed.zero.channels == 2 and removed.model.stem.out_channels == 6
    with torch.no_grad():
        model.two[4].bias[:2] = 2.0  # constants that only the head reads, which has a bias
    removed = remove_dead(model, IMAGES)
    check(model, removed)
    assert (removed.folded.channels, removed.zero.channels) == (2, 0)


def test_a_depthwise_layer_with_padding_makes_a_map_that_stays() -> None:
    for padding, folded, left in ((1, 0, 5), (0, 1, 4)):
        model = prune(chain(conv(6, 6, padding=padding, groups=6), nn.ReLU(), conv(6, 6, 1)), [0.7, -0.7])
        with torch.no_grad():
            model[3].weight[0] = torch.rand(3, 3)
            model[3].bias[:2] = torch.tensor([0.1, -0.1])
        removed = remove_dead(model, IMAGES)
        check(model, removed)
        assert (removed.zero.channels, removed.folded.channels, removed.model[3].groups) == (1, folded, left)


def test_a_layer_that_is_used_twice_takes_only_zeros() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.same, self.head = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 4)

        def forward(self, x: Tensor) -> Tensor:
            x = torch.relu(self.first(x))
            return self.head(torch.relu(self.same(torch.relu(self.same(x)))))

    model = Twice()
    images = torch.rand(2, 6)
    with torch.no_grad():
        for layer, constant in ((model.first, 1.0), (model.same, 2.0)):
            layer.weight[:2] = 0
            layer.bias[:2] = torch.tensor([-1.0, constant])
    removed = remove_dead(model, images)
    check(model, removed, torch.rand(8, 6))
    assert (removed.zero.channels, removed.folded.channels, removed.stuck) == (1, 0, 1)


def test_a_flattened_image_may_be_a_constant_map() -> None:
    torch.manual_seed(0)
    layers = [conv(3, 6, padding=1), nn.ReLU(), conv(6, 6, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(384, 4)]
    model = nn.Sequential(*layers)
    with torch.no_grad():
        model[0].weight[0] = 0
        model[0].bias[0] = 1.0
        model[2].weight[0, 1:] = 0  # a constant with a border
    removed = remove_dead(model, IMAGES)
    check(model, removed)
    assert removed.folded.channels == 1 and removed.model[2].out_channels == 5


def test_a_network_without_weights_keeps_a_channel_of_each_layer() -> None:
    model = cases.build("conv")
    masks = {name: torch.zeros_like(p, dtype=torch.bool) for name, p in model.named_parameters() if p.ndim > 1}
    removed = remove_dead(model, IMAGES, masks)
    mask_ops.apply(model, masks)
    check(model, removed)
    assert [m.out_channels for m in removed.model.modules() if isinstance(m, nn.Conv2d)] == [1, 1]
    assert total(removed) == 7 + 15 + 15 and mask_ops.kept(removed.masks) == 0


@pytest.mark.parametrize(
    "body",
    [
        lambda x: torch.cat([x[:, :3] * 2, x[:, 3:]], dim=1),
        lambda x: x.clone().clamp_(max=2.0),
        lambda x: F.pad(x, (1, 1, 1, 1)),
        lambda x: F.max_pool2d(x, 2, padding=1),
        lambda x: F.avg_pool2d(x, 3, stride=1, padding=1),
        lambda x: x * torch.sigmoid(x.mean(dim=(2, 3), keepdim=True)),
        lambda x: x * torch.sigmoid(x.mean(dim=1, keepdim=True)),
        lambda x: x + 0.01 * torch.cumsum(x, dim=1),
        lambda x: F.interpolate(x, scale_factor=2, mode="bicubic"),
        lambda x: torch.softmax(x.flatten(2), dim=2).reshape(x.shape),
        lambda x: F.group_norm(x, 3),
        lambda x: F.instance_norm(x),
        lambda x: x.clone().cumsum_(dim=2),
        lambda x: x[:, x.mean(dim=(0, 2, 3)).argsort()],
        lambda x: F.conv2d(x, x.mean(dim=(0, 2, 3))[None, :, None, None].expand(6, 6, 1, 1)),
        lambda x: torch.view_as_real(torch.fft.fft2(x))[..., 0],
        lambda x: torch.sigmoid(x, out=torch.empty_like(x)),
        lambda x: torch.zeros_like(x).add_(x),
        lambda x: x.amax(dim=3, keepdim=True) + x,
        lambda x: (x.flatten(2) @ torch.ones(len(x), x[0, 0].numel(), 36)).unflatten(2, (6, 6)),
        lambda x: F.batch_norm(x, torch.zeros(6), torch.ones(6)),
    ],
)
def test_whatever_forward_does_no_output_changes(body: Callable[[Tensor], Tensor]) -> None:
    class Body(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return body(x)

    model = prune(chain(Body(), conv(6, 6)), [0.7, -0.7, 1.5])
    try:
        check(model, remove_dead(model, IMAGES))
    except ModelError as error:
        assert "no channels that can be pruned" in str(error)


def test_writing_into_a_view_writes_into_its_base() -> None:
    class View(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            x[:, 0] += x[:, 5]
            x[:, 1].mul_(0.5)
            return x

    model = prune(chain(View(), conv(6, 6)), [0.7, -0.7, 1.5])
    for example in (IMAGES[:2], torch.zeros(2, 3, 8, 8)):
        assert readings(model, example)["4.weight"][0].constant.tolist() == [False, True, True, False, False, False]


def test_writing_parts_of_a_new_tensor_is_not_taken_for_constant() -> None:
    class Parts(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            buffer = torch.zeros(len(x), 6, *x.shape[2:])
            buffer[:, :6] = x
            return buffer  # written into by parts, of which nothing is known

    model = prune(chain(Parts(), conv(6, 6)), [0.7, -0.7, 1.5])
    for example in (IMAGES[:2], torch.zeros(2, 3, 8, 8)):  # of zeros, on which all is the same everywhere
        assert readings(model, example)["4.weight"][0].constant.tolist() == [False] * 6


def test_a_channel_that_is_zero_on_the_example_only_is_no_constant() -> None:
    model = chain(conv(6, 6))
    with torch.no_grad():
        model[0].weight[0] = 0
        model[0].weight[0, 1, 1, 1] = 1.0  # one weight is enough
        model[1].bias[0], model[1].running_mean[0] = -50.0, 0.0
    removed = remove_dead(model, IMAGES)
    check(model, removed, 100 * IMAGES)
    assert total(removed) == 0


def test_random_numbers_are_no_constants() -> None:
    class Noise(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x + torch.rand(1, 6, 1, 1)

    model = prune(chain(Noise(), conv(6, 6)), [0.7])
    assert not readings(model, IMAGES[:2])["4.weight"][0].constant.any()


def masked(model: nn.Module, sparsity: float, seed: int) -> Masks:
    generator = torch.Generator().manual_seed(seed)
    return {
        name: torch.rand(p.shape, generator=generator) >= sparsity
        for name, p in model.named_parameters()
        if p.ndim > 1 and name not in ("token", "position")
    }


@settings(max_examples=20, deadline=None)
@given(st.sampled_from(sorted(cases.CASES)), st.sampled_from([0.5, 0.95, 0.98, 0.99, 0.995, 0.999]), st.integers(0, 99))
def test_random_masks(case: str, sparsity: float, seed: int) -> None:
    model = cases.build(case, seed).train()
    model[0].eval() if isinstance(model, nn.Sequential) else next(model.children()).eval()
    masks = masked(model, sparsity, seed)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    flags = [module.training for module in model.modules()]
    removed = remove_dead(model, IMAGES, masks)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert [module.training for module in model.modules()] == flags
    assert [module.training for module in removed.model.modules()][:3] == flags[:3]
    assert not any(p.grad is not None for p in model.parameters())
    mask_ops.apply(model, masks)
    check(model, removed)
    weights = dict(removed.model.named_parameters())
    assert all(torch.equal(mask, weights[name] != 0) for name, mask in removed.masks.items())
    lost = removed.unread.weights + removed.zero.weights + removed.folded.weights + removed.merged.weights
    assert mask_ops.kept(removed.masks) == mask_ops.kept(masks) - lost


@pytest.mark.parametrize("sparsity", [0.95, 0.99, 0.995])
def test_a_resnet_with_biased_norms(sparsity: float) -> None:
    torch.manual_seed(0)
    model = models.build("resnet8", num_classes=10, shape=(3, 16, 16), width=0.5)
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.bias.data.normal_(std=0.3)
            module.running_mean.normal_(std=0.1)
    masks = masked(model, sparsity, 0)
    removed = remove_dead(model, torch.rand(2, 3, 16, 16), masks)
    mask_ops.apply(model, masks)
    check(model, removed, torch.rand(8, 3, 16, 16))
    assert total(removed) > 0 and removed.parameters[1] < removed.parameters[0]
    if sparsity == 0.95:  # with more pruned, one channel of each layer is left
        again = remove_dead(removed.model, torch.rand(2, 3, 16, 16))
        assert total(again) == 0 and again.padded == removed.padded


def test_a_wrong_constant_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(model: nn.Module, example: Tensor) -> Any:
        of_weights = readings(model, example)
        for reading in (reading for of_weight in of_weights.values() for reading in of_weight):
            reading.constant.fill_(True)
        return of_weights

    monkeypatch.setattr(removal, "readings", wrong)
    with pytest.raises(ModelError, match="off by"):
        remove_dead(chain(conv(6, 6)), IMAGES)


@pytest.mark.parametrize("bias", [0.3, -0.3])
def test_a_linear_layer_of_few_rows_is_followed(bias: float) -> None:
    model = nn.Sequential(nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 4, bias=False), nn.ReLU(), nn.Linear(4, 3)).eval()
    with torch.no_grad():
        model[0].weight[0], model[0].bias[0] = 0, bias
    removed = remove_dead(model, torch.rand(2, 6))
    check(model, removed, torch.rand(8, 6))
    assert (removed.folded.channels, removed.zero.channels) == ((1, 0) if bias > 0 else (0, 1))
    assert removed.cut.added == (["2.bias"] if bias > 0 else [])


# -- training ---------------------------------------------------------------------------------------------------------


def train(model: nn.Module, masks: Masks, steps: int = 20) -> None:
    optimizer = torch.optim.SGD(model.parameters(), 0.05, momentum=0.9, weight_decay=5e-3)
    model.train()
    for step in range(steps):
        images, labels = cases.batch(16, seed=step)
        optimizer.zero_grad()
        F.cross_entropy(model(images.double()), labels).backward()
        optimizer.step()
        mask_ops.apply(model, masks)


@pytest.mark.parametrize("case", ["conv", "residual", "grouped", "tied", "transformer"])
def test_training_the_small_network_is_training_the_large_one(case: str) -> None:
    model = cases.build(case).double()
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    masks = masked(model, 0.9 if case != "grouped" else 0.99, 1)
    mask_ops.apply(model, masks)
    start = copy.deepcopy(model)
    images = cases.batch(8, seed=5)[0].double()
    compact = slim_for_training(model, images, masks)
    small, cut = compact.model, compact.cut
    assert sum(p.numel() for p in small.parameters()) < sum(p.numel() for p in model.parameters())
    train(model, masks)
    train(small, compact.masks)
    pairs = zip(
        [*model.named_parameters(), *model.named_buffers()], [*small.parameters(), *small.buffers()], strict=True
    )
    for (name, large), ours in pairs:
        torch.testing.assert_close(cut.slice(name, large), ours, rtol=1e-8, atol=1e-9)
    spread_back(start, small, cut)
    with torch.no_grad():
        torch.testing.assert_close(start.eval()(images), model.eval()(images), rtol=1e-7, atol=1e-8)
        assert all(not bool(start.get_parameter(name)[~mask].any()) for name, mask in masks.items())


def test_channels_that_training_may_change_are_kept_for_training() -> None:
    model = prune(chain(conv(6, 6)), [-0.7])
    model[3].weight.data[:, 4] = 0  # zero now, but alive
    cut = unread(model, IMAGES, {"3.weight": torch.ones(6, 6, 3, 3, dtype=torch.bool)})
    assert not cut.kept
    mask = torch.ones(6, 6, 3, 3, dtype=torch.bool)
    mask[:, 4] = False
    assert unread(model, IMAGES, {"3.weight": mask}).kept["3.weight"] == {1: [0, 1, 2, 3, 5]}


class Auxiliary(cases.ConvNet):
    """With a second head in training."""

    def __init__(self) -> None:
        super().__init__()
        self.auxiliary = nn.Linear(64, 4)

    def forward(self, x: Tensor) -> Tensor:
        seen = self.features(x).flatten(1)
        return self.classifier(seen) + (self.auxiliary(seen) if self.training else 0.0)


def test_channels_that_are_read_in_training_only_are_kept() -> None:
    model = Auxiliary()
    masks = {"classifier.0.weight": torch.ones(16, 64, dtype=torch.bool)}
    masks["classifier.0.weight"][:, :8] = False  # two channels of 2 x 2
    assert not unread(model, IMAGES, masks).kept
    masks["auxiliary.weight"] = torch.ones(4, 64, dtype=torch.bool)
    masks["auxiliary.weight"][:, 4:8] = False
    assert unread(model, IMAGES, masks).kept["features.4.weight"] == {0: [0, *range(2, 16)]}
    model.forgotten = nn.Linear(4, 4)
    with pytest.raises(ModelError, match=r"forgotten\.weight"):
        unread(model, IMAGES, masks)


def test_fine_tuning_goes_on_without_unread_channels_if_that_saves_work(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, notes = cases.build("conv"), []
    masks = masked(model, 0.97, 0)
    macs = cost(model, (3, 8, 8), {})["macs"]
    compact = compacted(model, IMAGES, masks, macs, notes.append)
    assert compact is not None and cost(compact.model, (3, 8, 8), {})["macs"] < 0.8 * macs
    assert len(notes) == 1 and notes[0].endswith("of the multiplications are left to train")
    assert compacted(model, IMAGES, masked(model, 0.1, 0), macs, notes.append) is None, "all channels are read"
    assert compacted(model, IMAGES, masks, 1, notes.append) is None, "the smaller network is no less work"
    model.forgotten = nn.Linear(4, 4)
    assert compacted(model, IMAGES, masks, macs, notes.append) is None, "one weight was not seen in use"
    assert not caplog.records and len(notes) == 1
    monkeypatch.setattr("harp.pruning.channels.compact.slim_for_training", lambda *_: 1 / 0)
    assert compacted(model, IMAGES, masks, macs, notes.append) is None
    assert "trained with all channels" in caplog.text


def test_masks_of_another_model_are_refused() -> None:
    for call in (unread, remove_dead):
        with pytest.raises(ModelError, match="masks of another model"):
            call(cases.build("conv"), IMAGES, {"features.0.weight": torch.ones(3, 3, dtype=torch.bool)})


def test_a_convolution_whose_weight_is_a_buffer_is_left_alone() -> None:
    """A fixed filter between layers that are trained: it has no mask, and nothing of it may be lost."""

    class Blurred(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = nn.Conv2d(1, 6, 3), nn.Linear(4 * 16, 3)
            self.middle = nn.Conv2d(6, 4, 3)
            self.register_buffer("blur", torch.rand(6, 1, 3, 3))
            self.register_buffer("mix", torch.rand(6, 6, 1, 1))

        def forward(self, x: Tensor) -> Tensor:
            blurred = F.conv2d(F.conv2d(self.first(x), self.blur, groups=6), self.mix)
            return self.last(self.middle(F.relu(blurred))[:, :, :4, :4].flatten(1))

    torch.manual_seed(0)
    model, images = Blurred().eval(), torch.rand(2, 1, 12, 12)
    with torch.no_grad():
        model.middle.weight[:, 2] = 0
        model.middle.weight[3] = 0
        removed = remove_dead(model, images)
        torch.testing.assert_close(removed.model(images), model(images), rtol=1e-5, atol=1e-6)
    masks = {"middle.weight": model.middle.weight != 0}
    small = slim_for_training(model, images, masks).model
    with torch.no_grad():
        torch.testing.assert_close(small(images), model(images), rtol=1e-5, atol=1e-6)
