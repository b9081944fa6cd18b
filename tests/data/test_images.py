"""Decoding images of many formats, crops, and invalid images."""

import io
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from harp.data.formats.images import Centre, decode_image, strict_warnings
from harp.data.streaming.augment import ResizedCrop
from harp.errors import DataError, RecipeError
from support.pictures import encoded
from support.splits import quick

pillow = pytest.importorskip("PIL.Image")


def saved(image: Any, kind: str, **options: Any) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, kind, **options)
    return buffer.getvalue()


def pixels(data: bytes) -> np.ndarray:
    with strict_warnings():
        return np.asarray(decode_image(data, "x"))


def test_grey_of_8_and_16_bits_is_the_same_grey() -> None:
    grey = np.arange(0, 256, 4, dtype=np.uint8).reshape(8, 8)
    deep = grey.astype(np.uint16) * 257
    for data in (saved(pillow.fromarray(grey), "PNG"), saved(pillow.fromarray(deep), "PNG")):
        result = pixels(data)
        assert result.shape == (8, 8, 3)
        assert all(np.array_equal(result[:, :, channel], grey) for channel in range(3))


def test_palettes_transparency_and_cmyk_become_rgb() -> None:
    red = pillow.new("RGB", (4, 4), (200, 10, 20))
    palette = red.quantize(4)
    clear = red.convert("RGBA")
    cases = {
        "palette": saved(palette, "PNG"),
        "palette with transparency": saved(palette, "PNG", transparency=b"\x80\xff"),
        "alpha": saved(clear, "PNG"),
        "cmyk": saved(red.convert("CMYK"), "JPEG", quality=100),
        "one bit": saved(red.convert("1"), "PNG"),
        "webp": saved(red, "WEBP", lossless=True),
    }
    for name, data in cases.items():
        result = pixels(data)
        assert result.shape == (4, 4, 3), name
        if name not in ("one bit", "cmyk"):
            assert result[0, 0].tolist() == [200, 10, 20], name
    assert np.abs(pixels(cases["cmyk"])[0, 0].astype(int) - [200, 10, 20]).max() < 30


def test_images_are_turned_by_their_exif_orientation() -> None:
    image = pillow.fromarray(np.arange(4 * 6 * 3, dtype=np.uint8).reshape(4, 6, 3))
    exif = pillow.Exif()
    exif[0x0112] = 6  # turned by a quarter
    result = pixels(saved(image, "PNG", exif=exif))
    assert result.shape == (6, 4, 3)
    assert np.array_equal(result, np.rot90(np.asarray(image), -1))


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP"])
def test_an_invalid_image_gives_an_error_of_one_line(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = encoded(1, 64, 48, kind)
    assert pixels(whole).shape == (48, 64, 3)
    for damaged in (b"", b"\xff\xd8\xff", b"<html>not result</html>", whole[: len(whole) // 2], bytes(500)):
        with pytest.raises(DataError, match=r"^x: can't be decoded \(.+\), expected an image$") as caught:
            pixels(damaged)
        assert "\n" not in str(caught.value)
    with pytest.raises(DataError, match="it is empty"):
        pixels(b"")
    for most in (2000, 1000):  # Pillow warns above its limit, and raises above twice that
        monkeypatch.setattr(pillow, "MAX_IMAGE_PIXELS", most)
        with pytest.raises(DataError, match=r"Image size \(3072 pixels\)"):
            pixels(whole)


def test_floating_point_pixels_are_refused() -> None:
    with pytest.raises(DataError, match="expected 8 or 16 bits"):
        pixels(saved(pillow.fromarray(np.ones((4, 4), np.float32)), "TIFF"))


@quick
@given(width=st.integers(3, 70), height=st.integers(3, 70), size=st.integers(1, 32))
def test_a_margin_is_cropped_as_usual_for_imagenet(width: int, height: int, size: int) -> None:
    """The shorter side to 256 for 224, the other in proportion and rounded down, then the centre."""
    image = decode_image(encoded(width * 71 + height, width, height, "PNG"), "x")
    shorter, scale = round(size * 256 / 224), min(width, height)
    wide, tall = shorter * width // scale, shorter * height // scale
    left, top = round((wide - size) / 2), round((tall - size) / 2)
    large = np.asarray(image.resize((wide, tall), pillow.Resampling.BILINEAR))
    result = Centre(size, 256 / 224)(image)
    assert result.shape == (3, size, size)
    assert np.array_equal(result, large[top : top + size, left : left + size].transpose(2, 0, 1))


@quick
@given(width=st.integers(1, 300), height=st.integers(1, 300), seed=st.integers(0, 10_000))
def test_boxes_are_inside_and_of_their_area(width: int, height: int, seed: int) -> None:
    crop = ResizedCrop()
    draws = crop.draw(1, torch.Generator().manual_seed(seed))[0].numpy()
    left, top, right, bottom = crop.box(width, height, draws)
    assert 0 <= left < right <= width and 0 <= top < bottom <= height
    if min(width, height) >= 100:
        share = (right - left) * (bottom - top) / (width * height)
        assert 0.07 <= share <= 1
        assert 0.7 <= (right - left) / (bottom - top) <= 1.43 or share > 0.5


def test_boxes_are_drawn_evenly() -> None:
    """Areas are uniform and ratios log-uniform where every box fits, and boxes lie everywhere."""
    crop = ResizedCrop(area=(0.08, 0.5))
    draws = crop.draw(4000, torch.Generator().manual_seed(1)).numpy()
    left, top, right, bottom = np.array([crop.box(1000, 1000, row) for row in draws]).T
    wide, tall = right - left, bottom - top
    expected = np.linspace(0, 1, 11)[1:-1]
    for values, low, high in (
        (wide * tall / 1e6, 0.08, 0.5),
        (np.log(wide / tall), np.log(3 / 4), np.log(4 / 3)),
        (left / (1000 - wide), 0, 1),
        (top / (1000 - tall), 0, 1),
    ):
        assert np.abs((np.quantile(values, expected) - low) / (high - low) - expected).max() < 0.03
    assert abs((draws[:, 0] < 0.5).mean() - 0.5) < 0.03


def test_the_crop_of_a_very_long_image_is_its_centre() -> None:
    draws = ResizedCrop(area=(1.0, 1.0)).draw(1, torch.Generator().manual_seed(0))[0].numpy()
    assert ResizedCrop(area=(1.0, 1.0)).box(100, 10, draws) == (43, 0, 56, 10)
    assert ResizedCrop(area=(1.0, 1.0)).box(10, 100, draws) == (0, 43, 10, 56)


def test_a_random_crop_is_cropped_resized_and_mirrored() -> None:
    image = decode_image(encoded(3, 40, 30, "PNG"), "x")
    crop = ResizedCrop()
    draws = crop.draw(1, torch.Generator().manual_seed(5))[0].numpy()
    expected = np.asarray(image.crop(crop.box(40, 30, draws)).resize((8, 8), pillow.Resampling.BILINEAR))
    draws[0] = 0.7
    assert np.array_equal(crop(image, 8, draws), expected.transpose(2, 0, 1))
    draws[0] = 0.2
    assert np.array_equal(crop(image, 8, draws), expected[:, ::-1].transpose(2, 0, 1))
    assert np.array_equal(ResizedCrop(flip=False)(image, 8, draws), expected.transpose(2, 0, 1))
    with pytest.raises(RecipeError, match="expected the least first"):
        ResizedCrop(area=(0.5, 0.1))


@pytest.mark.parametrize(("size", "margin"), [(0, 1.0), (5000, 1.0), (8, 0.5), (8, 9.0)])
def test_invalid_sizes_and_margins_are_refused(size: int, margin: float) -> None:
    with pytest.raises(DataError, match="expected 1 to"):
        Centre(size, margin)
