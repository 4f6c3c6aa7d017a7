"""Datasets that are missing, damaged or hostile give one line that says what to do; no test touches the network."""

from __future__ import annotations

import gzip
import hashlib
import io
import sys
import tarfile
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from gradbus.workloads import datasets
from gradbus.workloads.base import DataError

RECORD = 3073
TRAIN_FILES = [f"data_batch_{number}.bin" for number in range(1, 6)]


@pytest.fixture(autouse=True)
def no_network(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "pooch", None)  # as if it were not installed
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setattr(datasets, "_FASHION_PACKAGE", tmp_path / "no-package")


def one_line(error: pytest.ExceptionInfo[DataError]) -> str:
    assert "\n" not in str(error.value)
    return str(error.value)


# --- digits --------------------------------------------------------------------------------------------------------


def test_digits_are_shipped_and_split_for_ever_in_the_same_way() -> None:
    train, test = datasets.digits("train"), datasets.digits("test")
    assert train["image"].shape == (1437, 8, 8) and test["image"].shape == (360, 8, 8)
    assert train["image"].dtype == train["label"].dtype == np.uint8 and train["image"].max() == 16
    assert np.bincount(np.concatenate([train["label"], test["label"]])).tolist() == [
        *(178, 182, 177, 183, 181, 182, 181, 179, 174, 180)  # as UCI describes the set
    ]
    assert hashlib.sha256(test["image"].tobytes() + test["label"].tobytes()).hexdigest()[:16] == "beffd69b85de0c62"


# --- Fashion-MNIST -------------------------------------------------------------------------------------------------


@pytest.fixture
def small_fashion(monkeypatch: pytest.MonkeyPatch) -> tuple[bytes, bytes]:
    """Images and labels of a training set of 3 pictures, known to the module as the right ones."""
    images = b"I" * 16 + bytes(i % 251 for i in range(3 * 28 * 28))
    labels = b"L" * 8 + bytes([4, 9, 0])
    files = tuple(
        datasets._Idx(name, len(content), hashlib.sha256(content).hexdigest(), "")
        for name, content in (("train-images-idx3-ubyte", images), ("train-labels-idx1-ubyte", labels))
    )
    monkeypatch.setitem(datasets._FASHION, "train", files)
    return images, labels


def test_fashion_is_read_plain_or_compressed(tmp_path: Path, small_fashion: tuple[bytes, bytes]) -> None:
    images, labels = small_fashion
    (tmp_path / "train-images-idx3-ubyte.gz").write_bytes(gzip.compress(images))
    (tmp_path / "train-labels-idx1-ubyte").write_bytes(labels)
    found = datasets.fashion(tmp_path, "train")
    assert found["image"].shape == (3, 28, 28) and found["image"].tobytes() == images[16:]
    assert found["label"].tolist() == [4, 9, 0]


def test_fashion_is_found_in_the_documented_places(
    tmp_path: Path, small_fashion: tuple[bytes, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    for place in (tmp_path / "home/.cache/gradbus/fashion-mnist", tmp_path / "package"):
        monkeypatch.setattr(datasets, "_FASHION_PACKAGE", tmp_path / "package")
        place.mkdir(parents=True)
        for name, content in zip(("train-images-idx3-ubyte", "train-labels-idx1-ubyte"), small_fashion, strict=True):
            (place / name).write_bytes(content)
        assert datasets.fashion(None, "train")["label"].tolist() == [4, 9, 0]
        for path in place.iterdir():
            path.unlink()


def test_missing_fashion_says_what_to_put_where(tmp_path: Path) -> None:
    with pytest.raises(DataError) as error:
        datasets.fashion(None, "train")
    line = one_line(error)
    assert str(tmp_path / "home/.cache/gradbus/fashion-mnist") in line and "dataset-fashion-mnist" in line
    assert "train-images-idx3-ubyte.gz (sha256 of the content c59f468a" in line and "http" in line
    assert "pip install 'gradbus[data]'" in line


def test_a_folder_that_was_named_is_not_replaced_by_another(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=f"Fashion-MNIST is not in {tmp_path}/typo;") as error:
        datasets.fashion(tmp_path / "typo", "train")
    assert "pooch" not in one_line(error)


def test_truncated_fashion(tmp_path: Path, small_fashion: tuple[bytes, bytes]) -> None:
    path = tmp_path / "train-images-idx3-ubyte"
    path.write_bytes(small_fashion[0][:-20])
    with pytest.raises(DataError) as error:
        datasets.fashion(tmp_path, "train")
    assert f"{path} is not the file of Fashion-MNIST: found 2348 bytes of content with sha256" in one_line(error)
    assert "expected 2368 bytes of content with sha256" in one_line(error)


def test_truncated_compressed_fashion(tmp_path: Path, small_fashion: tuple[bytes, bytes]) -> None:
    path = tmp_path / "train-images-idx3-ubyte.gz"
    path.write_bytes(gzip.compress(small_fashion[0])[:-20])
    with pytest.raises(DataError) as error:
        datasets.fashion(tmp_path, "train")
    assert f"{path} ({path.stat().st_size} bytes) cannot be read: " in one_line(error)
    assert "expected 2368 bytes of content with sha256" in one_line(error)


def test_fashion_with_the_wrong_content(tmp_path: Path, small_fashion: tuple[bytes, bytes]) -> None:
    images, labels = small_fashion
    (tmp_path / "train-images-idx3-ubyte").write_bytes(images[:-1] + b"?")
    (tmp_path / "train-labels-idx1-ubyte").write_bytes(labels)
    with pytest.raises(DataError) as error:
        datasets.fashion(tmp_path, "train")
    assert f"found 2368 bytes of content with sha256 {hashlib.sha256(images[:-1] + b'?').hexdigest()}" in one_line(
        error
    )


def test_a_file_that_unpacks_to_more_than_it_should_is_not_read_whole(
    tmp_path: Path, small_fashion: tuple[bytes, bytes]
) -> None:
    (tmp_path / "train-images-idx3-ubyte.gz").write_bytes(gzip.compress(bytes(10_000_000)))
    with pytest.raises(DataError, match="found more than 2368 bytes"):
        datasets.fashion(tmp_path, "train")


def test_labels_without_images_or_images_without_labels(tmp_path: Path, small_fashion: tuple[bytes, bytes]) -> None:
    (tmp_path / "train-images-idx3-ubyte").write_bytes(small_fashion[0])
    with pytest.raises(DataError, match=r"has no train-labels-idx1-ubyte\.gz; expected 11 bytes"):
        datasets.fashion(tmp_path, "train")


# --- CIFAR-10 ------------------------------------------------------------------------------------------------------


def records(count: int, seed: int) -> bytes:
    table = np.random.default_rng(seed).integers(0, 256, (count, RECORD)).astype(np.uint8)
    table[:, 0] %= 10
    return table.tobytes()


def fill(folder: Path) -> dict[str, bytes]:
    folder.mkdir(parents=True, exist_ok=True)
    files = {name: records(2, seed) for seed, name in enumerate(TRAIN_FILES)} | {"test_batch.bin": records(3, 9)}
    for name, content in files.items():
        (folder / name).write_bytes(content)
    return files


def pack(archive: Path, members: dict[str, bytes | str]) -> None:
    """A .tar.gz of files (bytes) and symbolic links (text: where to)."""
    with tarfile.open(archive, "w:gz") as tar:
        for name, content in members.items():
            member = tarfile.TarInfo(name)
            if isinstance(content, str):
                member.type, member.linkname = tarfile.SYMTYPE, content
                tar.addfile(member)
            else:
                member.size = len(content)
                tar.addfile(member, io.BytesIO(content))


def inside(files: dict[str, bytes]) -> dict[str, bytes | str]:
    return {f"cifar-10-batches-bin/{name}": content for name, content in files.items()}


@pytest.mark.parametrize("below", ["", "cifar-10-batches-bin"])
def test_cifar_folder(tmp_path: Path, below: str) -> None:
    files = fill(tmp_path / below)
    train, test = datasets.cifar10(tmp_path, "train"), datasets.cifar10(tmp_path, "test")
    assert train["image"].shape == (10, 32, 32, 3) and test["label"].shape == (3,)
    second = np.frombuffer(files["data_batch_2.bin"], np.uint8)  # picture 3 is the second record of the second file
    assert train["label"][3] == second[RECORD]
    assert train["image"][3, 5, 7].tolist() == [second[RECORD + 1 + plane * 1024 + 5 * 32 + 7] for plane in range(3)]


def test_cifar_archive_gives_the_same_as_the_folder(tmp_path: Path) -> None:
    files = fill(tmp_path / "folder")
    pack(tmp_path / "cifar-10-binary.tar.gz", inside(dict(reversed(files.items()))))
    for part in ("train", "test"):
        packed, plain = datasets.cifar10(tmp_path, part), datasets.cifar10(tmp_path / "folder", part)
        assert all(np.array_equal(packed[name], plain[name]) for name in ("image", "label"))


def test_no_path_in_an_archive_is_trusted(tmp_path: Path) -> None:
    files = fill(tmp_path / "folder")
    place = tmp_path / "place"
    place.mkdir()
    hostile: dict[str, bytes | str] = {
        "../escaped.bin": b"x",
        str(tmp_path / "absolute.bin"): b"x",
        "cifar-10-batches-bin/../data_batch_1.bin": b"x",
        "/cifar-10-batches-bin/data_batch_2.bin": b"x",
        "other/cifar-10-batches-bin/data_batch_3.bin": b"x",
    }
    pack(place / "cifar-10-binary.tar.gz", hostile | inside(files))
    before = sorted(tmp_path.rglob("*"))
    assert len(datasets.cifar10(place, "train")["label"]) == 10
    assert sorted(tmp_path.rglob("*")) == before


def test_a_link_in_an_archive_is_not_followed(tmp_path: Path) -> None:
    files = fill(tmp_path / "folder")
    del files["test_batch.bin"]
    target = str(tmp_path / "folder" / "test_batch.bin")
    pack(tmp_path / "cifar-10-binary.tar.gz", inside(files) | {"cifar-10-batches-bin/test_batch.bin": target})
    with pytest.raises(DataError, match=r"lacks test_batch\.bin"):
        datasets.cifar10(tmp_path, "test")


def test_cifar_file_cut_short(tmp_path: Path) -> None:
    fill(tmp_path)
    (tmp_path / "data_batch_4.bin").write_bytes(records(2, 0)[:-1])
    for part in ("train", "test"):  # whichever part is wanted, so that a run does not fail only when it evaluates
        with pytest.raises(DataError, match=r"data_batch_4\.bin has 6145 bytes; expected a multiple of 3073"):
            datasets.cifar10(tmp_path, part)


def test_empty_cifar_file(tmp_path: Path) -> None:
    fill(tmp_path)
    (tmp_path / "test_batch.bin").write_bytes(b"")
    with pytest.raises(DataError, match=r"test_batch\.bin has 0 bytes"):
        datasets.cifar10(tmp_path, "train")


def test_cifar_without_one_of_its_files(tmp_path: Path) -> None:
    fill(tmp_path)
    (tmp_path / "data_batch_3.bin").unlink()
    with pytest.raises(DataError, match=r"lacks data_batch_3\.bin; expected all of data_batch_1\.bin") as error:
        datasets.cifar10(tmp_path, "train")
    one_line(error)


def test_cifar_label_out_of_range(tmp_path: Path) -> None:
    content = bytearray(fill(tmp_path)["data_batch_5.bin"])
    content[RECORD] = 57
    (tmp_path / "data_batch_5.bin").write_bytes(content)
    with pytest.raises(DataError, match=r"data_batch_5\.bin: record 1 has the label 57; expected 0\.\.9"):
        datasets.cifar10(tmp_path, "train")


@pytest.mark.parametrize("damage", [lambda content: content[: len(content) // 2], lambda content: b"<html>" + content])
def test_damaged_cifar_archive(tmp_path: Path, damage: object) -> None:
    assert callable(damage)
    archive = tmp_path / "cifar-10-binary.tar.gz"
    pack(archive, inside(fill(tmp_path / "folder")))
    archive.write_bytes(damage(archive.read_bytes()))
    with pytest.raises(DataError) as error:
        datasets.cifar10(tmp_path, "train")
    line = one_line(error)
    assert f"{archive} ({archive.stat().st_size} bytes) cannot be read" in line and "sha256 c4a38c50" in line


def test_missing_cifar_says_what_to_put_where(tmp_path: Path) -> None:
    with pytest.raises(DataError) as error:
        datasets.cifar10(None, "train")
    line = one_line(error)
    assert str(tmp_path / "home/.cache/gradbus/cifar10") in line
    assert "https://www.cs.toronto.edu/~kriz/cifar-10-binary.tar.gz (sha256 c4a38c50a1bc5f3a" in line


# --- downloading ---------------------------------------------------------------------------------------------------


class FakePooch(SimpleNamespace):
    """Stands for the library: `failures` of the calls raise, the others write a small CIFAR-10 archive."""

    def __init__(self, failures: int) -> None:
        super().__init__(failures=failures, calls=[])

    def HTTPDownloader(self, timeout: float) -> float:
        return timeout

    def retrieve(self, url: str, known_hash: str, fname: str, path: Path, downloader: float) -> None:
        self.calls.append((url, known_hash, downloader))
        if len(self.calls) <= self.failures:
            raise ConnectionError("name not known\nsecond line")
        path.mkdir(parents=True, exist_ok=True)
        pack(path / fname, inside(fill(path / "made")))


def test_missing_data_is_downloaded_once_if_pooch_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    pooch = FakePooch(failures=0)
    monkeypatch.setitem(sys.modules, "pooch", pooch)
    assert len(datasets.cifar10(None, "train")["label"]) == 10
    address = "https://www.cs.toronto.edu/~kriz/cifar-10-binary.tar.gz"
    sha256 = "c4a38c50a1bc5f3a1c5537f2155ab9d68f9f25eb1ed8d9ddda3db29a59bca1dd"
    assert pooch.calls == [(address, f"sha256:{sha256}", 5.0)]


def test_a_download_that_fails_is_one_line_with_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    pooch = FakePooch(failures=9)
    monkeypatch.setitem(sys.modules, "pooch", pooch)
    with pytest.raises(DataError, match=r"CIFAR-10 is not in .* failed: name not known") as error:
        datasets.cifar10(None, "train")
    assert len(pooch.calls) == 1 and "second line" not in one_line(error)


def test_fetch_tries_twice(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    pooch = FakePooch(failures=1)
    monkeypatch.setitem(sys.modules, "pooch", pooch)
    assert datasets.fetch("cifar10") == tmp_path / "home/.cache/gradbus/cifar10"
    assert len(pooch.calls) == 2


def test_fetch_of_something_unknown() -> None:
    with pytest.raises(DataError, match="cannot fetch 'mnist'; expected fashion or cifar10"):
        datasets.fetch("mnist")
