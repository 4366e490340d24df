"""The code of a model of one's own: its file, and the files of a person's that this one imports."""

from __future__ import annotations

import ast
import hashlib
import importlib.util
import sysconfig
from collections.abc import Iterator
from pathlib import Path

_INSTALLED = tuple(Path(sysconfig.get_path(name)) for name in ("stdlib", "platstdlib", "purelib", "platlib"))
_OURS = Path(__file__).parents[1]  # has a hash of its own wherever it matters


def imported_code(module: str) -> str:
    """Hash a module's file and all that it imports, as `imported_texts` finds them; empty: it has no file."""
    texts, hashed = imported_texts(module), hashlib.sha256()
    for name, text in sorted(texts.items()):
        hashed.update(f"{name} {len(text)}\n".encode() + text)
    return hashed.hexdigest()[:16] if texts else ""


def imported_texts(module: str) -> dict[str, bytes]:
    """Read a module's file and those of all that it imports, directly or not, by module, but what is installed.

    Of an installed module these are the files of its own package. Nothing is imported to find them.
    """
    own, asked, texts = module.partition(".")[0], [module], dict[str, bytes]()
    while asked:
        name = asked.pop()
        file = None if not name or name in texts else _file_of(name)
        if file is None or (name != module and not _is_followed(name, file, own)):
            continue
        texts[name] = file.read_bytes()
        package = name if file.name == "__init__.py" else name.rpartition(".")[0]
        asked += [name.rpartition(".")[0], *_imported(texts[name], package)]
    return texts


def _is_followed(name: str, file: Path, own: str) -> bool:
    if _OURS in file.parents:
        return False
    return name.partition(".")[0] == own or not any(folder in file.parents for folder in _INSTALLED)


def _file_of(name: str) -> Path | None:
    """Return the file of a module; None of one without Python text, and of a name that is no module."""
    top, *rest = name.split(".")
    try:
        spec = importlib.util.find_spec(top)
    except (ImportError, ValueError):  # of `__main__`
        return None
    if spec is None:
        return None
    if not rest:
        found = [Path(spec.origin)] if spec.has_location and spec.origin else []
    else:
        bases = [Path(folder, *rest) for folder in spec.submodule_search_locations or ()]
        found = [file for base in bases for file in (base / "__init__.py", Path(f"{base}.py"))]
    return next((file for file in found if file.suffix == ".py" and file.is_file()), None)


def _imported(text: bytes, package: str) -> Iterator[str]:
    """Yield what may be the modules that a file imports, those inside functions, too."""
    try:
        tree = ast.parse(text)
    except SyntaxError:  # a file that is not imported after all
        return
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            outer = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
            base = ".".join([*outer, *([node.module] if node.module else [])])
            if base:
                yield base
                yield from (f"{base}.{alias.name}" for alias in node.names)
