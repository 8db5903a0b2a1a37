"""Native code: compiled where it is first needed, kept in a folder that is the user's alone, and loaded from there.

Everything compiled goes this one way, whether nvcc or the C or C++ compiler makes it:

* A package may carry the binary. It then needs neither a compiler nor a home directory.
* Else it is compiled once into `$XDG_CACHE_HOME/jax_sparse_mla` (`~/.cache` by default). The file's name holds the
  machine and digests of the sources and flags, of the versions it was compiled against, and of the compiler: what
  another machine, version or compiler made is never taken for it.
* A library runs with the user's rights. So the folder (mode 0700) and the file in it must belong to the user, others
  must not be able to write to them, and neither may be a symbolic link. Otherwise they are refused with a warning, and
  the code is compiled anew: for this process alone if the folder is refused.
* Processes and threads that need the same code at once compile it once: they wait for each other at the library's lock,
  and libraries are compiled side by side. A file appears whole, by one rename, also where a file system has no locks.
* What does not load is compiled once more.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
import importlib.machinery
import importlib.util
import os
import platform
import shlex
import shutil
import stat
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import ModuleType
from typing import TypeVar

from jax_sparse_mla import activity
from jax_sparse_mla.packages import version, warn_once

T = TypeVar("T")

# By kind: the variable that names the compiler, and what is looked for on the PATH without it.
_COMPILERS = {"nvcc": (None, ("nvcc",)), "c": ("CC", ("cc", "gcc", "clang")), "c++": ("CXX", ("c++", "g++", "clang++"))}
_COMPILERS["mosaic"] = None, ("Mosaic GPU",)
_MOSAIC = (sys.executable, "-m", "jax_sparse_mla.launch.mosaic")
_SHARED = {
    "nvcc": ("-shared", "-Xcompiler", "-fPIC"),
    "c": ("-shared", "-fPIC"),
    "c++": ("-shared", "-fPIC"),
    "mosaic": (),  # of a Pallas kernel: no library, but device code
}
_NOT_COMPILED = (".h", ".cuh", ".py")  # what the others include, or what Python imports
_FLAG_VARIABLES = ("NVCC_PREPEND_FLAGS", "NVCC_APPEND_FLAGS")  # nvcc reads them by itself

# Errors of opening a library that is cut short, of another machine, or linked against what is not there.
_NOT_LOADED = (OSError, ImportError, RuntimeError)


@dataclasses.dataclass(frozen=True)
class Library:
    """A shared library and what it is made from.

    Attributes:
      name: what its file's name begins with.
      sources: its files; headers are included by the others, which are compiled side by side.
      compiler: "nvcc", "c", "c++" or "mosaic" (`launch/mosaic.py`).
      flags: the compiler's, beside those of a shared library.
      includes: gives the folders of headers of others; asked when it is compiled.
      packages: distributions, against whose headers it is compiled.
      carried: a folder of this package that may hold the binary, or None.
    """

    name: str
    sources: tuple[Path, ...]
    compiler: str
    flags: tuple[str, ...] = ()
    includes: Callable[[], list[str]] = list
    packages: tuple[str, ...] = ()
    carried: Path | None = None


def load(library: Library, opener: Callable[[Path], T]) -> T:
    """`opener(path)` of the library: the carried one, the cached one, or one that is compiled now.

    Args:
      library: what to load.
      opener: loads a shared library, such as `ctypes.CDLL`; it raises OSError, ImportError or RuntimeError where the
        file is no library for this process.

    Raises:
      RuntimeError: there is no compiler, or it fails (with what it says); or what it made does not load.
    """
    carried = carried_path(library)
    if carried is not None and carried.is_file():
        try:
            return opener(carried)
        except _NOT_LOADED as error:
            warn_once(f"{carried} does not load ({error}); it is compiled anew")
    try:
        folder = private_folder()
        if opened := _open_cached(library, folder, opener):
            return opened
        with _locked(folder / f".{_file_name(library)}.lock"):  # another may have compiled it meanwhile
            return _open_cached(library, folder, opener) or _compile_and_open(library, folder, opener)
    except OSError as error:  # of the folder: what goes wrong with the compiler or the library is a RuntimeError
        no_folder = error
    with tempfile.TemporaryDirectory() as folder:
        try:
            opened = _compile_and_open(library, Path(folder), opener)
        except RuntimeError as error:
            raise RuntimeError(f"{error}\nNor can an earlier one serve: {no_folder}") from None
    warn_once(f"what is compiled serves this process alone: {no_folder}")
    return opened


def _open_cached(library: Library, folder: Path, opener: Callable[[Path], T]) -> T | None:
    path = _cached(library, folder)
    with contextlib.suppress(*_NOT_LOADED):
        return path and opener(path)
    return None


def _compile_and_open(library: Library, folder: Path, opener: Callable[[Path], T]) -> T:
    path = compile_to(library, folder / _file_name(library))
    try:
        return opener(path)
    except _NOT_LOADED as error:
        raise RuntimeError(f"{library.name} was compiled and does not load: {type(error).__name__}: {error}") from error


def available(library: Library) -> bool:
    """Whether `load` has something to begin with: a carried or cached binary, or a compiler."""
    if find_compiler(library.compiler) is not None or is_carried(library):
        return True
    with contextlib.suppress(OSError):
        return _cached(library, private_folder()) is not None
    return False


def python_extension(name: str) -> Callable[[Path], ModuleType]:
    """An opener of CPython's extension module of this name."""

    def opener(path: Path) -> ModuleType:
        loader = importlib.machinery.ExtensionFileLoader(name, str(path))
        module = importlib.util.module_from_spec(importlib.util.spec_from_loader(name, loader))
        loader.exec_module(module)
        return module

    return opener


# --- names ---------------------------------------------------------------------------------------------------------


def carried_path(library: Library) -> Path | None:
    """Where the package has the binary, if it has one; the sources, flags and machine must be the same."""
    return None if library.carried is None else library.carried / f"{_stem(library)}.so"


def is_carried(library: Library) -> bool:
    path = carried_path(library)
    return path is not None and path.is_file()


def _stem(library: Library) -> str:
    contents = [path.read_bytes() for path in library.sources]
    return f"{library.name}-{platform.machine()}-{_digest(library.compiler, library.flags, contents)[:12]}"


def _against(library: Library) -> str:
    """The versions: of the packages, and of Python and its headers."""
    versions = [(name, version(name)) for name in library.packages]
    return _digest(versions, platform.python_version(), sysconfig.get_config_var("SOABI"))[:8]


def _file_name(library: Library) -> str:
    """The name in the cache, of what today's compiler makes."""
    command = find_compiler(library.compiler)
    variables = [os.environ.get(name) for name in _FLAG_VARIABLES] if library.compiler == "nvcc" else []
    compiler = _digest(command, command and _version_of(command[0]), variables)[:8]
    return f"{_stem(library)}-{_against(library)}-{compiler}.so"


def _digest(*parts: object) -> str:
    return hashlib.sha256(repr(parts).encode()).hexdigest()


# --- compilers -----------------------------------------------------------------------------------------------------


def find_compiler(kind: str) -> tuple[str, ...] | None:
    """The command of a compiler: what $CC or $CXX says, or the first of its names on the PATH; None without one."""
    if kind == "mosaic":
        return _MOSAIC if find_compiler("c") else None  # its driver is C
    variable, names = _COMPILERS[kind]
    if variable is not None and (words := shlex.split(os.environ.get(variable) or "")):
        program = shutil.which(words[0])
        return (program, *words[1:]) if program else None
    program = next(filter(None, map(shutil.which, names)), None)
    return (program,) if program else None


@functools.cache
def _version_of(program: str) -> str:
    try:
        done = subprocess.run(
            [program, "--version"], stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=20
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return type(error).__name__
    return done.stdout


def compile_to(library: Library, path: Path) -> Path:
    """Compiles the library; the file appears whole or not at all, for its user alone to write. Returns its path.

    Raises:
      RuntimeError: there is no compiler, or it fails.
    """
    variable, names = _COMPILERS[library.compiler]
    if (command := find_compiler(library.compiler)) is None:
        one = f"{names[0]} is not" if len(names) == 1 else f"none of {', '.join(names)} is"
        install = f"install one, or name it in {variable}" if variable else "install the CUDA toolkit, or add its bin"
        raise RuntimeError(f"{library.name} has to be compiled, and {one} on the PATH: {install}")
    headers = [word for folder in library.includes() for word in ("-isystem", folder)]
    units = [str(source) for source in library.sources if source.suffix not in _NOT_COMPILED]
    shared = [*_SHARED[library.compiler], *library.flags]
    # The flags come last: a library among them is searched for what the source leaves open.
    with tempfile.TemporaryDirectory(dir=path.parent) as scratch:
        made = Path(scratch) / path.name
        with activity.show(f"building {library.name} with {names[0]}, which happens once on a machine"):
            if len(units) > 1:
                objects = [f"{scratch}/{i}.o" for i in range(len(units))]
                compiling = [f for f in shared if f != "-shared"]
                commands = [[*command, *headers, "-c", "-o", o, u, *compiling] for o, u in zip(objects, units)]
                with ThreadPoolExecutor(len(units)) as threads:
                    list(threads.map(functools.partial(_compile, library.name), commands))
                units = objects
            _compile(library.name, [*command, *headers, "-o", str(made), *units, *shared])
        made.chmod(0o700)
        os.replace(made, path)
    return path


def _compile(name: str, command: list[str]) -> None:
    try:
        done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True)
    except OSError as error:
        raise RuntimeError(f"{name} cannot be compiled: {command[0]} does not run: {error}") from None
    made = Path(command[command.index("-o") + 1])
    if done.returncode or not made.is_file():
        said = (done.stderr or done.stdout).strip()[-2000:] or f"nothing, with status {done.returncode}"
        raise RuntimeError(
            f"{name} cannot be compiled: {command[0]} failed. It says:\n{said}\nThe command was {shlex.join(command)}"
        )


# --- the cache -----------------------------------------------------------------------------------------------------


def private_folder() -> Path:
    """The user's cache of compiled code, made if it is not there.

    Raises:
      OSError: there is no home, the folder cannot be made, or others could have put a library into it; the message
        tells what to do.
    """
    try:
        base = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser()
    except RuntimeError as error:
        raise OSError(f"{error} Name a folder in XDG_CACHE_HOME") from None
    folder = base / "jax_sparse_mla"
    with contextlib.suppress(FileExistsError):
        base.mkdir(mode=0o700, parents=True, exist_ok=True)
        folder.mkdir(mode=0o700)
    around = base.stat()
    if around.st_mode & stat.S_IWOTH and not around.st_mode & stat.S_ISVTX:
        raise PermissionError(f"{base} is not used, everyone may replace what is in it: name another in XDG_CACHE_HOME")
    status = folder.lstat()
    if not stat.S_ISDIR(status.st_mode):
        raise PermissionError(f"{folder} is not used, it is no folder (nor may it be a symbolic link): remove it")
    if why := open_to_others(status):
        raise PermissionError(
            f"{folder} is not used, {why}, and could have put a library there: remove it, or name another place in "
            "XDG_CACHE_HOME"
        )
    if stat.S_IMODE(status.st_mode) != 0o700:
        with contextlib.suppress(OSError):  # a file system that is mounted for reading
            folder.chmod(0o700)
    return folder


def open_to_others(status: os.stat_result) -> str | None:
    """Who else than the user may have written a file or folder, in words; None where nobody."""
    if status.st_uid != os.geteuid():
        return f"user {status.st_uid} owns it"
    if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        return f"its mode {stat.S_IMODE(status.st_mode):o} lets others write"
    return None


def _cached(library: Library, folder: Path) -> Path | None:
    """The library's file, if it is the user's own; without a compiler, what any compiler made of the same."""
    if find_compiler(library.compiler) is not None:
        paths = [folder / _file_name(library)]
    else:
        paths = sorted(folder.glob(f"{_stem(library)}-{_against(library)}-*.so"))
    for path in paths:
        try:
            status = path.lstat()
        except FileNotFoundError:
            continue
        why = open_to_others(status) if stat.S_ISREG(status.st_mode) else "it is no plain file"
        if why is None:
            return path
        warn_once(f"{path} is not loaded, {why}; it is compiled anew")
    return None


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    """One process and thread at a time. The file is there while somebody holds it or waits for it.

    Without a lock, as on some network file systems, several compile and the last remains.
    """
    with contextlib.ExitStack() as held:
        while True:
            lock = held.enter_context(open(os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)))
            with contextlib.suppress(ImportError, OSError):
                import fcntl

                try:
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except BlockingIOError:
                    with activity.show("waiting for another that builds"):
                        fcntl.flock(lock, fcntl.LOCK_EX)
            with contextlib.suppress(FileNotFoundError):  # whoever held it before has removed it
                if os.path.samestat(path.stat(), os.fstat(lock.fileno())):
                    break
            held.pop_all().close()
        held.callback(path.unlink, missing_ok=True)
        yield
