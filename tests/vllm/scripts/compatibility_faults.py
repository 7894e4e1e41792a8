"""Take something away from vLLM, and print what the plugin says to it: ``compatibility_faults.py FOLDER WHAT``."""

import json
import sys
from importlib import import_module

import vllm.v1.kv_offload.base as offload

import vllm
from kvmoor.errors import UnsupportedError

FAULTS = {
    "name": lambda: delattr(offload, "PrepareStoreOutput"),
    "method": lambda: delattr(offload.OffloadingManager, "reset_cache"),
    "parameter": lambda: setattr(offload, "TransferResult", lambda job_id, success: (job_id, success)),
    "version": lambda: setattr(vllm, "__version__", "0.99.1"),
    "nothing": lambda: None,
}

# What needs these names in vLLM itself has them from here on.
import_module("vllm.distributed.kv_transfer.kv_connector.v1.offloading_connector")
FAULTS[sys.argv[2]]()
try:
    import_module("kvmoor.integrations.vllm.compatibility")
except UnsupportedError as error:
    print(json.dumps(str(error)))
else:
    print(json.dumps(""))
