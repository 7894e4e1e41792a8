"""What kvmoor takes from the environment."""

from pathlib import Path

import pytest

from kvmoor.errors import SettingsError
from kvmoor.settings import cache_directory


def test_cache_directory_is_where_xdg_says(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The cache lies in XDG_CACHE_HOME/kvmoor, and asking for it creates nothing."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "caches"))
    assert tmp_path / "caches" / "kvmoor" == cache_directory()
    assert not (tmp_path / "caches").exists()


@pytest.mark.parametrize("configured", [None, "", "relative/caches"])
def test_cache_directory_falls_back_to_home(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, configured: str | None
) -> None:
    """Without an absolute XDG_CACHE_HOME the cache lies in ~/.cache/kvmoor."""
    monkeypatch.setenv("HOME", str(tmp_path))
    if configured is None:
        monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    else:
        monkeypatch.setenv("XDG_CACHE_HOME", configured)
    assert tmp_path / ".cache" / "kvmoor" == cache_directory()


def test_no_home_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    """A user without a home, as in some containers, is told which variable to set."""

    def no_home() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(Path, "home", no_home)

    with pytest.raises(SettingsError, match="XDG_CACHE_HOME"):
        cache_directory()
