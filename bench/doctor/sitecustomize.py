"""Python's site module imports this file at the start of every process of an examined command.

The doctor puts a copy of it into a folder at the head of PYTHONPATH, beside a link to its package and a file with the
package's name. It loads the hook, and then the sitecustomize that it hides, of the distribution or of the user.
"""

import os
import sys
from importlib import import_module
from importlib.machinery import PathFinder
from importlib.util import module_from_spec

_HERE = os.path.dirname(os.path.abspath(__file__))


def _load_hidden() -> None:
    others = [path for path in sys.path if os.path.abspath(path) != _HERE]
    spec = PathFinder.find_spec("sitecustomize", others)
    if spec is not None and spec.loader is not None:
        module = module_from_spec(spec)
        sys.modules["sitecustomize"] = module
        spec.loader.exec_module(module)


_NAME = os.path.join(_HERE, "doctor_package")
if os.path.exists(_NAME):  # the copy, and not this file of the package
    try:
        with open(_NAME, encoding="utf-8") as _file:
            import_module(f"{_file.read()}.hook").install()
    finally:
        _load_hidden()
