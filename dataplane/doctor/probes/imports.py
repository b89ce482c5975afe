"""Whether a module can be imported: ``imports.py MODULE``. Prints {"file": ...} or {"error": ...}."""

import importlib
import json
import sys


def main() -> None:
    """Import it; a module of a compiled package may fail for want of a library."""
    try:
        module = importlib.import_module(sys.argv[1])
    except ImportError as error:
        json.dump({"error": str(error)}, sys.stdout)
    else:
        json.dump({"file": getattr(module, "__file__", None)}, sys.stdout)


if __name__ == "__main__":
    main()
