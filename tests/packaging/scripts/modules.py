"""Imports every module of the packages and prints, as JSON, which others those that cannot be imported ask for."""

import importlib
import json
import pkgutil
import sys

from skipper.dataplane.backends.ucx.engine import find_library, load

load(find_library(None))  # before the binding, as everybody does who uses it: it takes what is loaded
missing: dict[str, str | None] = {}
for package in sys.argv[1:]:
    for module in pkgutil.walk_packages(importlib.import_module(package).__path__, f"{package}."):
        if module.name.endswith(".__main__"):
            continue
        try:
            importlib.import_module(module.name)
        except ModuleNotFoundError as error:
            missing[module.name] = error.name
print(json.dumps(missing))
