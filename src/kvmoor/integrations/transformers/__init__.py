"""Bring the prefix of a returning prompt back into a cache object of Hugging Face transformers."""

from importlib.metadata import PackageNotFoundError, version

from kvmoor.errors import MissingDependencyError

try:
    from kvmoor.integrations.transformers.prefix_cache import PrefixCache, RestoredPrefix, StoredPrefix
except ImportError as error:
    if (error.name or "").startswith("kvmoor"):
        raise  # a fault of our own, which installing something would not mend

    def _found(package: str) -> str:
        try:
            return f"{package} {version(package)}"
        except PackageNotFoundError:
            return f"no {package}"

    raise MissingDependencyError(
        f"the transformers integration cannot be imported ({error}); it needs torch and transformers 5, "
        f'found {_found("torch")} and {_found("transformers")}: pip install "kvmoor[transformers]"'
    ) from error

__all__ = ["PrefixCache", "RestoredPrefix", "StoredPrefix"]
