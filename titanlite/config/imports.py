"""Imports the Python modules that a configuration names, which register components from other packages."""

from __future__ import annotations

import importlib
import os
import pkgutil
import sys
import sysconfig
import traceback
from types import ModuleType
from typing import Any

from titanlite.config.component import ConfigError
from titanlite.config.locator import Locator
from titanlite.config.overrides import as_list, plain_value
from titanlite.config.schema import imports_of
from titanlite.config.shipped import PACKAGE

ALLOW_IMPORTS = "--allow-imports"  # the option of verbs that do not run a file's imports by themselves


def import_components(tree: dict[str, Any], locator: Locator, allowed: bool) -> None:
    """Import the modules that a configuration names, before the configuration is read.

    The current directory comes first on sys.path, as with `python -m`. Raises ConfigError if a module cannot
    be imported, or if there are modules and they are not `allowed`."""
    key, value = imports_of(tree)
    modules = as_list(plain_value(value))
    if not modules or not isinstance(modules, list):
        return
    names = ", ".join(map(str, modules))
    if not allowed:
        raise locator.located(
            ConfigError(f"this would run the code of {names}; if you trust it, add {ALLOW_IMPORTS}", key)
        )
    here = os.getcwd()
    if sys.path[0] not in ("", here):
        sys.path.insert(0, here)
    for module in map(str, modules):
        try:
            _check_file(importlib.import_module(module), here)
        except Exception as e:
            is_complete = isinstance(e, SyntaxError) or not _place_of(e)
            more = "" if is_complete else f'; for the traceback: python -c "import {module}"'
            if isinstance(e, ModuleNotFoundError):
                more = f" (looked in {here}, PYTHONPATH and the installed packages)"
            if module.endswith(".py") or os.sep in module:
                more = "; name a module: write package.module, without a folder and without .py"
            text = f"cannot import {module!r}: {error_with_place(e)}{more}"
            raise locator.located(ConfigError(text, key)) from None


def own_modules(name: str) -> list[str]:
    """Return the modules called `name` of titanlite's packages, such as titanlite.tools.verbs. A package adds
    verbs or components by having such a module, so that no list names the packages."""
    packages = [f"titanlite.{module.name}" for module in pkgutil.iter_modules([str(PACKAGE)]) if module.ispkg]
    return [f"{p}.{name}" for p in packages if (PACKAGE / p.rpartition(".")[2] / f"{name}.py").is_file()]


def import_folders(*folders: str) -> None:
    """Import all modules of folders of titanlite, which registers the components that they define."""
    for folder in folders:
        for module in pkgutil.iter_modules([str(PACKAGE / folder)], f"titanlite.{folder}."):
            importlib.import_module(module.name)


def import_own_components() -> bool:
    """Import the module `components` of each of titanlite's packages that has one, which registers components
    that a job may name and most jobs do not need. Returns False if all were imported before."""
    missing = [module for module in own_modules("components") if module not in sys.modules]
    for module in missing:
        importlib.import_module(module)
    return bool(missing)


def _check_file(module: ModuleType, here: str) -> None:
    """Raise ImportError if another module of the same name was imported before the one in `here`."""
    file = os.path.join(here, *module.__name__.split(".")) + ".py"
    if os.path.exists(file) and not (module.__file__ and os.path.samefile(file, module.__file__)):
        raise ImportError(f"{module.__file__ or 'a built-in module'} has the same name; rename {file}")


def error_with_place(error: Exception) -> str:
    """Return an error in one line: file and line outside of titanlite, type and message."""
    text = " ".join(str(error.msg if isinstance(error, SyntaxError) else error).split())
    if not isinstance(error, (ImportError, ConfigError)):
        text = f"{type(error).__name__}: {text}" if text else type(error).__name__
    return _place_of(error) + text


def _place_of(error: Exception) -> str:
    """Return file and line of the innermost frame in neither titanlite, Python's library nor an installed
    package, else in none of titanlite and importlib; "" if there is none."""
    if isinstance(error, SyntaxError) and error.filename:
        return f"{error.filename}:{error.lineno}: "
    places = [f"{frame.filename}:{frame.lineno}: " for frame in traceback.extract_tb(error.__traceback__)]
    others = (f"{PACKAGE}{os.sep}", importlib.import_module.__code__.co_filename, "<frozen ")
    places = [place for place in places if not place.startswith(others)]
    libraries = tuple(sysconfig.get_path(name) + os.sep for name in ("stdlib", "purelib", "platlib"))
    own = [place for place in places if not place.startswith(libraries)]
    return next(iter([*own[-1:], *places[-1:]]), "")
