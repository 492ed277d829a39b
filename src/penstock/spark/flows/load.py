"""Reading a file of flows: the user's module, run once, and the flows that it declares.

Whatever the module raises comes out as one `FlowFileError` that begins with the file and the line
of the user's code, without the frames of anyone else.
"""

from __future__ import annotations

import hashlib
import importlib.util
import sys
import traceback
from pathlib import Path
from types import ModuleType
from typing import Final

import penstock
from penstock.errors import PenstockError
from penstock.spark.flows.declare import Collected, Flow, collecting
from penstock.spark.flows.errors import FlowFileError
from penstock.spark.places import place, raised_at, told

_OURS: Final = Path(penstock.__file__).resolve().parent


class NeedsSparkError(FlowFileError):
    """The file can be read only where a Spark session is: it makes columns as it is read."""


def load(file: Path) -> Collected:
    """The flows of a file, in the order in which it declares them."""
    path = _checked(file)
    folder = str(path.parent)
    # As for a script: modules beside the file can be imported.
    if folder not in sys.path:
        sys.path.insert(0, folder)
    with collecting() as declared:
        module = _run(path)
    for value in vars(module).values():
        # Flows of a module that had been imported before are not declared anew.
        if isinstance(value, Flow) and value not in declared:
            declared.append(value)
    if not declared:
        raise FlowFileError(
            f"{file} declares no flows",
            advice="Decorate a function with @flow(inputs=..., output=...), from penstock.spark.",
        )
    return Collected.of(declared)


def _checked(file: Path) -> Path:
    if file.is_dir():
        raise FlowFileError(f"{file} is a folder", advice="Name the Python file in it.")
    if not file.exists():
        raise FlowFileError(
            f"there is no file {file}", advice="Name a Python file that declares flows."
        )
    return file.resolve()


def _run(path: Path) -> ModuleType:
    # A name of its own for each path, so that it neither hides nor is hidden by another module.
    digest = hashlib.sha256(str(path).encode()).hexdigest()[:8]
    name = f"penstock_flows_{digest}_{path.stem.replace('.', '_').replace('-', '_')}"
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise FlowFileError(f"{path} is not a Python file", advice="Its name must end in .py.")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except PenstockError as error:
        where = raised_at(error) or str(path)
        raise FlowFileError(told(where, str(error)), advice=error.advice) from error
    except SyntaxError as error:
        where = place(error.filename or str(path), error.lineno or 1)
        raise FlowFileError(f"{where}: {error.msg}", advice="Mend the file.") from error
    except (Exception, SystemExit) as error:
        where = raised_at(error) or str(path)
        if _wants_spark(error):
            raise NeedsSparkError(f"{where}: {error}", advice="Start Spark first.") from error
        what = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
        raise FlowFileError(f"{where}: {what}", advice=_advice(error)) from error
    _send_by_value(module, path.parent)
    return module


def _wants_spark(error: BaseException) -> bool:
    """Whether code asked Java for something, such as a column, before there was a session."""
    if "SESSION_OR_CONTEXT_NOT_EXISTS" in str(error):
        return True
    frames = traceback.extract_tb(error.__traceback__)
    in_spark = bool(frames) and "pyspark" in Path(frames[-1].filename).parts
    return isinstance(error, AssertionError) and in_spark


def _advice(error: BaseException) -> str:
    if isinstance(error, ModuleNotFoundError):
        return f"Install {error.name} beside Penstock, or put the module in the same folder."
    return "Mend the file."


def _send_by_value(module: ModuleType, folder: Path) -> None:
    """Spark's Python workers get functions of the file, and of modules beside it, whole.

    They could not import the file by the name it has here, on other machines not the modules
    either, and many cannot be imported in a worker, for they make columns as they are read.
    """
    from pyspark import cloudpickle

    beside = [other for other in list(sys.modules.values()) if _is_beside(other, folder)]
    for each in (module, *beside):
        cloudpickle.register_pickle_by_value(each)  # type: ignore[no-untyped-call]


def _is_beside(module: ModuleType, folder: Path) -> bool:
    file = getattr(module, "__file__", None)
    if file is None or module.__name__ == "__main__":
        return False
    return _is_users(Path(file), folder)


def _is_users(file: Path, folder: Path) -> bool:
    """Whether a file in a folder, or below it, is the user's own."""
    if not file.is_relative_to(folder):
        return False
    # A virtual environment may lie in the same folder, and so may we, in a checkout.
    installed = "site-packages" in file.relative_to(folder).parts
    return not installed and not file.is_relative_to(_OURS)
