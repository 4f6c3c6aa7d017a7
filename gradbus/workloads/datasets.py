"""Where datasets lie on disk, how they are verified and read. NumPy only.

digits          shipped beside this file
Fashion-MNIST   data.dir, else /usr/share/datasets/fashion-mnist (Debian's package), else ~/.cache/gradbus/fashion-mnist
CIFAR-10        data.dir, else ~/.cache/gradbus/cifar10: the folder cifar-10-batches-bin or cifar-10-binary.tar.gz

Only a data set that is in none of its places is downloaded, if pooch is installed (the extra `data`), and what came is
checked against a known hash. Everything that is wrong is one `DataError`.
"""

from __future__ import annotations

import gzip
import hashlib
import tarfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Literal

import numpy as np

from gradbus.workloads.base import DataError

Part = Literal["train", "test"]
Images = dict[str, np.ndarray]  # {"image": (N, ...) uint8, "label": (N,) uint8}


def digits(part: Part) -> Images:
    """1,437 training or 360 test pictures, image (N, 8, 8) of 0..16, from the file shipped beside this module.

    The source is ordered by writer, so it is shuffled once, always in the same way (by sorting raw words of a Philox
    generator of key 0), and the last 360 are the test set. The same writers are in both parts.
    """
    with np.load(Path(__file__).with_name("digits.npz"), allow_pickle=False) as stored:
        images, labels = stored["images"], stored["labels"]
    words = np.random.Philox(key=np.zeros(2, np.uint64)).random_raw(len(images))
    order = np.argsort(words, kind="stable")
    chosen = order[:-360] if part == "train" else order[-360:]
    return {"image": images[chosen], "label": labels[chosen]}


# --- Fashion-MNIST -------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Idx:
    """A file of Fashion-MNIST: size and hash of its content, and the hash of upstream's compressed file."""

    name: str
    size_bytes: int
    sha256: str
    gz_md5: str


_FASHION_ADDRESS = "http://fashion-mnist.s3-website.eu-central-1.amazonaws.com/"
_FASHION_PACKAGE = Path("/usr/share/datasets/fashion-mnist")
_FASHION = {
    "train": (
        _Idx(
            "train-images-idx3-ubyte",
            47_040_016,
            "c59f468a2f672dc815687fe0f83887768d799fd8a3f3276145d20f83aa44d888",
            "8d4fb7e6c68d591d4c3dfef9ec88bf0d",
        ),
        _Idx(
            "train-labels-idx1-ubyte",
            60_008,
            "bad3541b69d912435c50bb6ba87bec294ff4f6a2e1246121d8633921760443d9",
            "25c81989df183df01b3e8a0aad5dffbe",
        ),
    ),
    "test": (
        _Idx(
            "t10k-images-idx3-ubyte",
            7_840_016,
            "5b4141f0afbad91edebe8549f8fcffe087ea10ca49f1dbef5c9a5cd8815ce37b",
            "bef4ecab320f06d8554ea6380940ec79",
        ),
        _Idx(
            "t10k-labels-idx1-ubyte",
            10_008,
            "0402a96d92fd2663957122ceb108a494c5af83dab82d92729df917d7dec38c34",
            "bb300cfdad3c16e7a12a480ee83cd310",
        ),
    ),
}


def fashion(folder: Path | None, part: Part) -> Images:
    """60,000 training or 10,000 test pictures of Fashion-MNIST, image (N, 28, 28) of 0..255.

    The four files may be compressed (.gz) or not; their content is verified. Raises `DataError`.
    """
    places = [folder] if folder is not None else [_FASHION_PACKAGE, _cache("fashion-mnist")]
    images, labels = _FASHION[part]
    place = next((place for place in places if _idx_path(place, images)), None)
    if place is None:
        wanted = " and ".join(f"{file.name}.gz (sha256 of the content {file.sha256})" for file in (images, labels))
        missing = f"Fashion-MNIST is not in {_listed(places)}; put there {wanted} from {_FASHION_ADDRESS}, "
        place = _fetch_missing("fashion", folder, missing + "or install the Debian package dataset-fashion-mnist")
    pixels = np.frombuffer(_read_idx(place, images), np.uint8, offset=16)
    return {
        "image": pixels.reshape(-1, 28, 28),
        "label": np.frombuffer(_read_idx(place, labels), np.uint8, offset=8),
    }


def _idx_path(place: Path, file: _Idx) -> Path | None:
    candidates = (place / file.name, place / f"{file.name}.gz")
    return next((path for path in candidates if path.is_file()), None)


def _read_idx(place: Path, file: _Idx) -> bytes:
    path = _idx_path(place, file)
    expected = f"expected {file.size_bytes} bytes of content with sha256 {file.sha256}"
    if path is None:
        raise DataError(f"{place} has no {file.name}.gz; {expected}, from {_FASHION_ADDRESS}{file.name}.gz")
    with _reading(path, expected), gzip.open(path) if path.suffix == ".gz" else path.open("rb") as opened:
        content = opened.read(file.size_bytes + 1)  # never more than is wanted, whatever is in there
    found = hashlib.sha256(content).hexdigest()
    if found != file.sha256:
        size = f"more than {file.size_bytes}" if len(content) > file.size_bytes else str(len(content))
        raise DataError(
            f"{path} is not the file of Fashion-MNIST: found {size} bytes of content with sha256 {found}, {expected}; "
            f"replace it by {_FASHION_ADDRESS}{file.name}.gz"
        )
    return content


# --- CIFAR-10 ------------------------------------------------------------------------------------------------------

_CIFAR_ARCHIVE = "cifar-10-binary.tar.gz"
_CIFAR_FOLDER = "cifar-10-batches-bin"
_CIFAR_ADDRESS = f"https://www.cs.toronto.edu/~kriz/{_CIFAR_ARCHIVE}"
_CIFAR_SHA256 = "c4a38c50a1bc5f3a1c5537f2155ab9d68f9f25eb1ed8d9ddda3db29a59bca1dd"
_CIFAR_FILES = {"train": tuple(f"data_batch_{number}.bin" for number in range(1, 6)), "test": ("test_batch.bin",)}
_CIFAR_NAMES = _CIFAR_FILES["train"] + _CIFAR_FILES["test"]
_RECORD_BYTES = 1 + 3 * 32 * 32  # the label, then the planes of red, green and blue by rows
_MOST_RECORDS = 100_000  # of one file; ten times the official size, so that a hostile archive cannot fill the memory


def cifar10(folder: Path | None, part: Part) -> Images:
    """The training (50,000 of the official set) or test (10,000) pictures, image (N, 32, 32, 3) of 0..255.

    Any set in the official *binary* layout is taken; number and size of the files and the labels are checked. Nothing
    in it is executed, and an archive is read in memory, so no path in it is followed. Raises `DataError`.
    """
    places = [folder] if folder is not None else [_cache("cifar10")]
    for place in places:
        found = _cifar_in(place, part)
        if found is not None:
            return found
    missing = (
        f"CIFAR-10 is not in {_listed(places)}; put there {_CIFAR_ARCHIVE} from {_CIFAR_ADDRESS} "
        f"(sha256 {_CIFAR_SHA256}) or the folder {_CIFAR_FOLDER} that it holds"
    )
    found = _cifar_in(_fetch_missing("cifar10", folder, missing), part)
    if found is None:
        raise DataError(missing)
    return found


def _cifar_in(place: Path, part: Part) -> Images | None:
    for folder in (place / _CIFAR_FOLDER, place):
        present = [name for name in _CIFAR_NAMES if (folder / name).is_file()]
        if present:
            return _cifar_folder(folder, present, part)
    archive = place / _CIFAR_ARCHIVE
    return _cifar_archive(archive, part) if archive.is_file() else None


def _cifar_folder(folder: Path, present: list[str], part: Part) -> Images:
    _all_present(folder, present)
    for name in _CIFAR_NAMES:
        _check_records(folder / name, (folder / name).stat().st_size)
    contents = {}
    for name in _CIFAR_FILES[part]:
        with _reading(folder / name, f"expected records of {_RECORD_BYTES} bytes"):
            contents[folder / name] = (folder / name).read_bytes()
    return _cifar_pictures(contents)


def _cifar_archive(archive: Path, part: Part) -> Images:
    contents = {}
    present = []
    with _reading(archive, f"expected the archive with sha256 {_CIFAR_SHA256}"), tarfile.open(archive, "r:gz") as tar:
        for member in tar:
            path = PurePosixPath(member.name)
            if not member.isfile() or path.parts != (_CIFAR_FOLDER, path.name) or path.name not in _CIFAR_NAMES:
                continue
            _check_records(archive / path, member.size)
            present.append(path.name)
            opened = tar.extractfile(member)
            if path.name in _CIFAR_FILES[part] and opened is not None:
                contents[archive / path] = opened.read()
    _all_present(archive, present)
    return _cifar_pictures(dict(sorted(contents.items())))


def _all_present(place: Path, present: list[str]) -> None:
    absent = [name for name in _CIFAR_NAMES if name not in present]
    if absent:
        raise DataError(f"{place} lacks {', '.join(absent)}; expected all of {', '.join(_CIFAR_NAMES)}")


def _check_records(path: Path, size_bytes: int) -> None:
    if size_bytes < _RECORD_BYTES or size_bytes % _RECORD_BYTES:
        raise DataError(
            f"{path} has {size_bytes} bytes; expected a multiple of {_RECORD_BYTES} (a label byte and 3072 pixel bytes "
            f"per picture), {10_000 * _RECORD_BYTES} in the official files: it is cut short or in another format"
        )
    if size_bytes > _MOST_RECORDS * _RECORD_BYTES:
        raise DataError(f"{path} has {size_bytes} bytes; expected at most {_MOST_RECORDS * _RECORD_BYTES}")


def _cifar_pictures(contents: dict[Path, bytes]) -> Images:
    images, labels = [], []
    for path, content in contents.items():
        records = np.frombuffer(content, np.uint8).reshape(-1, _RECORD_BYTES)
        wrong = np.flatnonzero(records[:, 0] > 9)
        if len(wrong):
            raise DataError(f"{path}: record {wrong[0]} has the label {records[wrong[0], 0]}; expected 0..9")
        labels.append(records[:, 0])
        images.append(records[:, 1:].reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1))
    return {"image": np.ascontiguousarray(np.concatenate(images)), "label": np.concatenate(labels)}


@contextmanager
def _reading(path: Path, expected: str) -> Iterator[None]:
    """Turn whatever a damaged file provokes into one line."""
    try:
        yield
    except (OSError, EOFError, zlib.error, tarfile.TarError) as error:
        raise DataError(f"{path} ({_size(path)}) cannot be read: {_first_line(error)}; {expected}") from error


def _size(path: Path) -> str:
    try:
        return f"{path.stat().st_size} bytes"
    except OSError:
        return "size unknown"


# --- downloading ---------------------------------------------------------------------------------------------------


def fetch(name: str, *, attempts: int = 2, timeout_s: float = 30.0) -> Path:
    """Download `fashion` or `cifar10` into its folder under ~/.cache/gradbus, and return that folder.

    A file that is there already and has the right hash stays. `timeout_s` bounds each wait for the server, not the
    whole. Needs pooch. Raises `DataError`.
    """
    files: list[tuple[str, str]]  # (address, hash)
    if name == "fashion":
        folder = _cache("fashion-mnist")
        idx = _FASHION["train"] + _FASHION["test"]
        files = [(f"{_FASHION_ADDRESS}{file.name}.gz", f"md5:{file.gz_md5}") for file in idx]
    elif name == "cifar10":
        folder = _cache("cifar10")
        files = [(_CIFAR_ADDRESS, f"sha256:{_CIFAR_SHA256}")]
    else:
        raise DataError(f"cannot fetch {name!r}; expected fashion or cifar10")
    try:
        import pooch
    except ImportError:
        raise DataError("downloading needs pooch: pip install 'gradbus[data]'") from None
    for address, known_hash in files:
        for attempt in range(1, attempts + 1):
            try:
                pooch.retrieve(
                    address,
                    known_hash,
                    fname=address.rpartition("/")[2],
                    path=folder,
                    downloader=pooch.HTTPDownloader(timeout=timeout_s),
                )
                break
            except (OSError, ValueError) as error:  # no connection, no space; a wrong hash
                if attempt == attempts:
                    raise DataError(f"downloading {address} failed: {_first_line(error)}") from error
    return folder


def _fetch_missing(name: str, folder: Path | None, missing: str) -> Path:
    """The folder after a download, if one is wanted and works; otherwise `DataError(missing)`."""
    if folder is not None:  # the user said where it lies: do not get it from elsewhere behind their back
        raise DataError(f"{missing} (data.dir is {folder})")
    try:
        return fetch(name, attempts=1, timeout_s=5.0)
    except DataError as error:
        raise DataError(f"{missing} ({error})") from error


def _cache(name: str) -> Path:
    return Path.home() / ".cache" / "gradbus" / name


def _listed(places: list[Path]) -> str:
    return " or ".join(str(place) for place in places)


def _first_line(error: BaseException) -> str:
    """The first line of the error at the root: HTTP libraries wrap the cause several times."""
    while error.__cause__ or error.__context__:
        error = error.__cause__ or error.__context__ or error
    return next((line.strip()[:300] for line in str(error).splitlines() if line.strip()), type(error).__name__)
