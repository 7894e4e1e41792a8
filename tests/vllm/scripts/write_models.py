"""Write the tiny model into a folder: ``write_models.py FOLDER``. Prints where it is, as JSON."""

import json
import sys
from pathlib import Path

from tiny_llama import write_model

print(json.dumps(str(write_model(Path(sys.argv[1]) / "full"))))
