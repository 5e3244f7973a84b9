"""Imports the Python modules that a configuration names. They register components from outside the
package."""

from __future__ import annotations

import importlib
import os
import sys
import traceback
from typing import Any

from titanlite.config.component import ConfigError
from titanlite.config.overrides import listed, plain
from titanlite.config.places import Locator
from titanlite.config.shipped import PACKAGE

ALLOW_IMPORTS = "--allow-imports"  # option of verbs that do not run a file's imports by default


def import_components(modules: Any, key: str, locator: Locator, allowed: bool) -> None:
    """Import the modules that a configuration lists under `key`, before the configuration is read.

    Modules may be in the current directory, as for `python -m`. Raises ConfigError if a module cannot be
    imported, or if there are modules and they are not `allowed`.
    """
    modules = listed(plain(modules))
    if not modules or not isinstance(modules, list):
        return
    names = ", ".join(map(str, modules))
    if not allowed:
        raise locator.located(
            ConfigError(f"this would run the code of {names}; if you trust it, add {ALLOW_IMPORTS}", key)
        )
    here = os.getcwd()
    if not {"", here} & set(sys.path):
        sys.path.append(here)  # last, so that no file here shadows an installed package
    for module in modules:
        try:
            importlib.import_module(str(module))
        except Exception as e:
            place = _place_of(e)
            is_complete = not place or isinstance(e, SyntaxError)
            more = "" if is_complete else f'; for the traceback: python -c "import {module}"'
            if isinstance(e, ModuleNotFoundError):
                more = f" (looked in {here}, PYTHONPATH and the installed packages)"
            text = f"cannot import {module!r}: {place}{_summary(e)}{more}"
            raise locator.located(ConfigError(text, key)) from None


def _place_of(error: Exception) -> str:
    """Return the file and line at which the import of a module failed, outside of titanlite and importlib; ""
    if the module did not begin to run."""
    if isinstance(error, SyntaxError) and error.filename:
        return f"{error.filename}:{error.lineno}: "
    others = (f"{PACKAGE}{os.sep}", importlib.import_module.__code__.co_filename, "<frozen importlib")
    frames = [f for f in traceback.extract_tb(error.__traceback__) if not f.filename.startswith(others)]
    return f"{frames[-1].filename}:{frames[-1].lineno}: " if frames else ""


def _summary(error: Exception) -> str:
    """Return the error on one line, with its type, except for types whose text is clear."""
    text = " ".join(str(error.msg if isinstance(error, SyntaxError) else error).split())
    if isinstance(error, (ImportError, ConfigError)):
        return text
    return f"{type(error).__name__}: {text}" if text else type(error).__name__
