"""Import the named modules, each in this one process, and print what failed as JSON.

Runs inside a fresh environment: standard library only.
"""

import importlib
import json
import sys
import traceback

failed = {}
for name in sys.argv[1:]:
    try:
        importlib.import_module(name)
    except BaseException as error:  # a module that exits the process has also failed
        causes = [error, error.__cause__]  # a module may raise its own error
        missing = next((e.name for e in causes if isinstance(e, ModuleNotFoundError)), None)
        failed[name] = {"missing": missing, "traceback": traceback.format_exc()}
json.dump(failed, sys.stdout)
