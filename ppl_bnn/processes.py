"""What is sent to other processes, and read there.

A model file that was loaded by its location has no name by which another process could import it, and what joblib
leaves running between two calls looks for modules where the first one looked. So the module of the model travels by
value, and everything else with the places where this process finds its modules.
"""

from __future__ import annotations

import importlib
import pickle
import sys
from functools import partial
from typing import Any


def written(payload: Any, model: Any) -> bytes:
    """`payload`, which holds `model`, as bytes for `read` in another process of this machine.

    Errors: whatever pickling raises where something in it cannot be sent (an open file, a lock, a generator).
    """
    return pickle.dumps((list(sys.path), _pickled(payload, model)))


def read(blob: bytes) -> Any:
    """What `written` was given. Only for bytes that another process of the same program wrote."""
    places, payload = pickle.loads(blob)
    sys.path.extend([place for place in places if place not in sys.path])
    return pickle.loads(payload)


def _pickled(payload: Any, model: Any) -> bytes:
    cloudpickle = _cloudpickle()
    function = model
    while isinstance(function, partial):
        function = function.func
    module = sys.modules.get(getattr(function, "__module__", None) or "")
    ours = module is not None and module.__name__.split(".")[0] == __name__.split(".")[0]
    if module is None or ours or module.__name__ == "__main__":
        return cloudpickle.dumps(payload)
    if module.__name__ in cloudpickle.list_registry_pickle_by_value():
        return cloudpickle.dumps(payload)
    cloudpickle.register_pickle_by_value(module)
    try:
        return cloudpickle.dumps(payload)
    finally:
        cloudpickle.unregister_pickle_by_value(module)


def _cloudpickle() -> Any:
    try:
        import cloudpickle
    except ImportError:
        # joblib before 1.6 carries its own.
        cloudpickle = importlib.import_module("joblib.externals.cloudpickle")
    return cloudpickle
