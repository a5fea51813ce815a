"""Python's site module imports this file at the start of every process of an examined command.

The doctor puts a copy of this file, which imports the package by its full name, into a folder at the head of
PYTHONPATH, beside a link to the package. The copy loads the hook, and then the sitecustomize that it hides, of the
distribution or of the user.
"""

import os
import sys
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


if not __package__:  # the copy, and not this file of the package
    try:
        from . import hook

        hook.install()
    finally:
        _load_hidden()
