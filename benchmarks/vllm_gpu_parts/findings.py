"""What one engine's process has found so far, in a file at every moment, should it be killed."""

import json
import time
from pathlib import Path
from typing import Any


class Findings:
    """A dictionary that is written whole, beside and renamed, at each change."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.found: dict[str, Any] = {"phase": "begun"}

    def add(self, **values: Any) -> None:
        """Take note of values."""
        self.found |= values
        temporary = self._path.with_suffix(".writing")
        temporary.write_text(json.dumps(self.found))
        temporary.replace(self._path)
        told = {key: value for key, value in values.items() if not isinstance(value, list | dict)}
        print("FOUND", time.strftime("%H:%M:%S"), told or list(values), flush=True)

    @staticmethod
    def read(path: Path) -> dict[str, Any]:
        """Return what a process has found; nothing if it did not come so far."""
        try:
            found: dict[str, Any] = json.loads(path.read_text())
        except FileNotFoundError:
            return {}
        return found
