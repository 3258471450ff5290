"""Images as files: what `docker save` writes, OCI layouts as `skopeo` writes, or a plain directory; read, not trusted.

In: an image's name or path. Out: its layers in order, each a tar file, and what its configuration says. Nothing is
unpacked here: that is done inside a container.
"""

from __future__ import annotations

import hashlib
import json
import platform
import shutil
import subprocess
import tarfile
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from rlinf.sandbox.containers.protocol import ContainersError, pack

_MACHINES = {"x86_64": "amd64", "aarch64": "arm64"}


@dataclass(frozen=True, slots=True)
class Image:
    """Files of an image that containers are started from."""

    layers: tuple[str, ...]
    """Directories, the uppermost first."""
    env: Mapping[str, str]
    workdir: str
    visible: tuple[str, ...] | None
    """Directories of this machine that are seen in it besides /usr; None: nothing of the machine is."""


@dataclass(frozen=True, slots=True)
class ImageFile:
    """An image that can be read, layer by layer."""

    key: str
    """A name for its content, or its directory."""
    count: int
    """Layers."""
    layer: Callable[[int], IO[bytes]]
    """A layer as a file with a descriptor, the lowest first."""
    env: Mapping[str, str]
    workdir: str
    directory: Path | None = None
    """Its root, where it is a plain directory."""


def layers_of(name: str, images: Path | None, scratch: Path) -> ImageFile:
    """Find an image. Blocks.

    Args:
        name: of an image, or a path.
        images: a directory of images by name.
        scratch: where an image of a registry may be put.

    Raises:
        ContainersError: there is none, or it cannot be read.
    """
    plain = name.replace("/", "_").replace(":", "_")
    places = [Path(name), *(images / f"{plain}{end}" for end in (".tar", "") if images is not None)]
    path = next((place for place in places if place.exists()), None)
    if path is None:
        path = _copied(name, scratch / plain, images)
    try:
        if path.is_dir() and not (path / "index.json").exists():
            return _of_directory(path.resolve())
        return _of_layout(path)
    except (OSError, KeyError, ValueError, IndexError, tarfile.TarError) as error:
        raise ContainersError(f"image {path}: it is neither of docker save nor an OCI layout: {error!r}") from error


def _copied(name: str, target: Path, images: Path | None) -> Path:
    """Copy an image from its registry, where there is a tool for it."""
    skopeo = shutil.which("skopeo")
    if skopeo is None:
        where = images or "DIR"
        raise ContainersError(
            f"image {name!r}: there is no such file, and none in {images or 'images=DIR, which is not set'}; put it "
            f"there: docker save {name} -o {where}/NAME.tar, where `/` and `:` in the name are `_`; or install skopeo"
        )
    done = subprocess.run([skopeo, "copy", f"docker://{name}", f"oci:{target}"], capture_output=True, check=False)
    if done.returncode:
        raise ContainersError(f"image {name!r}: skopeo copy: {done.stderr.decode(errors='replace').strip()}")
    return target


def _of_directory(path: Path) -> ImageFile:
    key = "directory-" + hashlib.sha256(str(path).encode()).hexdigest()[:32]
    return ImageFile(key, 1, lambda _: pack(path, "/"), {}, "/", path)


def _of_layout(path: Path) -> ImageFile:
    """An image of a file of `docker save`, or an OCI layout, packed or not."""
    if path.is_dir():

        def content(name: str) -> IO[bytes]:
            inner = path / name
            if not inner.resolve().is_relative_to(path.resolve()):
                raise ValueError(f"{name} leads out of it")
            return inner.open("rb")

        index = json.loads((path / "index.json").read_bytes())
        manifest = _manifest(index, content)
    else:
        with tarfile.open(path) as tar:
            names = set(tar.getnames())

        def content(name: str) -> IO[bytes]:
            file = tempfile.TemporaryFile()  # noqa: SIM115 - it is the caller's
            with tarfile.open(path) as tar:
                inner = tar.extractfile(name)
                if inner is None:
                    raise ValueError(f"{name} is no file")
                shutil.copyfileobj(inner, file, 1 << 20)
            file.seek(0)
            return file

        if "index.json" in names:
            manifest = _manifest(_json(content("index.json")), content)
        else:
            saved = _json(content("manifest.json"))[0]
            manifest = {"config": saved["Config"], "layers": saved["Layers"]}
    with content(manifest["config"]) as file:
        raw = file.read()
    config = json.loads(raw).get("config") or {}
    layers: list[str] = manifest["layers"]
    env = dict(each.split("=", 1) for each in config.get("Env") or ())
    key = hashlib.sha256(raw + "\n".join(layers).encode()).hexdigest()[:32]
    return ImageFile(key, len(layers), lambda number: content(layers[number]), env, config.get("WorkingDir") or "/")


def _manifest(index: Mapping[str, Any], content: Callable[[str], IO[bytes]]) -> dict[str, Any]:
    """Paths of the configuration and the layers of the image for this machine in an OCI layout."""
    ours = _MACHINES.get(platform.machine(), platform.machine())
    entries = index["manifests"]
    fitting = [each for each in entries if each.get("platform", {}).get("architecture", ours) == ours]
    document = _json(content(_blob((fitting or entries)[0])))
    if "manifests" in document:  # an index of images for several kinds of machine
        return _manifest(document, content)
    return {"config": _blob(document["config"]), "layers": [_blob(each) for each in document["layers"]]}


def _blob(entry: Mapping[str, str]) -> str:
    return "blobs/" + entry["digest"].replace(":", "/")


def _json(file: IO[bytes]) -> Any:
    with file:
        return json.load(file)
